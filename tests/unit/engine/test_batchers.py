"""Rules of the two batchers, one at a time."""

from dataclasses import replace

import pytest
from tests.unit.engine.world import MAX_CONTEXT_TOKENS, VOCAB_SIZE, Records, limits, params

from weir.core.life import FinishReason
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.counters import fingerprint_of
from weir.engine.memory.pages import PageDefect, PageNeed, PagePool
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.messages import (
    Arrival,
    Failure,
    FailureReason,
    HandOffReady,
    PageBundle,
    SequenceEnded,
    SequenceKey,
    TokenSampled,
)
from weir.engine.plan import StepPlan
from weir.kv.records.record import SequenceParams
from weir.testing.runner import HashRunner

NUM_PAGES = 64
RECORD_SLOTS = 16


def prefill(records: Records, num_pages: int = NUM_PAGES, num_slots: int = 8, **changes: int) -> PrefillBatcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(num_pages)), tuple(range(num_slots))))
    return PrefillBatcher(limits(**changes), pool, records.open)


def decode(num_pages: int = NUM_PAGES, **changes: int) -> RunningBatcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(NUM_PAGES, NUM_PAGES + num_pages))))
    return RunningBatcher(limits(**changes), pool, Records(2 * NUM_PAGES, RECORD_SLOTS).open)


def handed_off(records: Records, slot: int, params_: SequenceParams, first_token: int = 7) -> Arrival:
    """What prefill leaves behind, with pages of its own for each slot."""
    record = records.open(slot)
    record.begin(params_)
    num_pages = -(-len(params_.prompt_token_ids) // 16)
    record.set_block_table(range(slot * 4, slot * 4 + num_pages))
    record.append_token(first_token)
    record.publish(len(params_.prompt_token_ids))
    snapshot = record.read()
    assert snapshot is not None
    return Arrival.of_record(slot, record, snapshot)


def step(batcher: Batcher, now_s: float = 0.0) -> StepPlan | None:
    plan = batcher.decide(now_s)
    if plan is not None:
        batcher.record(plan, HashRunner(2 * NUM_PAGES, VOCAB_SIZE).run(plan))
    return plan


@pytest.fixture
def records() -> Records:
    return Records(2 * NUM_PAGES, RECORD_SLOTS)


def test_prompts_are_computed_in_the_order_of_their_start_within_the_budget(records: Records) -> None:
    batcher = prefill(records, max_num_batched_tokens=64, chunk_tokens=32)
    for index in range(3):
        batcher.add(Arrival(params(tuple(range(40)), index)))
    shares = []
    while (plan := step(batcher)) is not None:
        shares.append([(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks])
    assert shares == [[(0, 32), (0, 32)], [(32, 8), (32, 8), (0, 32)], [(32, 8)]]


def test_a_prompt_takes_the_pages_of_its_next_chunk_and_nobody_overtakes_one_that_lacks_some(records: Records) -> None:
    batcher = prefill(records, num_pages=3, max_num_batched_tokens=32)
    batcher.add(Arrival(params(tuple(range(49)), 1)))
    batcher.add(Arrival(params(tuple(range(10)), 2)))
    assert step(batcher) is not None
    assert (batcher.load.num_used_pages, batcher.load.num_free_pages) == (2, 1)
    assert step(batcher) is None, "two pages are missing, and the one that is there is not for the prompt behind"
    assert batcher.need() == PageNeed(num_pages=3, num_slots=1, head_pages=2, head_slots=0)


def test_a_prompt_that_gets_no_pages_fails_after_the_bound(records: Records) -> None:
    batcher = prefill(records, num_pages=1)
    batcher.add(Arrival(params(tuple(range(40)))))
    assert step(batcher, now_s=10.0) is None
    assert batcher.next_deadline_s == 12.0
    assert step(batcher, now_s=11.9) is None
    assert batcher.take_events() == ()
    step(batcher, now_s=12.0)
    (end,) = batcher.take_events()
    assert isinstance(end, SequenceEnded)
    assert end.failure is not None
    assert end.failure.reason is FailureReason.NO_CAPACITY
    assert "for 2 s" in end.failure.message
    assert batcher.is_idle


def test_pages_that_came_during_a_long_step_are_in_time(records: Records) -> None:
    batcher = prefill(records, num_pages=0)
    batcher.add(Arrival(params(tuple(range(20)))))
    assert step(batcher, now_s=0.0) is None
    batcher.pool.give(PageBundle((0, 1)))
    assert step(batcher, now_s=100.0) is not None


def test_a_refused_hand_off_frees_the_pages_and_a_committed_one_parts_with_them(records: Records) -> None:
    batcher = prefill(records)
    for index in range(2):
        batcher.add(Arrival(params(tuple(range(20)), index)))
    step(batcher)
    ready = [event for event in batcher.take_events() if isinstance(event, HandOffReady)]
    assert step(batcher) is None
    batcher.fail(ready[0].key, Failure(FailureReason.HAND_OFF_REFUSED, "gone"))
    batcher.forget(ready[1].key)
    assert batcher.pool.num_held_pages == batcher.pool.num_free_pages == NUM_PAGES - 4
    (used,) = batcher.pool.take_used().used
    assert used.page_ids == ready[0].page_ids
    assert records.open(ready[0].slot).read() is None
    assert records.open(ready[1].slot).read() is not None
    assert batcher.counters.page_fingerprint == fingerprint_of(ready[1].key.request_id, ready[1].page_ids)
    with pytest.raises(PageDefect):
        batcher.pool.hand_over(ready[1].slot, ready[1].page_ids)


def test_a_cancel_during_the_hand_off_waits_for_its_outcome(records: Records) -> None:
    batcher = prefill(records)
    batcher.add(Arrival(params(tuple(range(20)))))
    step(batcher)
    key = SequenceKey(f"{0:032x}", params((1,)).attempt)
    batcher.take_events()
    batcher.cancel(key)
    assert batcher.take_events() == ()
    batcher.fail(key, Failure(FailureReason.HAND_OFF_REFUSED, "gone"))
    assert batcher.take_events() == (SequenceEnded(key, FinishReason.CANCELLED),)


def test_failing_all_leaves_hand_offs_alone(records: Records) -> None:
    batcher = prefill(records)
    batcher.add(Arrival(params(tuple(range(20)), 1)))
    step(batcher)
    batcher.add(Arrival(params(tuple(range(20)), 2)))
    batcher.take_events()
    batcher.fail_all(Failure(FailureReason.DRAINING, "bye"))
    assert [event.key.request_id for event in batcher.take_events()] == [f"{2:032x}"]
    assert batcher.load.num_running == 1


def test_decode_sequences_join_and_leave_between_steps(records: Records) -> None:
    batcher = decode()
    batcher.add(handed_off(records, 0, params((1, 2), 0, max_tokens=3)))
    sizes = [len(plan.chunks) for plan in [step(batcher)] if plan is not None]
    batcher.add(handed_off(records, 1, params((3, 4), 1, max_tokens=3)))
    while (plan := step(batcher)) is not None:
        sizes.append(len(plan.chunks))
    assert sizes == [1, 2, 1]
    assert batcher.counters.finished == 2
    assert batcher.counters.prompt_tokens_computed == batcher.counters.prefill_steps == 0


def test_each_token_is_published_before_it_is_reported(records: Records) -> None:
    batcher = decode()
    batcher.add(handed_off(records, 0, params((1, 2), max_tokens=9)))
    for _ in range(5):
        step(batcher)
        (sampled,) = [event for event in batcher.take_events() if isinstance(event, TokenSampled)]
        snapshot = records.open(0).read()
        assert snapshot is not None
        assert snapshot.output_token_ids[sampled.index] == sampled.token_id
        assert len(snapshot.output_token_ids) == sampled.index + 1
        assert snapshot.num_computed_tokens == 2 + sampled.index


def test_a_sequence_without_a_page_sits_out_and_goes_on_when_there_is_one(records: Records) -> None:
    batcher = decode(num_pages=1)
    for slot in range(2):
        batcher.add(handed_off(records, slot, params(tuple(range(15)), slot, max_tokens=20)))
    assert [len(plan.chunks) for _ in range(2) if (plan := step(batcher, 0.0)) is not None] == [2, 1]
    wanted = batcher.wanted()
    assert wanted is not None
    assert wanted.least_pages == 1
    batcher.pool.give(PageBundle((2 * NUM_PAGES - 1,)))
    assert wanted.num_pages >= 1
    plan = batcher.decide(0.1)
    assert plan is not None
    assert len(plan.chunks) == 2


def test_of_stalled_sequences_the_latest_fails_and_its_pages_help_the_others(records: Records) -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    settings = RunningSettings(preemption=PreemptionSettings(max_preemptions=0))
    batcher = RunningBatcher(limits(), pool, records.open, settings)
    for slot in range(2):
        batcher.add(handed_off(records, slot, params(tuple(range(16)), slot, max_tokens=40)))
    assert step(batcher, 0.0) is None
    assert step(batcher, 2.0) is None
    batcher.pool.give(PageBundle(batcher.take_surplus().all_page_ids))  # what its last report gave back to the arena
    plan = step(batcher, 2.0)
    assert plan is not None
    assert [chunk.slot for chunk in plan.chunks] == [0]
    ends = [event for event in batcher.take_events() if isinstance(event, SequenceEnded)]
    assert [end.key.request_id for end in ends] == [f"{1:032x}"]


def test_a_sequence_never_uses_more_pages_than_are_reserved(records: Records) -> None:
    batcher = decode()
    batcher.add(handed_off(records, 0, params(tuple(range(15)), max_tokens=40, num_reserved_pages=1)))
    while step(batcher) is not None:
        pass
    events = batcher.take_events()
    end = events[-1]
    assert isinstance(end, SequenceEnded)
    assert end.failure is not None
    assert "1 pages that are reserved" in end.failure.message
    assert sum(isinstance(event, TokenSampled) for event in events) == 1


def test_the_context_limit_ends_a_sequence(records: Records) -> None:
    batcher = decode()
    batcher.add(handed_off(records, 0, params(tuple([1] * (MAX_CONTEXT_TOKENS - 3)), max_tokens=40)))
    while step(batcher) is not None:
        pass
    events = batcher.take_events()
    assert isinstance(events[-1], SequenceEnded)
    assert events[-1].reason is FinishReason.LENGTH
    assert sum(isinstance(event, TokenSampled) for event in events) == 2


def test_a_hand_off_that_comes_twice_counts_once(records: Records) -> None:
    batcher = decode()
    arrival = handed_off(records, 0, params((1, 2)))
    batcher.add(arrival)
    batcher.add(arrival)
    assert batcher.counters.taken_over == 1
    assert batcher.check_integrity() == ()


def test_a_record_that_cannot_be_continued_fails_its_request_alone(records: Records) -> None:
    batcher = decode()
    good = handed_off(records, 0, params((1, 2), 0))
    bad = handed_off(records, 1, params(tuple(range(20)), 1))
    short = replace(bad, block_table=bad.block_table[:1])
    batcher.add(good)
    batcher.add(short)
    ends = [event for event in batcher.take_events() if isinstance(event, SequenceEnded)]
    assert [(end.key.request_id, end.failure is not None) for end in ends] == [(f"{1:032x}", True)]
    assert step(batcher) is not None


def test_the_pool_notices_a_page_that_nobody_uses() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle((1, 2, 3)))
    assert pool.try_take(2) is not None
    assert pool.check_integrity([], []) != []
    with pytest.raises(PageDefect, match="held already"):
        pool.give(PageBundle((3,)))


def test_the_pool_keeps_its_watermark_and_returns_what_is_above_twice_of_it() -> None:
    pool = PagePool(watermark_pages=4, watermark_slots=0)
    need = PageNeed(num_pages=2, num_slots=0, head_pages=2, head_slots=0)
    wanted = pool.wanted(need)
    assert wanted is not None
    assert (wanted.num_pages, wanted.least_pages) == (6, 2)
    pool.give(PageBundle(tuple(range(10))))
    assert not pool.take_surplus(need)
    pool.give(PageBundle((10,)))
    assert len(pool.take_surplus(need).page_ids) == 5
    assert pool.wanted(need) is None
