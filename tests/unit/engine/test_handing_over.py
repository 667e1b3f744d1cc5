"""What an engine gives away while its worker is emptied, in whatever state it is, and how it goes on with what nobody
takes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.engine.test_preemption import Decoding
from tests.unit.engine.world import params

from weir.core.life import FinishReason
from weir.engine.batching.own_rules import Batching
from weir.engine.messages import (
    Arrival,
    Event,
    Failure,
    FailureReason,
    HandOffReady,
    PageBundle,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
    TokenSampled,
)
from weir.engine.sequence import Sequence, Stage
from weir.engine.waits import NO_WAITS

MAX_TOKENS = 12
STEP_S = 0.05
UNTAKEN = Failure(FailureReason.DRAINING, "nobody takes it")
GIVEN_SLOT = 1


def without_waits(events: list[Event]) -> list[Event]:
    """How long each waited is tests/unit/engine/test_preemption.py's."""
    return [replace(event, waits=NO_WAITS) if isinstance(event, SequenceEnded) else event for event in events]


class Giver:
    """A decode engine with a sequence in slot 1 that is to be given away, and others; all that came out of it."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.batcher = decoding.batcher
        self.now_s = 0.0
        self.keys: dict[int, SequenceKey] = {}
        self.events: list[Event] = []

    @property
    def key(self) -> SequenceKey:
        return self.keys[GIVEN_SLOT]

    @property
    def sequence(self) -> Sequence:
        return self.batcher._sequences[self.key]

    def add(self, slot: int, lane_priority: int = 0, max_tokens: int = MAX_TOKENS) -> None:
        self.keys[slot] = self.decoding.add(slot, lane_priority, max_tokens)

    def steps(self, number: int) -> list[list[int]]:
        """The slots that were computed in each. What sequences used is free again after it."""
        computed = []
        for _ in range(number):
            self.now_s += STEP_S
            computed += self.decoding.steps(1, self.now_s)
            pages = self.batcher.pool.take_used().all_page_ids
            self.decoding.runner.spoil(pages)
            self.batcher.pool.give(PageBundle(pages))
            self.collect()
        return computed

    def run_to_the_end(self) -> None:
        for _ in range(200):
            if self.batcher.is_idle:
                return
            self.steps(1)
        raise AssertionError("a sequence never ends")

    def collect(self) -> list[Event]:
        """What is new."""
        assert self.batcher.check_integrity() == ()
        events = self.batcher.take_events()
        self.events += events
        return list(events)

    def hand_over(self, *, with_preempted: bool = True) -> dict[int, HandOffReady]:
        """What is ready to be given away, by its slot."""
        self.batcher.hand_over(with_preempted=with_preempted)
        return {event.slot: event for event in self.collect() if isinstance(event, HandOffReady)}

    def tokens(self) -> dict[SequenceKey, list[int]]:
        tokens: dict[SequenceKey, list[int]] = {}
        for event in self.events:
            if isinstance(event, TokenSampled):
                tokens.setdefault(event.key, []).append(event.token_id)
                assert len(tokens[event.key]) == event.index, "in order; the first one came with the sequence"
        return tokens


def running(tmp_path: Path) -> Giver:
    giver = Giver(Decoding(tmp_path, num_free_pages=8))
    for slot in (0, GIVEN_SLOT):
        giver.add(slot)
    assert giver.steps(2) == [[0, 1], [0, 1]]
    return giver


def _preempted(decoding: Decoding) -> Giver:
    giver = Giver(decoding)
    for slot in (0, GIVEN_SLOT):
        giver.add(slot)
    giver.steps(12)
    assert giver.sequence.is_preempted
    return giver


def swapped_out(tmp_path: Path) -> Giver:
    giver = _preempted(Decoding(tmp_path, num_free_pages=0))
    assert len(giver.sequence.swap_slots) == 1
    return giver


def dropped(tmp_path: Path) -> Giver:
    return _preempted(Decoding(tmp_path, num_free_pages=0, num_swap_slots=0))


def paused(tmp_path: Path) -> Giver:
    giver = Giver(Decoding(tmp_path, num_free_pages=8, max_num_seqs=2))
    for slot in (0, GIVEN_SLOT):
        giver.add(slot)
    giver.steps(1)
    giver.add(2, lane_priority=2)
    assert giver.steps(1) == [[0, 2]]
    assert giver.sequence.stage is Stage.WAITING
    return giver


def just_come(tmp_path: Path) -> Giver:
    giver = Giver(Decoding(tmp_path, num_free_pages=8))
    for slot in (0, GIVEN_SLOT):
        giver.add(slot)
    assert giver.sequence.stage is Stage.WAITING
    return giver


MakeGiver = Callable[[Path], Giver]
every_state = pytest.mark.parametrize("make", [running, swapped_out, dropped, paused, just_come])
every_preempted = pytest.mark.parametrize("make", [swapped_out, dropped])


@every_state
def test_what_is_ready_is_in_its_record_and_is_not_computed_any_more(tmp_path: Path, make: MakeGiver) -> None:
    giver = make(tmp_path)
    sequence = giver.sequence
    ready = giver.hand_over()[GIVEN_SLOT]
    snapshot = giver.decoding.snapshot(GIVEN_SLOT)
    assert ready == HandOffReady(giver.key, GIVEN_SLOT, snapshot.block_table)
    assert snapshot.output_token_ids == tuple(sequence.token_ids[sequence.num_prompt_tokens :])
    assert snapshot.num_computed_tokens == sequence.num_computed
    assert not any(GIVEN_SLOT in slots for slots in giver.steps(3))
    assert giver.hand_over() == {}, "once"


@every_state
def test_what_was_taken_over_leaves_nothing_here(tmp_path: Path, make: MakeGiver) -> None:
    giver = make(tmp_path)
    ready = giver.hand_over()
    for one in ready.values():
        giver.batcher.forget(one.key, is_adoption=True)
    assert giver.collect() == [SequenceForgotten(one.key, is_adoption=True) for one in ready.values()]
    counters = giver.batcher.counters
    assert (counters.handed_over, counters.handed_off) == (len(ready), 0)
    assert giver.batcher.is_idle
    assert giver.batcher.pool.num_held_pages == giver.batcher.pool.num_free_pages
    assert giver.steps(1) == [[]]
    assert giver.decoding.snapshot(GIVEN_SLOT).block_table == ready[GIVEN_SLOT].page_ids, "the record is another's"
    giver.batcher.take_back(giver.key)
    assert giver.batcher.is_idle, "a late answer changes nothing"
    assert giver.batcher._stages_before == {}


@every_state
def test_what_nobody_takes_goes_on_with_the_same_tokens(tmp_path: Path, make: MakeGiver) -> None:
    giver, undisturbed = make(tmp_path), make(tmp_path)
    stage, is_preempted = giver.sequence.stage, giver.sequence.is_preempted
    ready = giver.hand_over()
    assert set(ready) == set(giver.keys)
    assert giver.steps(2) == [[], []]
    for one in ready.values():
        giver.batcher.take_back(one.key)
        assert giver.batcher.check_integrity() == ()
    assert (giver.sequence.stage, giver.sequence.is_preempted) == (stage, is_preempted)
    giver.run_to_the_end()
    undisturbed.run_to_the_end()
    assert giver.tokens() == undisturbed.tokens()
    assert {len(tokens) for tokens in giver.tokens().values()} == {MAX_TOKENS - 1}
    assert giver.batcher.counters.finished == len(ready)
    assert giver.batcher.counters.handed_over == 0


@every_state
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_cancel_meanwhile_counts_once_nobody_took_it(tmp_path: Path, make: MakeGiver, is_refused: bool) -> None:
    giver = make(tmp_path)
    giver.hand_over()
    giver.batcher.cancel(giver.key)
    assert giver.collect() == [], "it may be another's by now"
    if is_refused:
        giver.batcher.fail(giver.key, UNTAKEN)
    else:
        giver.batcher.take_back(giver.key)
    assert without_waits(giver.collect()) == [SequenceEnded(giver.key, FinishReason.CANCELLED)]
    assert giver.decoding.records.open(GIVEN_SLOT).read() is None


@every_state
def test_a_cancel_of_what_was_taken_over_is_its_new_workers(tmp_path: Path, make: MakeGiver) -> None:
    giver = make(tmp_path)
    giver.hand_over()
    giver.batcher.cancel(giver.key)
    giver.batcher.forget(giver.key, is_adoption=True)
    assert giver.collect() == [SequenceForgotten(giver.key, is_adoption=True)]
    assert giver.decoding.snapshot(GIVEN_SLOT).finish_reason is None


@every_state
def test_what_nobody_takes_in_the_end_fails_and_is_freed(tmp_path: Path, make: MakeGiver) -> None:
    giver = make(tmp_path)
    ready = giver.hand_over()
    giver.batcher.fail_all(UNTAKEN)
    assert giver.collect() == [], "their hand-overs are under way"
    for one in ready.values():
        giver.batcher.fail(one.key, UNTAKEN)
    assert without_waits(giver.collect()) == [SequenceEnded(one.key, failure=UNTAKEN) for one in ready.values()]
    assert giver.batcher.is_idle
    assert giver.decoding.records.open(GIVEN_SLOT).read() is None


@every_preempted
def test_a_preempted_one_stays_as_long_as_others_would_have_to_compute_it_again(
    tmp_path: Path, make: MakeGiver
) -> None:
    giver, undisturbed = make(tmp_path), make(tmp_path)
    ready = giver.hand_over(with_preempted=False)
    assert set(ready) == {0}
    giver.batcher.forget(ready[0].key, is_adoption=True)
    giver.collect()
    giver.batcher.pool.give(PageBundle((62, 63)))
    giver.run_to_the_end()
    undisturbed.run_to_the_end()
    assert giver.tokens()[giver.key] == undisturbed.tokens()[giver.key]


def test_the_slots_of_the_swap_file_are_free_for_others_once_it_is_gone(tmp_path: Path) -> None:
    giver = swapped_out(tmp_path)
    preemption = giver.batcher._preemption
    num_free_before = len(preemption._free_swap_slots)
    giver.hand_over()
    giver.batcher.forget(giver.key, is_adoption=True)
    giver.collect()
    assert len(preemption._free_swap_slots) == num_free_before + 1


def test_time_that_one_waits_for_an_answer_is_no_wait_for_a_page(tmp_path: Path) -> None:
    giver = Giver(Decoding(tmp_path, num_free_pages=0, max_preemptions=0))
    giver.add(GIVEN_SLOT)
    giver.steps(3)
    assert giver.sequence.stalled_since_s is not None
    giver.hand_over()
    giver.now_s += 2 * giver.batcher.limits.max_stall_s
    assert giver.steps(1) == [[]]
    giver.batcher.take_back(giver.key)
    assert giver.steps(1) == [[]]
    giver.batcher.pool.give(PageBundle((63,)))
    giver.run_to_the_end()
    assert giver.batcher.counters.finished == 1


def test_a_page_that_it_got_after_its_last_step_is_given_away_with_it(tmp_path: Path) -> None:
    giver = running(tmp_path)
    page_ids = giver.batcher.pool.try_take(1)
    assert page_ids is not None
    giver.sequence.grow(page_ids[0])
    ready = giver.hand_over()[GIVEN_SLOT]
    assert ready.page_ids[-1] == page_ids[0]
    assert giver.decoding.snapshot(GIVEN_SLOT).block_table == ready.page_ids


def test_a_prompt_half_read_and_one_that_waits_stay(tmp_path: Path) -> None:
    giver = Giver(Decoding(tmp_path, num_free_pages=8))
    giver.batcher.pool.give(PageBundle((), (8,)))
    giver.batcher.add(Arrival(params(tuple(range(40)), 8)))
    giver.batcher.add(Arrival(params(tuple(range(40)), 9)))
    assert giver.steps(1) == [[8]]
    assert giver.hand_over() == {}
    assert giver.steps(1) == [[8]]


def test_nothing_is_put_in_order_again_where_nothing_can_be_given_away(tmp_path: Path) -> None:
    giver = swapped_out(tmp_path)
    giver.batcher.cancel(giver.keys[0])
    order = giver.batcher._ranked()
    giver.hand_over(with_preempted=False)
    assert giver.batcher._ranked() is order


def static(tmp_path: Path, batching: Batching) -> Giver:
    """The sequence in slot 0 has ended, that in slot 1 runs."""
    giver = Giver(Decoding(tmp_path, num_free_pages=8, batching=batching))
    giver.add(0, max_tokens=3)
    giver.add(GIVEN_SLOT)
    giver.steps(3)
    assert giver.keys[0] not in giver.batcher._sequences
    return giver


@pytest.mark.parametrize("batching", [Batching.STATIC, Batching.STATIC_HOLD])
def test_rows_that_a_static_batch_holds_are_freed_with_the_last_that_was_given_away(
    tmp_path: Path, batching: Batching
) -> None:
    giver = static(tmp_path, batching)
    giver.hand_over()
    giver.batcher.forget(giver.key, is_adoption=True)
    giver.collect()
    assert giver.steps(3) == [[], [], []]
    assert giver.batcher.pool.num_held_pages == giver.batcher.pool.num_free_pages


@pytest.mark.parametrize("batching", [Batching.STATIC, Batching.STATIC_HOLD])
def test_a_static_batch_of_which_nobody_takes_the_rest_goes_on(tmp_path: Path, batching: Batching) -> None:
    giver, undisturbed = static(tmp_path, batching), static(tmp_path, batching)
    giver.hand_over()
    giver.steps(2)
    giver.batcher.take_back(giver.key)
    giver.run_to_the_end()
    undisturbed.run_to_the_end()
    assert giver.tokens() == undisturbed.tokens()
    assert giver.batcher.pool.num_held_pages == giver.batcher.pool.num_free_pages
