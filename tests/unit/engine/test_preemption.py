"""Who gives way to whom, and what is left of him meanwhile."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.engine.test_batchers import NUM_PAGES, RECORD_SLOTS, handed_off
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.life import FinishReason, SchedulingParams
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.memory.swapping import HostPages, PageSwapper, swapping_runner
from weir.engine.messages import Failure, FailureReason, PageBundle, SequenceEnded, SequenceKey
from weir.engine.plan import LaunchingRunner, StepPlan
from weir.kv.memory.swap import SwapFile
from weir.kv.records.record import SequenceSnapshot
from weir.testing.runner import HashRunner, LaunchingHashRunner

NUM_SWAP_SLOTS = 8


class Decoding:
    """A decode engine with hand-offs of one page each, 15 prompt tokens: each wants a second page at its third step."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        num_free_pages: int,
        max_preemptions: int = 3,
        max_num_seqs: int = 8,
        num_swap_slots: int = NUM_SWAP_SLOTS,
        batching: Batching = Batching.CONTINUOUS,
    ) -> None:
        self.records = Records(2 * NUM_PAGES, RECORD_SLOTS)
        pool = PagePool(watermark_pages=0, watermark_slots=0)
        pool.give(PageBundle(tuple(range(NUM_PAGES, NUM_PAGES + num_free_pages))))
        preemption = PreemptionSettings(after_s=0.5, max_preemptions=max_preemptions, num_swap_slots=num_swap_slots)
        settings = RunningSettings(JoinSettings(batching), preemption)
        self.batcher = RunningBatcher(limits(max_num_seqs=max_num_seqs), pool, self.records.open, settings)
        self.runner = HashRunner(2 * NUM_PAGES, VOCAB_SIZE)
        swap_file = SwapFile(tmp_path, self.runner.pages.shape[1], NUM_SWAP_SLOTS)
        self._swapping = swapping_runner(self.runner, PageSwapper(HostPages(self.runner.pages), swap_file))

    def add(self, slot: int, lane_priority: int = 0, max_tokens: int = 30, prefix_seed: bytes = b"") -> SequenceKey:
        made = params(tuple(range(15)), slot, max_tokens=max_tokens)
        made = replace(made, scheduling=SchedulingParams(lane_priority), prefix_seed=prefix_seed)
        self.batcher.add(handed_off(self.records, slot, made))
        return SequenceKey.of(made)

    def step(self, now_s: float) -> StepPlan | None:
        plan = self.batcher.decide(now_s)
        if plan is not None:
            self.batcher.record(plan, self._swapping.run(plan))
        assert self.batcher.check_integrity() == ()
        return plan

    def steps(self, number: int, now_s: float) -> list[list[int]]:
        """The slots that were computed in each."""
        plans = [self.step(now_s) for _ in range(number)]
        return [[] if plan is None else sorted(chunk.slot for chunk in plan.chunks) for plan in plans]

    def snapshot(self, slot: int) -> SequenceSnapshot:
        """What an adopter would find."""
        snapshot = self.records.open(slot).read()
        assert snapshot is not None
        return snapshot

    def ends(self) -> list[SequenceEnded]:
        return [event for event in self.batcher.take_events() if isinstance(event, SequenceEnded)]


def test_the_latest_of_the_lowest_lane_gives_way_and_never_a_higher_one(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    for slot, lane_priority in enumerate([1, 0, 0, 2]):
        decoding.add(slot, lane_priority)
    assert decoding.steps(2, 0.0) == [[0, 1, 2, 3], []]
    assert decoding.steps(1, 0.49) == [[]], "the arena may still have pages"
    plan = decoding.step(0.5)
    assert plan is not None
    assert [copy.page_id for copy in plan.swap.outs] == [2 * 4], "the page of slot 2"
    assert decoding.steps(1, 0.5) == [[3]], "the most urgent takes the page"
    decoding.step(0.5)
    assert decoding.steps(1, 0.5) == [[0, 3]], "then slot 1 gave way to slot 0, which had waited as long"
    preempted = [slot for slot in range(4) if decoding.snapshot(slot).block_table == ()]
    assert preempted == [1, 2]


def test_with_nobody_behind_it_a_sequence_gives_way_itself(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=1)
    decoding.add(0, lane_priority=1, max_tokens=12)
    decoding.add(1, lane_priority=0)
    assert decoding.steps(3, 0.0) == [[0, 1], [0], [0]]
    decoding.step(0.5)
    assert decoding.snapshot(1).block_table == ()
    assert decoding.snapshot(0).block_table != ()


def test_while_nothing_can_run_here_the_pages_are_for_other_workers(tmp_path: Path) -> None:
    """Two workers that each kept what the other one needs would wait for ever."""
    decoding = Decoding(tmp_path, num_free_pages=0)
    decoding.add(0)
    decoding.steps(2, 0.0)
    decoding.step(0.5)
    assert decoding.snapshot(0).block_table == ()
    assert decoding.batcher.take_surplus().page_ids == (0,)
    wanted = decoding.batcher.wanted()
    assert wanted is not None
    assert wanted.least_pages == 2


def test_the_record_of_a_preempted_sequence_says_that_its_pages_are_not_there(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    decoding.add(0)
    decoding.add(1)
    decoding.steps(2, 0.0)
    before = decoding.snapshot(1)
    assert before.num_computed_tokens == 16
    decoding.step(0.5)
    preempted = decoding.snapshot(1)
    assert (preempted.block_table, preempted.num_computed_tokens) == ((), 0)
    assert preempted.output_token_ids == before.output_token_ids
    assert preempted.rng_position == before.rng_position


def test_it_comes_back_into_other_pages_with_what_it_had(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    decoding.add(0)
    decoding.add(1)
    decoding.steps(2, 0.0)
    content = decoding.runner.pages[1 * 4].copy()
    decoding.step(0.5)
    decoding.steps(1, 0.5)
    decoding.batcher.pool.give(PageBundle((100, 101, 102)))
    decoding.step(0.6)
    back = decoding.snapshot(1)
    assert back.num_computed_tokens == 16
    assert set(back.block_table) <= {100, 101, 102}
    assert (decoding.runner.pages[back.block_table[0]] == content).all()
    assert decoding.batcher.counters.tokens_recomputed == 0
    (sequence,) = (s for s in decoding.batcher._ranked() if s.slot == 1)
    waits = sequence.waits.total(sequence.num_preemptions)
    assert waits.swapped_out_s == pytest.approx(0.1)
    assert (waits.num_preemptions, waits.waiting_s, waits.paused_s) == (1, 0.0, 0.0)


def test_one_that_ends_while_it_is_preempted_frees_its_swap_slots(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    decoding.add(0)
    key = decoding.add(1)
    decoding.steps(2, 0.0)
    decoding.step(0.5)
    decoding.batcher.cancel(key)
    assert [(end.key, end.reason) for end in decoding.ends()] == [(key, FinishReason.CANCELLED)]
    assert decoding.batcher.check_integrity() == ()
    assert decoding.records.open(1).read() is None


def test_a_lost_swap_slot_is_noticed(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    decoding.add(0)
    decoding.add(1)
    decoding.steps(2, 0.0)
    decoding.step(0.5)
    for sequence in decoding.batcher._sequences.values():
        sequence.swap_slots = ()
    assert any("swap file: 7 slots" in error for error in decoding.batcher.check_integrity())


def test_nobody_overtakes_a_preempted_sequence_but_of_a_higher_lane(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    decoding.add(0, lane_priority=1)
    decoding.add(1, lane_priority=1)
    decoding.steps(2, 0.0)
    decoding.step(0.5)
    assert decoding.steps(1, 0.5) == [[0]]
    decoding.add(2, lane_priority=1)
    decoding.add(3, lane_priority=2)
    assert decoding.steps(1, 0.6) == [[0, 3]]
    assert decoding.batcher.load.num_waiting == 1


def test_pages_of_a_sequence_that_only_waits_help_one_that_was_preempted(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0, max_num_seqs=2)
    for slot in range(4):
        decoding.add(slot)
    assert decoding.steps(2, 0.0) == [[0, 1], []]
    decoding.step(0.5)
    decoding.step(0.5)
    assert decoding.steps(1, 0.5) == [[0, 1]]
    assert [slot for slot in range(4) if decoding.snapshot(slot).block_table == ()] == [2, 3]


def test_a_step_that_fails_takes_nobodys_pages(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    decoding.add(0)
    decoding.add(1)
    decoding.steps(2, 0.0)
    plan = decoding.batcher.decide(0.5)
    assert plan is not None
    assert plan.swap.outs
    decoding.batcher.fail_step(plan, Failure(FailureReason.INTERNAL, "on purpose"))
    assert decoding.batcher.check_integrity() == ()
    assert decoding.ends() == []
    assert decoding.snapshot(1).num_computed_tokens == 16


def test_a_step_that_fails_while_one_comes_back_leaves_it_preempted_and_its_new_pages_free(
    tmp_path: Path,
) -> None:
    decoding = Decoding(tmp_path, num_free_pages=0)
    key = decoding.add(0)
    decoding.add(1)
    decoding.steps(2, 0.0)
    decoding.step(0.5)
    decoding.steps(1, 0.5)
    decoding.batcher.cancel(key)
    decoding.batcher.pool.give(PageBundle((100, 101)))
    plan = decoding.batcher.decide(0.6)
    assert plan is not None
    assert plan.swap.ins
    decoding.batcher.fail_step(plan, Failure(FailureReason.INTERNAL, "on purpose"))
    assert decoding.batcher.check_integrity() == ()
    assert decoding.batcher.pool.num_free_pages == 2
    decoding.step(0.7)
    assert decoding.snapshot(1).num_computed_tokens == 16


def test_full_pages_of_a_prompt_go_to_the_arena_and_others_to_whoever_needs_them(tmp_path: Path) -> None:
    """Only the arena knows whether somebody else uses a prompt's pages."""
    decoding = Decoding(tmp_path, num_free_pages=2)
    records = decoding.records
    made = replace(params(tuple(range(16)), 5, max_tokens=60), prefix_seed=b"seed")
    decoding.batcher.add(handed_off(records, 5, made))
    decoding.steps(17, 0.0)
    (prompt_page, second_page, _) = decoding.snapshot(5).block_table
    decoding.add(0, lane_priority=1)
    decoding.steps(2, 0.0)
    decoding.step(0.5)
    surplus = decoding.batcher.pool.take_used()
    assert [used.page_ids for used in surplus.used] == [(prompt_page,)]
    assert decoding.steps(1, 0.5) == [[0]]
    assert set(decoding.snapshot(0).block_table) & {second_page, NUM_PAGES, NUM_PAGES + 1}


@pytest.mark.parametrize("num_kept", [0, 1])
def test_pages_that_are_shared_with_others_stay(tmp_path: Path, num_kept: int) -> None:
    decoding = Decoding(tmp_path, num_free_pages=1)
    made = params(tuple(range(17)), 6, max_tokens=60)
    arrival = handed_off(decoding.records, 6, made)
    shared = replace(arrival, num_shared_pages=num_kept)
    decoding.add(0, lane_priority=1)
    decoding.batcher.add(shared)
    decoding.steps(17, 0.0)
    decoding.step(0.5)
    decoding.step(0.5)
    assert decoding.snapshot(6).block_table == arrival.block_table[:num_kept]
    assert decoding.snapshot(6).num_computed_tokens == 16 * num_kept


@pytest.mark.parametrize("can_launch", [False, True])
def test_a_runner_that_swaps_launches_steps_if_the_one_that_it_wraps_does(tmp_path: Path, can_launch: bool) -> None:
    inner = (LaunchingHashRunner if can_launch else HashRunner)(4, VOCAB_SIZE)
    swap_file = SwapFile(tmp_path, inner.pages.shape[1], 1)
    runner = swapping_runner(inner, PageSwapper(HostPages(inner.pages), swap_file))
    assert isinstance(runner, LaunchingRunner) == can_launch
