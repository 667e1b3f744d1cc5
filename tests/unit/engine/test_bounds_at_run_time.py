"""Bounds change while sequences run: none ends or stops for it, and nobody joins before there is room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.engine.batching.batcher import Batcher
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.prompt_share import StepPace
from weir.engine.batching.running import RunningBatcher
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, PageBundle, SequenceEnded, SetBounds, TokenSampled
from weir.testing.runner import HashRunner

RUNNER = HashRunner(200, VOCAB_SIZE)


def make(kind: type[Batcher], max_num_seqs: int = 4, max_num_batched_tokens: int = 64) -> Batcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(200)), tuple(range(16))))
    bounds = limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return kind(bounds, pool, Records(200, 16).open)


def add(batcher: Batcher, *numbers: int, num_tokens: int = 4, max_tokens: int = 6) -> None:
    for number in numbers:
        batcher.add(Arrival(params(tuple(range(num_tokens)), number, max_tokens=max_tokens)))


def step(batcher: Batcher) -> set[int]:
    """The sequences that were computed."""
    plan = batcher.decide(0.0)
    if plan is None:
        return set()
    owners = {int(owner.key.request_id, 16) for owner in batcher._steps.owners(plan) if owner is not None}
    batcher.record(plan, RUNNER.run(plan))
    assert batcher.check_integrity() == ()
    return owners


def test_what_runs_over_a_lowered_bound_goes_on_and_nobody_joins_before_there_is_room() -> None:
    batcher = make(RunningBatcher)
    add(batcher, 1, 2, 3, max_tokens=4)
    assert step(batcher) == {1, 2, 3}
    batcher.set_bounds(SetBounds(1, 64))
    add(batcher, 4, 5)
    assert [step(batcher) for _ in range(3)] == [{1, 2, 3}] * 3
    assert [step(batcher) for _ in range(2)] == [{4}, {4}]
    batcher.set_bounds(SetBounds(4, 64))
    assert step(batcher) == {4, 5}


def test_a_budget_below_what_decodes_stops_no_decode_and_keeps_prompts_out() -> None:
    batcher = make(RunningBatcher)
    add(batcher, 1, 2, 3, max_tokens=3)
    step(batcher)
    batcher.set_bounds(SetBounds(4, 2))
    add(batcher, 4, num_tokens=20)
    assert [step(batcher) for _ in range(2)] == [{1, 2, 3}] * 2
    plan = batcher.decide(0.0)
    assert plan is not None
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [2]


def test_no_bound_goes_over_what_the_engine_was_made_with() -> None:
    for kind in (RunningBatcher, PrefillBatcher):
        batcher = make(kind)
        batcher.set_bounds(SetBounds(100, 10_000))
        assert (batcher.limits.max_num_seqs, batcher.limits.max_num_batched_tokens) == (4, 64)


def test_a_prefill_worker_admits_no_more_prompts_than_it_may_have_now() -> None:
    batcher = make(PrefillBatcher, max_num_batched_tokens=16)
    add(batcher, 1, 2, 3, num_tokens=8)
    batcher.set_bounds(SetBounds(1, 16))
    assert step(batcher) == {1}
    batcher.set_bounds(SetBounds(2, 4))
    plan = batcher.decide(0.0)
    assert plan is not None
    assert plan.num_tokens == 4


def test_shares_that_are_none_change_nothing() -> None:
    batcher = make(RunningBatcher)
    with pytest.raises(ValueError, match="step_shares"):
        batcher.set_bounds(SetBounds(1, 1, (2.0,)))
    assert batcher.limits.max_num_seqs == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 80)), max_size=12), st.integers(1, 8))
def test_whatever_the_bounds_become_every_sequence_has_all_of_its_tokens_once(
    changes: list[tuple[int, int]], num_sequences: int
) -> None:
    def tokens_of(bounds: list[tuple[int, int]]) -> dict[str, list[int]]:
        batcher, found, ended = make(RunningBatcher), dict[str, list[int]](), 0
        for number in range(num_sequences):
            add(batcher, number, num_tokens=3 + 7 * number)
        for turn in range(300):
            if turn % 2 == 0 and bounds:
                batcher.set_bounds(SetBounds(*bounds.pop(0)))
            step(batcher)
            for event in batcher.take_events():
                if isinstance(event, TokenSampled):
                    assert event.index == len(found.setdefault(event.key.request_id, []))
                    found[event.key.request_id].append(event.token_id)
                ended += isinstance(event, SequenceEnded)
        assert (ended, batcher.is_idle) == (num_sequences, True)
        return found

    assert tokens_of(list(changes)) == tokens_of([])


def test_a_pace_goes_on_from_what_it_measured_under_another_maximum() -> None:
    pace = StepPace(2048, 0.1)
    pace.set_max(96)
    assert pace.num_tokens == 96
    pace.set_max(4096)
    assert pace.num_tokens == 96
    for _ in range(20):
        pace.planned(pace.num_tokens)
        pace.stepped(0.01)
    assert pace.num_tokens == 4096
    free = StepPace(512)
    free.set_max(100)
    assert free.num_tokens == 100
