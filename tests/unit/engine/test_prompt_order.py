"""Prompts are computed in the order of their lanes, between any two chunks, and nobody is passed over for ever."""

from dataclasses import replace

from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.life import SchedulingParams
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.prompt_share import MAX_PASSED_OVER
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, Failure, FailureReason, HandOffReady, PageBundle
from weir.kv.geometry import num_pages_for
from weir.policy.registry import PolicySpec
from weir.testing.runner import HashRunner


def prefill(num_slots: int = 8, **changes: int) -> PrefillBatcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(100)), tuple(range(num_slots))))
    return PrefillBatcher(limits(**changes), pool, Records(100, 8).open)


def add(batcher: PrefillBatcher, number: int, num_tokens: int, lane: int = 0) -> None:
    batcher.add(Arrival(replace(params(tuple(range(num_tokens)), number), scheduling=SchedulingParams(lane))))


def step(batcher: PrefillBatcher) -> list[tuple[int, int]]:
    """(prompt, tokens) of each chunk."""
    plan = batcher.decide(0.0)
    if plan is None:
        return []
    owners = [int(owner.key.request_id, 16) for owner in batcher._steps.owners(plan) if owner is not None]
    batcher.record(plan, HashRunner(100, VOCAB_SIZE).run(plan))
    assert batcher.check_integrity() == ()
    return [(owner, len(chunk.token_ids)) for owner, chunk in zip(owners, plan.chunks, strict=True)]


def test_a_later_urgent_prompt_goes_first_in_the_next_step() -> None:
    batcher = prefill(max_num_batched_tokens=32)
    add(batcher, 1, 90)
    assert step(batcher) == [(1, 32)]
    add(batcher, 2, 40, lane=1)
    assert step(batcher) == [(2, 32)]
    assert step(batcher) == [(2, 8)], "nor does it wait for a chunk that would only fill its step"
    assert step(batcher) == [(1, 32)]


def test_an_urgent_prompt_is_admitted_at_once_where_less_urgent_ones_fill_the_batch() -> None:
    batcher = prefill(max_num_seqs=2, max_num_batched_tokens=64)
    add(batcher, 1, 90)
    add(batcher, 2, 90)
    step(batcher)
    add(batcher, 3, 20)
    add(batcher, 4, 20, lane=1)
    assert step(batcher) == [(4, 20)]
    admitted = [int(s.key.request_id, 16) for s in batcher._ranked() if s.slot is not None]
    assert admitted == [4, 1, 2], "3 waits"


def test_a_prompt_has_the_pages_of_what_is_read_and_those_of_the_next_steps_are_asked_for() -> None:
    batcher = prefill(max_num_batched_tokens=32)
    for number in (1, 2, 3):
        add(batcher, number, 48)
    assert [(step(batcher), batcher.load.num_used_pages, batcher.need().num_pages) for _ in range(5)] == [
        ([(1, 32)], 2, 4),
        ([(1, 16), (2, 16)], 4, 4),
        ([(2, 32)], 6, 3),
        ([(3, 32)], 8, 1),
        ([(3, 16)], 9, 0),
    ]


def test_in_a_lane_a_long_prompt_is_computed_to_its_end_and_the_next_has_no_pages_before() -> None:
    batcher = prefill(max_num_batched_tokens=2)
    add(batcher, 1, 90)
    add(batcher, 2, 4)
    for number in range(1, 45):
        assert step(batcher) == [(1, 2)]
        assert batcher.load.num_used_pages == num_pages_for(2 * number)
    assert [step(batcher) for _ in range(3)] == [[(1, 2)], [(2, 2)], [(2, 2)]]


def test_who_was_passed_over_too_often_and_lacks_pages_holds_no_urgent_prompt_up() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle((0,), tuple(range(4))))
    batcher = PrefillBatcher(limits(max_num_batched_tokens=32), pool, Records(100, 8).open)
    add(batcher, 1, 90)
    for number in range(2, 4 + MAX_PASSED_OVER):
        add(batcher, number, 16, lane=1)
        assert step(batcher) == [(number, 16)]
        ready = [event for event in batcher.take_events() if isinstance(event, HandOffReady)]
        batcher.forget(ready[0].key)
        pool.give(PageBundle(ready[0].page_ids, (ready[0].slot,)))
    pool.give(PageBundle(tuple(range(4, 10))))
    add(batcher, 99, 16, lane=1)
    assert step(batcher) == [(1, 32)], "its turn, now that it has pages"


def test_while_a_prompt_waits_for_pages_those_that_have_theirs_are_computed() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(4)), tuple(range(4))))
    batcher = PrefillBatcher(limits(max_num_batched_tokens=24), pool, Records(100, 8).open)
    add(batcher, 1, 30)
    assert step(batcher) == [(1, 24)]
    add(batcher, 2, 90, lane=1)
    assert [step(batcher) for _ in range(2)] == [[(2, 24)], [(1, 6)]]
    pool.give(PageBundle(tuple(range(7, 14))))
    assert step(batcher) == [(2, 24)]


def test_who_lacked_pages_once_waits_for_an_urgent_prompt_and_does_not_fail() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle((), (0, 1)))
    batcher = PrefillBatcher(limits(max_num_seqs=1, max_num_batched_tokens=16), pool, Records(100, 8).open)
    add(batcher, 1, 90)
    assert batcher.decide(0.0) is None, "there is no page for it"
    pool.give(PageBundle(tuple(range(100))))
    add(batcher, 2, 90, lane=1)
    for now_s in (1.0, 2.0, 7.0):
        plan = batcher.decide(now_s)
        assert plan is not None
        batcher.record(plan, HashRunner(100, VOCAB_SIZE).run(plan))
    assert batcher.counters.failed == 0
    assert batcher.next_deadline_s is None, "nobody lacks a page"
    assert batcher.check_integrity() == ()


def test_urgent_prompts_fill_a_batch_twice_at_most_and_only_beyond_those_being_computed() -> None:
    batcher = prefill(max_num_seqs=2, max_num_batched_tokens=128)
    add(batcher, 1, 90)
    add(batcher, 2, 90)
    step(batcher)
    for number in range(3, 8):
        add(batcher, number, 90, lane=1)
    step(batcher)
    assert sum(sequence.slot is not None for sequence in batcher._ranked()) == 4
    finished = prefill(max_num_seqs=1)
    add(finished, 1, 10)
    step(finished)
    add(finished, 2, 10, lane=1)
    assert step(finished) == [], "the one before is being handed off, and counts"


def test_under_a_stream_of_urgent_prompts_another_one_is_still_computed() -> None:
    batcher = prefill(max_num_batched_tokens=16)
    add(batcher, 1, 40)
    num_steps, number = 0, 10
    when: list[int] = []
    while len(when) < 3:
        if not any(sequence.params.scheduling.lane_priority for sequence in batcher._ranked()):
            number += 1
            add(batcher, number, 60, lane=1)
        served = [prompt for prompt, _ in step(batcher)]
        num_steps += 1
        when += [num_steps] * (1 in served and served[0] == 1)
        for event in batcher.take_events():
            if isinstance(event, HandOffReady):
                batcher.fail(event.key, Failure(FailureReason.HAND_OFF_REFUSED, "on purpose"))
        assert num_steps < 10 * MAX_PASSED_OVER, "it starves"
    gaps = [later - earlier for earlier, later in zip([0, *when], when, strict=False)]
    assert max(gaps) <= MAX_PASSED_OVER + 1


def test_prompts_of_one_lane_go_in_their_order_whatever_the_policy() -> None:
    batcher = prefill(max_num_batched_tokens=16)
    batcher.set_policy(PolicySpec("srtf").make())
    add(batcher, 1, 40)
    add(batcher, 2, 4)
    assert step(batcher) == [(1, 16)]
