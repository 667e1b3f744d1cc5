"""Whose prompt is computed in a step, where lanes differ: the same in a prefill worker and in one that does both."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.engine.test_batchers import prefill, step
from tests.unit.engine.test_mixed_steps import local
from tests.unit.engine.world import Records, params

from weir.core.life import SchedulingParams
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.prompt_share import MAX_PASSED_OVER
from weir.engine.messages import Arrival

MakeBatcher = Callable[..., Batcher]


@pytest.fixture
def records() -> Records:
    return Records(128, 16)


def add(batcher: Batcher, number: int, num_tokens: int, lane_priority: int) -> None:
    """Its tokens are its number, so that a chunk shows whose it is."""
    made = params((number,) * num_tokens, number, max_tokens=1)
    batcher.add(Arrival(replace(made, scheduling=SchedulingParams(lane_priority))))


def add_lasting(batcher: Batcher, number: int, num_tokens: int, lane_priority: int) -> None:
    """One that goes on to decode."""
    batcher.add(
        Arrival(
            replace(params((number,) * num_tokens, number, max_tokens=40), scheduling=SchedulingParams(lane_priority))
        )
    )


def owners_of(batcher: Batcher) -> list[tuple[int, int]]:
    """(number, tokens) of each chunk in the next step, decodes too."""
    plan = step(batcher)
    assert plan is not None
    owners = [int(owner.key.request_id, 16) for owner in batcher._steps.owners(plan) if owner is not None]
    return [(owner, len(chunk.token_ids)) for owner, chunk in zip(owners, plan.chunks, strict=True)]


def prompts_of(batcher: Batcher) -> list[tuple[int, int]]:
    """(number, tokens) of each chunk in the next step."""
    plan = step(batcher)
    return [] if plan is None else [(chunk.token_ids[0], len(chunk.token_ids)) for chunk in plan.chunks]


@pytest.mark.parametrize("make", [prefill, local])
def test_an_urgent_prompt_does_not_wait_for_less_urgent_ones_in_its_own_step(
    records: Records, make: MakeBatcher
) -> None:
    batcher = make(records, max_num_batched_tokens=64, chunk_tokens=64)
    add(batcher, 0, 100, lane_priority=0)
    assert prompts_of(batcher) == [(0, 64)]
    add(batcher, 1, 10, lane_priority=2)
    add(batcher, 2, 10, lane_priority=2)
    assert prompts_of(batcher) == [(1, 10), (2, 10)], "they share a step with their own lane only"
    assert prompts_of(batcher) == [(0, 36)]


@pytest.mark.parametrize("make", [prefill, local])
def test_prompts_of_one_lane_fill_the_step(records: Records, make: MakeBatcher) -> None:
    batcher = make(records, max_num_batched_tokens=64, chunk_tokens=64)
    for number in range(4):
        add(batcher, number, 20, lane_priority=1)
    assert prompts_of(batcher) == [(0, 20), (1, 20), (2, 20), (3, 4)]


@pytest.mark.parametrize("make", [prefill, local])
def test_a_long_urgent_prompt_does_not_stop_a_less_urgent_one(records: Records, make: MakeBatcher) -> None:
    batcher = make(records, max_num_batched_tokens=2, chunk_tokens=2)
    add(batcher, 0, 4, lane_priority=0)
    add(batcher, 1, 158, lane_priority=1)
    whose = [prompts_of(batcher)[0][0] for _ in range(2 * MAX_PASSED_OVER + 2)]
    assert [index for index, number in enumerate(whose) if number == 0] == [MAX_PASSED_OVER, 2 * MAX_PASSED_OVER + 1]


def test_decodes_of_a_lower_lane_sit_out_the_step_of_an_urgent_prompt_but_never_two_in_a_row(records: Records) -> None:
    batcher = local(records, max_num_batched_tokens=16, chunk_tokens=16)
    for number in (0, 1):
        add_lasting(batcher, number, 8, lane_priority=number)
    assert owners_of(batcher) == [(1, 8)]
    assert owners_of(batcher) == [(1, 1), (0, 8)], "the prompt of a lower lane goes beside all decodes"
    add_lasting(batcher, 2, 48, lane_priority=1)
    assert owners_of(batcher) == [(1, 1), (2, 15)], "the whole step but for its own lane"
    assert owners_of(batcher) == [(1, 1), (0, 1), (2, 14)]
    assert owners_of(batcher) == [(1, 1), (2, 15)]
    assert owners_of(batcher) == [(1, 1), (0, 1), (2, 4)]
    assert owners_of(batcher) == [(1, 1), (2, 1), (0, 1)]


def test_nobody_sits_out_for_an_urgent_prompt_that_finds_no_pages(records: Records) -> None:
    batcher = local(records, num_pages=3, max_num_batched_tokens=32)
    add_lasting(batcher, 0, 20, lane_priority=0)
    step(batcher)
    add_lasting(batcher, 1, 40, lane_priority=1)
    assert owners_of(batcher) == [(0, 1)]


def test_an_urgent_prompt_that_cannot_be_computed_leaves_its_step_to_decodes(records: Records) -> None:
    """It has lost its pages, and may not have others."""
    batcher = local(records, max_num_batched_tokens=16, chunk_tokens=16)
    add_lasting(batcher, 0, 8, lane_priority=0)
    step(batcher)
    add_lasting(batcher, 1, 40, lane_priority=1)
    assert owners_of(batcher) == [(1, 16)]
    assert owners_of(batcher) == [(0, 1), (1, 15)]
    urgent = batcher._ranked()[0]
    batcher.pool.put_back(None, urgent.block_table[1:])
    urgent.block_table = urgent.block_table[:1]
    urgent.params = replace(urgent.params, num_reserved_pages=1)
    assert owners_of(batcher) == [(0, 1)]
