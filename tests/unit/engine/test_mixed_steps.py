"""Prompts and decodes in one running batch: mixed steps under one budget."""

from dataclasses import replace

import pytest
from tests.unit.engine.test_batchers import handed_off, step
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.life import FinishReason, SchedulingParams
from weir.core.sampling import SamplingParams
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.messages import (
    Arrival,
    ChunkComputed,
    Failure,
    FailureReason,
    PageBundle,
    SequenceEnded,
    SequenceKey,
    TokenSampled,
)
from weir.engine.plan import ChunkPlan, StepPlan
from weir.testing.runner import HashRunner, reference_tokens

NUM_PAGES = 64


def local(records: Records, num_pages: int = NUM_PAGES, **changes: int) -> RunningBatcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(64, 64 + num_pages)), tuple(range(8, 16))))
    return RunningBatcher(limits(**changes), pool, records.open)


def shares(batcher: Batcher) -> list[tuple[int, int]]:
    """(start, tokens) of each chunk of the next step."""
    plan = step(batcher)
    return [] if plan is None else [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]


@pytest.fixture
def records() -> Records:
    return Records(128, 16)


def test_who_brings_its_pages_does_not_wait_behind_a_prompt_that_lacks_some(records: Records) -> None:
    batcher = local(records, num_pages=1)
    batcher.add(Arrival(params(tuple(range(25)), 1)))
    arrival = handed_off(records, 2, params(tuple(range(20)), 2, max_tokens=4))
    batcher.add(arrival)
    ends: dict[str, FinishReason | Failure | None] = {}
    for now_s in (0.0, 0.1, 0.2, 2.5):
        step(batcher, now_s)
        ends |= {e.key.request_id: e.reason or e.failure for e in batcher.take_events() if isinstance(e, SequenceEnded)}
    assert ends[f"{2:032x}"] is FinishReason.LENGTH
    assert isinstance(ends[f"{1:032x}"], Failure), "after it has waited for as long as it may"


def test_decodes_come_first_and_prompts_get_what_is_left_of_the_budget(records: Records) -> None:
    batcher = local(records, max_num_batched_tokens=20, chunk_tokens=32)
    batcher.add(Arrival(params((1, 2, 3), 0, max_tokens=9)))
    batcher.add(Arrival(params((4, 5), 1, max_tokens=9)))
    assert shares(batcher) == [(0, 3), (0, 2)]
    batcher.add(Arrival(params(tuple(range(30)), 2, max_tokens=9)))
    batcher.add(Arrival(params(tuple(range(10)), 3, max_tokens=9)))
    assert shares(batcher) == [(3, 1), (2, 1), (0, 18)]
    assert shares(batcher) == [(4, 1), (3, 1), (18, 12), (0, 6)]
    assert shares(batcher) == [(5, 1), (4, 1), (30, 1), (6, 4)]


def test_a_prompt_is_computed_in_chunks_of_at_most_the_given_size(records: Records) -> None:
    batcher = local(records, max_num_batched_tokens=64, chunk_tokens=16)
    batcher.add(Arrival(params(tuple(range(40)), 0, max_tokens=2)))
    assert [shares(batcher) for _ in range(4)] == [[(0, 16)], [(16, 16)], [(32, 8)], [(40, 1)]]
    events = batcher.take_events()
    assert [(e.start, e.num_tokens) for e in events if isinstance(e, ChunkComputed)] == [(0, 16), (16, 16), (32, 8)]
    assert [e.index for e in events if isinstance(e, TokenSampled)] == [0, 1]
    assert events[-1] == SequenceEnded(SequenceKey(f"{0:032x}", params((1,)).attempt), FinishReason.LENGTH)


def test_prompts_and_handed_off_sequences_share_a_batch(records: Records) -> None:
    batcher = local(records)
    runner = HashRunner(128, VOCAB_SIZE)
    split = params(tuple(range(20)), 1, max_tokens=12, seed=3)
    (first,) = reference_tokens(split.prompt_token_ids, split.sampling, 1, VOCAB_SIZE)
    arrival = handed_off(records, 1, split, first_token=first)
    batcher.add(Arrival(params(tuple(range(25)), 2, max_tokens=12, seed=4)))
    batcher.add(arrival)
    fill(runner, arrival)
    while (plan := batcher.decide(0.0)) is not None:
        batcher.record(plan, runner.run(plan))
    tokens: dict[str, list[int]] = {f"{1:032x}": [first], f"{2:032x}": []}
    for event in batcher.take_events():
        if isinstance(event, TokenSampled):
            tokens[event.key.request_id].append(event.token_id)
    for number, length, seed in ((1, 20, 3), (2, 25, 4)):
        sampling = SamplingParams(temperature=0.0, seed=seed)
        assert tokens[f"{number:032x}"] == reference_tokens(tuple(range(length)), sampling, 12, VOCAB_SIZE)
    assert batcher.check_integrity() == ()


def fill(runner: HashRunner, arrival: Arrival) -> None:
    """Writes what a prefill worker leaves in the pages of a handed-off sequence."""
    chunk = ChunkPlan(0, 0, arrival.params.prompt_token_ids, arrival.block_table, sample=None)
    runner.run(StepPlan(0, (chunk,)))


def test_what_joins_leaves_the_pages_that_the_batch_wants_next(records: Records) -> None:
    batcher = local(records, num_pages=3)
    batcher.add(Arrival(params(tuple(range(15)), 0, max_tokens=9)))
    assert shares(batcher) == [(0, 15)]
    batcher.add(Arrival(params(tuple(range(40)), 1, max_tokens=2)))
    assert shares(batcher) == [(15, 1)], "two pages are free, and one of them is nearly the first one's"
    batcher.pool.give(PageBundle((30,)))
    assert shares(batcher) == [(16, 1), (0, 32)]
    assert batcher.load.num_used_pages == 4, "of three that the prompt needs it has two"


def test_a_prompt_that_gets_no_pages_fails_after_the_bound(records: Records) -> None:
    batcher = local(records, num_pages=1)
    batcher.add(Arrival(params(tuple(range(40)))))
    assert step(batcher, now_s=10.0) is None
    assert step(batcher, now_s=12.0) is None
    (end,) = batcher.take_events()
    assert isinstance(end, SequenceEnded)
    assert end.failure is not None
    assert end.failure.reason is FailureReason.NO_CAPACITY


def test_a_prompt_that_comes_twice_counts_once(records: Records) -> None:
    batcher = local(records)
    for _ in range(2):
        batcher.add(Arrival(params((1, 2), 0, max_tokens=2)))
    assert shares(batcher) == [(0, 2)]
    assert batcher.check_integrity() == ()


def test_a_prompt_takes_the_pages_of_each_chunk_when_that_is_computed(records: Records) -> None:
    batcher = local(records, max_num_batched_tokens=32)
    for number in (1, 2):
        batcher.add(Arrival(params(tuple(range(72)), number, max_tokens=2)))
    seen = [(shares(batcher), batcher.load.num_used_pages, batcher.need().num_pages) for _ in range(4)]
    assert seen == [
        ([(0, 32)], 2, 5),
        ([(32, 32)], 4, 5),
        ([(64, 8), (0, 24)], 7, 4),
        ([(72, 1), (24, 31)], 4, 1),
    ]


def test_where_nobody_can_be_preempted_a_prompt_has_all_its_pages_or_does_not_join(records: Records) -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(8)), (0, 1)))
    settings = RunningSettings(preemption=PreemptionSettings(max_preemptions=0))
    batcher = RunningBatcher(limits(max_num_batched_tokens=32), pool, records.open, settings)
    for number in (1, 2):
        batcher.add(Arrival(params(tuple(range(72)), number, max_tokens=2)))
    assert shares(batcher) == [(0, 32)]
    assert (batcher.load.num_used_pages, batcher.load.num_waiting, batcher.need().head_pages) == (5, 1, 5)


def test_of_two_half_read_prompts_that_lack_pages_the_later_gives_way_and_both_are_served(records: Records) -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(6)), (0, 1)))
    batcher = RunningBatcher(limits(max_num_batched_tokens=16), pool, records.open)
    first, second = (params(tuple(range(90)), number, max_tokens=2) for number in (1, 2))
    batcher.add(Arrival(first))
    assert [shares(batcher) for _ in range(3)] == [[(0, 16)], [(16, 16)], [(32, 16)]]
    batcher.add(Arrival(replace(second, scheduling=SchedulingParams(1))))
    runner, events, now_s = HashRunner(128, VOCAB_SIZE), list(batcher.take_events()), 0.0
    while not batcher.is_idle:
        plan = batcher.decide(now_s)
        if plan is not None:
            batcher.record(plan, runner.run(plan), now_s)
        events += batcher.take_events()
        assert batcher.check_integrity() == ()
        batcher.pool.give(PageBundle(batcher.take_surplus().all_page_ids))
        now_s += 0.05
        assert now_s < 10.0, "they wait for each other"
    ends = [event for event in events if isinstance(event, SequenceEnded)]
    assert [(end.key.request_id, end.reason) for end in ends] == [
        (second.request_id, FinishReason.LENGTH),
        (first.request_id, FinishReason.LENGTH),
    ]
    assert batcher.counters.preemptions == 1


def test_a_prompt_that_lacked_pages_once_and_is_not_reached_does_not_fail_for_it(records: Records) -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle((0, 1), (0, 1)))
    batcher = RunningBatcher(limits(max_num_batched_tokens=32), pool, records.open)
    batcher.add(Arrival(params(tuple(range(72)), 1, max_tokens=2)))
    assert step(batcher, 0.0) is not None
    assert step(batcher, 0.0) is None, "it lacks pages"
    pool.give(PageBundle(tuple(range(2, 30))))
    batcher.add(Arrival(replace(params(tuple(range(90)), 2), scheduling=SchedulingParams(1))))
    assert [step(batcher, now_s) is not None for now_s in (0.05, 4.0)] == [True, True]
    assert batcher.counters.failed == 0
