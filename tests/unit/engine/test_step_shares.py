"""Lanes get the share of a step that they are guaranteed, and what one leaves idle is lent."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.life import SchedulingParams
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher
from weir.engine.batching.step_shares import PromptWork, StepShares
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, PageBundle, SetBounds
from weir.testing.runner import HashRunner

NUM_LANES = 4
PARTS = st.lists(st.integers(0, 100), min_size=NUM_LANES, max_size=NUM_LANES)
WORK = st.lists(st.builds(PromptWork, st.integers(0, NUM_LANES - 1), st.integers(1, 600)), max_size=24)


def shares_of(parts: list[int]) -> list[float]:
    """At most 1 in all, often exactly 1."""
    total = max(sum(parts), 100)
    return [part / total for part in parts]


def by_lane(work: list[PromptWork], tokens: list[int]) -> list[int]:
    return [
        sum(n for one, n in zip(work, tokens, strict=True) if one.lane_priority == lane) for lane in range(NUM_LANES)
    ]


@given(PARTS.map(shares_of), WORK, st.integers(0, 2048))
def test_a_step_is_full_while_anybody_has_work_and_every_lane_gets_its_share(
    shares: list[float], work: list[PromptWork], num_tokens: int
) -> None:
    given_tokens = StepShares.of(shares).split(work, num_tokens, max_rows=1000)
    assert all(0 <= got <= one.num_tokens for got, one in zip(given_tokens, work, strict=True))
    assert sum(given_tokens) == min(num_tokens, sum(one.num_tokens for one in work))
    wanted, got = by_lane(work, [one.num_tokens for one in work]), by_lane(work, given_tokens)
    for lane, share in enumerate(shares):
        assert got[lane] >= min(wanted[lane], int(share * num_tokens))


@given(PARTS.map(shares_of), WORK, st.integers(0, 2048), st.integers(1, 12))
def test_inside_a_lane_nobody_overtakes_and_no_more_rows_are_used_than_there_are(
    shares: list[float], work: list[PromptWork], num_tokens: int, max_rows: int
) -> None:
    given_tokens = StepShares.of(shares).split(work, num_tokens, max_rows)
    assert sum(tokens > 0 for tokens in given_tokens) <= max_rows
    assert sum(given_tokens) <= num_tokens
    for lane in range(NUM_LANES):
        own = [(got, one.num_tokens) for got, one in zip(given_tokens, work, strict=True) if one.lane_priority == lane]
        first_short = next((index for index, (got, wanted) in enumerate(own) if got < wanted), len(own))
        assert all(got == 0 for got, _ in own[first_short + 1 :])


@given(PARTS.map(shares_of), st.integers(2 * NUM_LANES, 40), st.integers(100, 2048))
def test_a_lane_with_a_share_has_a_row_however_many_prompts_come_before_its_own(
    shares: list[float], max_rows: int, num_tokens: int
) -> None:
    work = [PromptWork(lane, 4) for lane in range(NUM_LANES - 1, -1, -1) for _ in range(40)]
    got = by_lane(work, StepShares.of(shares).split(work, num_tokens, max_rows))
    own_rows = [max(1, int(share * max_rows)) if share else 0 for share in shares]
    if sum(own_rows) <= max_rows:
        assert all(got[lane] > 0 for lane, share in enumerate(shares) if share * num_tokens >= 1)


@pytest.mark.parametrize("shares", [(0.6, 0.5), (-0.1,), (1.5,), (float("nan"),)])
def test_shares_that_are_none_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at most 1"):
        StepShares.of(shares)


def pool_of(num_pages: int, num_slots: int) -> PagePool:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(num_pages)), tuple(range(num_slots))))
    return pool


def prefill(num_pages: int = 100, **changes: int) -> PrefillBatcher:
    return PrefillBatcher(limits(**changes), pool_of(num_pages, 8), Records(100, 8).open)


def running(num_pages: int = 100, **changes: int) -> RunningBatcher:
    return RunningBatcher(limits(**changes), pool_of(num_pages, 8), Records(100, 8).open)


def share_out(batcher: Batcher, *step_shares: float) -> None:
    batcher.set_bounds(SetBounds(batcher.limits.max_num_seqs, batcher.limits.max_num_batched_tokens, step_shares))


def add(batcher: Batcher, number: int, num_tokens: int, lane: int = 0, num_reserved_pages: int = 10) -> None:
    prompt = params(tuple(range(num_tokens)), number, num_reserved_pages=num_reserved_pages)
    batcher.add(Arrival(replace(prompt, scheduling=SchedulingParams(lane))))


def step(batcher: Batcher) -> dict[int, int]:
    """Prompt -> tokens."""
    plan = batcher.decide(0.0)
    if plan is None:
        return {}
    owners = [int(owner.key.request_id, 16) for owner in batcher._steps.owners(plan) if owner is not None]
    batcher.record(plan, HashRunner(100, VOCAB_SIZE).run(plan))
    assert batcher.check_integrity() == ()
    return dict(zip(owners, (len(chunk.token_ids) for chunk in plan.chunks), strict=True))


@pytest.mark.parametrize("make", [prefill, running])
def test_a_prompt_of_a_guaranteed_lane_is_computed_beside_urgent_ones(make: object) -> None:
    batcher = make(max_num_batched_tokens=64)  # type: ignore[operator]
    share_out(batcher, 0.25, 0.0)
    add(batcher, 1, 90, lane=1)
    add(batcher, 2, 90, lane=1)
    add(batcher, 3, 60)
    assert step(batcher) == {1: 32, 2: 16, 3: 16}
    assert step(batcher) == {1: 32, 2: 16, 3: 16}


@pytest.mark.parametrize("make", [prefill, running])
def test_without_shares_or_without_prompts_of_others_nothing_is_kept_back(make: object) -> None:
    batcher = make(max_num_batched_tokens=64)  # type: ignore[operator]
    add(batcher, 1, 90, lane=1)
    add(batcher, 2, 90, lane=1)
    add(batcher, 3, 60)
    assert step(batcher) == {1: 32, 2: 32}
    alone = make(max_num_batched_tokens=64)  # type: ignore[operator]
    share_out(alone, 0.25, 0.0)
    add(alone, 1, 90, lane=1)
    add(alone, 2, 90, lane=1)
    assert step(alone) == {1: 32, 2: 32}


def test_what_a_lane_leaves_of_its_share_is_lent() -> None:
    batcher = prefill(max_num_batched_tokens=64)
    share_out(batcher, 0.5, 0.0)
    add(batcher, 1, 90, lane=1)
    add(batcher, 2, 90, lane=1)
    add(batcher, 3, 4)
    assert step(batcher) == {1: 32, 2: 28, 3: 4}


def test_a_guaranteed_lane_is_admitted_where_urgent_prompts_fill_the_batch() -> None:
    batcher = prefill(max_num_seqs=2, max_num_batched_tokens=64)
    share_out(batcher, 0.25, 0.0)
    for number in (1, 2, 3):
        add(batcher, number, 90, lane=1)
    add(batcher, 4, 60)
    add(batcher, 5, 60)
    first = step(batcher)
    assert (first[4], sum(first.values()), len(first)) == (32, 64, 2), "two rows, of which one is the lane's"
    assert 5 not in step(batcher)


def test_what_one_cannot_use_for_want_of_a_page_goes_to_the_others() -> None:
    batcher = running(max_num_batched_tokens=64)
    share_out(batcher, 0.5, 0.0)
    add(batcher, 1, 90, lane=1)
    add(batcher, 2, 90, lane=1)
    add(batcher, 3, 60, num_reserved_pages=1)
    assert step(batcher) == {1: 32, 2: 32}, "3 has no more pages reserved than one, and ends"
