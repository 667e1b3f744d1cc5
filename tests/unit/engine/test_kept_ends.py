"""Ends that are kept: until clients know them, the records of sequences that ended by themselves outlive the engine."""

from dataclasses import replace

import pytest
from tests.unit.engine.test_batchers import handed_off, step
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.clock import ManualClock
from weir.core.life import Attempt, FinishReason
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.loop import EngineCore, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    AddSequence,
    Arrival,
    EngineReport,
    Failure,
    FailureReason,
    PageBundle,
    ReleaseEnds,
    SequenceEnded,
    SequenceKey,
    TakenOver,
)
from weir.kv.records.record import SequenceSnapshot
from weir.testing.runner import HashRunner

PAGES = tuple(range(64, 128))


@pytest.fixture
def records() -> Records:
    return Records(128, 16)


def decoding(records: Records, num_slots: int = 4, max_kept_ends: int = 3) -> RunningBatcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(PAGES, tuple(range(8, 8 + num_slots))))
    return RunningBatcher(limits(max_kept_ends=max_kept_ends), pool, records.open)


def key_of(index: int) -> SequenceKey:
    return SequenceKey(f"{index:032x}", Attempt())


def run_one(batcher: Batcher, index: int, now_s: float = 0.0, max_tokens: int = 2) -> SequenceEnded:
    """A prompt from its arrival to its end."""
    batcher.add(Arrival(params((1, 2, 3), index, max_tokens=max_tokens)))
    for _ in range(max_tokens):
        step(batcher, now_s)
    (end,) = [event for event in batcher.take_events() if isinstance(event, SequenceEnded)]
    return end


def kept(batcher: Batcher, records: Records) -> list[SequenceSnapshot]:
    snapshots = [records.open(slot).read() for slot in batcher.kept_ends.slots]
    assert batcher.check_integrity() == ()
    return [snapshot for snapshot in snapshots if snapshot is not None]


def test_an_end_keeps_slot_and_record_and_no_page(records: Records) -> None:
    batcher = decoding(records)
    end = run_one(batcher, 1)
    assert end == SequenceEnded(key_of(1), FinishReason.LENGTH, is_kept=True)
    (snapshot,) = kept(batcher, records)
    assert (snapshot.finish_reason, len(snapshot.output_token_ids)) == (FinishReason.LENGTH, 2)
    assert snapshot.block_table == ()
    assert batcher.is_idle
    assert (batcher.load.num_kept_ends, batcher.load.num_running, batcher.load.num_used_pages) == (1, 0, 0)
    bundle = batcher.pool.take_all_free()
    assert sorted(bundle.all_page_ids) == list(PAGES)
    assert len(bundle.slots) == 3


def test_a_released_end_gives_its_slot_back_and_its_record_is_gone(records: Records) -> None:
    batcher = decoding(records)
    run_one(batcher, 1)
    (slot,) = batcher.kept_ends.slots
    batcher.kept_ends.release([key_of(7), key_of(1), key_of(1)])
    assert kept(batcher, records) == []
    assert records.open(slot).read() is None
    assert len(batcher.pool.take_all_free().slots) == 4


def test_of_more_than_may_be_kept_the_oldest_go_first(records: Records) -> None:
    batcher = decoding(records, num_slots=8)
    for index in range(5):
        run_one(batcher, index)
    assert [int(snapshot.params.request_id, 16) for snapshot in kept(batcher, records)] == [2, 3, 4]


def test_none_is_kept_where_nobody_would_release_it(records: Records) -> None:
    batcher = decoding(records, max_kept_ends=0)
    assert run_one(batcher, 1) == SequenceEnded(key_of(1), FinishReason.LENGTH)
    assert len(batcher.kept_ends) == 0
    assert records.open(11).read() is None


def test_a_newcomer_waits_a_moment_for_a_slot_of_the_arena_and_then_gets_that_of_the_oldest_end(
    records: Records,
) -> None:
    batcher = decoding(records, num_slots=2)
    for index in (1, 2):
        run_one(batcher, index)
    batcher.add(Arrival(params((4, 5), 3, max_tokens=9)))
    assert step(batcher, 1.0) is None
    wanted = batcher.wanted()
    assert wanted is not None
    assert (wanted.num_slots, wanted.least_slots) == (1, 0)
    assert batcher.next_deadline_s == pytest.approx(1.05)
    assert step(batcher, 1.04) is None
    assert len(kept(batcher, records)) == 2
    assert step(batcher, 1.06) is not None
    assert [snapshot.params.request_id for snapshot in kept(batcher, records)] == [f"{2:032x}"]
    assert batcher.counters.failed == 0


def test_an_arena_without_slots_is_still_asked_for_the_pages_of_a_newcomer(records: Records) -> None:
    batcher = decoding(records, num_slots=1)
    run_one(batcher, 1)
    batcher.pool.take_all_free()
    batcher.add(Arrival(params((4, 5), 3)))
    step(batcher, 1.0)
    wanted = batcher.wanted()
    assert wanted is not None
    assert (wanted.least_pages, wanted.least_slots) == (1, 0)


def test_what_is_cancelled_or_fails_leaves_no_record(records: Records) -> None:
    batcher = decoding(records)
    for index in (1, 2):
        batcher.add(Arrival(params((1, 2, 3), index, max_tokens=9)))
    step(batcher)
    batcher.cancel(key_of(1))
    batcher.fail(key_of(2), Failure(FailureReason.INTERNAL, "broken"))
    ends = [event for event in batcher.take_events() if isinstance(event, SequenceEnded)]
    assert [end.is_kept for end in ends] == [False, False]
    assert kept(batcher, records) == []
    assert all(records.open(slot).read() is None for slot in range(8, 12))


def ended_record(records: Records, slot: int, index: int) -> Arrival:
    """What a dead worker left of a sequence that had ended, as another one gets it."""
    record = records.open(slot)
    record.begin(params((1, 2, 3), index, max_tokens=9))
    for token_id in (7, 8):
        record.append_token(token_id)
    record.end(FinishReason.STOP)
    snapshot = record.read()
    assert snapshot is not None
    return Arrival.of_record(slot, record, snapshot)


def test_an_ended_record_that_is_taken_over_is_told_and_kept_and_not_computed(records: Records) -> None:
    batcher = decoding(records)
    arrival = ended_record(records, 2, 5)
    assert arrival.output_token_ids == (7, 8)
    batcher.add(arrival)
    assert batcher.take_events() == (
        TakenOver(key_of(5), ()),
        SequenceEnded(key_of(5), FinishReason.STOP, is_kept=True),
    )
    assert batcher.decide(0.0) is None
    (snapshot,) = kept(batcher, records)
    assert (snapshot.finish_reason, snapshot.output_token_ids) == (FinishReason.STOP, (7, 8))
    batcher.add(arrival)
    assert batcher.take_events() == (), "it is here already"
    assert batcher.check_integrity() == ()


def test_the_last_token_ends_a_sequence_whose_worker_died_before_it_could_say_so(records: Records) -> None:
    batcher = decoding(records)
    arrival = handed_off(records, 2, params((1, 2, 3), 5, max_tokens=1))
    batcher.add(arrival)
    assert batcher.take_events()[-1] == SequenceEnded(key_of(5), FinishReason.LENGTH, is_kept=True)
    (snapshot,) = kept(batcher, records)
    assert snapshot.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_its_first_token_ends_is_kept_by_its_prefill_worker(records: Records) -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(PAGES, (8,)))
    batcher = PrefillBatcher(limits(max_kept_ends=1), pool, records.open)
    assert run_one(batcher, 1, max_tokens=1).is_kept
    (snapshot,) = kept(batcher, records)
    assert len(snapshot.output_token_ids) == 1


def test_a_row_that_a_static_batch_holds_is_not_kept(records: Records) -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(PAGES, (8, 9)))
    holding = RunningSettings(JoinSettings(Batching.STATIC_HOLD))
    batcher = RunningBatcher(limits(max_kept_ends=2), pool, records.open, holding)
    for index, max_tokens in ((1, 2), (2, 4)):
        batcher.add(Arrival(params((1, 2, 3), index, max_tokens=max_tokens)))
    for _ in range(5):
        step(batcher)
        assert batcher.check_integrity() == ()
    ends = [event for event in batcher.take_events() if isinstance(event, SequenceEnded)]
    assert [end.is_kept for end in ends] == [False, False]
    assert len(batcher.pool.take_all_free().slots) == 2


class Core:
    """An engine, turned by hand, with one ended sequence that it keeps."""

    def __init__(self, records: Records) -> None:
        self.clock = ManualClock()
        self.reports: list[EngineReport] = []
        self.batcher = decoding(records, num_slots=1)
        runner = HashRunner(128, VOCAB_SIZE)
        self.engine = EngineCore(self.batcher, runner, self.reports.append, LoopSettings(8, 0.5), self.clock)
        self.engine.apply(AddSequence(Arrival(params((1, 2, 3), 1, max_tokens=1))))
        self.engine.turn()
        self.engine.turn()
        assert len(self.batcher.kept_ends) == 1

    @property
    def returned_slots(self) -> list[int]:
        return [slot for report in self.reports for slot in report.surplus.slots]


@pytest.mark.parametrize("idle_s", [0.1, 5.0])
def test_an_idle_engine_returns_the_slot_of_an_end_that_is_released(records: Records, idle_s: float) -> None:
    core = Core(records)
    core.clock.advance(idle_s)
    core.engine.turn()
    assert core.returned_slots == []
    core.engine.apply(ReleaseEnds((key_of(1),)))
    core.engine.turn()
    deadline_s = core.engine.next_deadline_s
    if deadline_s is not None:
        core.clock.advance(deadline_s - core.clock.now_s())
        core.engine.turn()
    assert core.returned_slots == [8]
    assert core.reports[-1].integrity_errors == ()


def test_an_engine_that_is_closed_in_order_keeps_no_end(records: Records) -> None:
    core = Core(records)
    core.engine.close()
    assert core.returned_slots == [8]
    assert core.reports[-1].integrity_errors == ()
    assert records.open(8).read() is None


def test_a_second_attempt_of_a_request_whose_first_is_kept_ends_beside_it(records: Records) -> None:
    batcher = decoding(records)
    run_one(batcher, 1)
    batcher.add(Arrival(replace(params((1, 2, 3), 1, max_tokens=1), attempt=Attempt(2, 0))))
    step(batcher)
    assert [snapshot.params.attempt for snapshot in kept(batcher, records)] == [Attempt(), Attempt(2, 0)]
