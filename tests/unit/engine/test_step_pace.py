"""Steps get as many prompt tokens as fit their target time, whatever a token costs, and nobody's turn is lost by it."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.engine.test_policy_seams import ScriptedBudget, policy
from tests.unit.engine.world import Records, limits, params

from weir.core.cost import StepCost
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.prompt_share import FIRST_TOKENS, MIN_TOKENS, StepPace
from weir.engine.batching.running import RunningBatcher
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, PageBundle
from weir.engine.plan import StepPlan, StepResult
from weir.policy.seams import StepShare

TARGET_S = 0.2


def follow(pace: StepPace, num_steps: int, base_s: float, token_s: float) -> list[float]:
    """Full steps; what each took."""
    durations_s = []
    for _ in range(num_steps):
        pace.planned(pace.num_tokens)
        durations_s.append(base_s + token_s * pace.num_tokens)
        pace.stepped(durations_s[-1])
    return durations_s


def test_without_a_target_a_step_takes_all_that_fits() -> None:
    pace = StepPace(2048)
    assert pace.num_tokens == 2048
    follow(pace, 5, 60.0, 1.0)
    assert pace.num_tokens == 2048


@given(base_ms=st.floats(0, 120), token_ms=st.floats(0.08, 1.0), most=st.integers(300, 4096))
def test_full_steps_soon_last_about_the_target(base_ms: float, token_ms: float, most: int) -> None:
    pace = StepPace(most, TARGET_S)
    last_s = follow(pace, 30, base_ms / 1e3, token_ms / 1e3)[-1]
    assert last_s <= 1.1 * TARGET_S or pace.num_tokens == MIN_TOKENS
    assert last_s >= 0.8 * TARGET_S or pace.num_tokens == most
    assert pace.num_tokens == most or pace.num_tokens % 16 == 0


def test_a_fast_machine_has_its_whole_budget_after_some_steps() -> None:
    pace = StepPace(2048, TARGET_S)
    assert pace.num_tokens == FIRST_TOKENS
    follow(pace, 9, 0.010, 0.00005)
    assert pace.num_tokens == 2048


def test_on_a_slow_machine_steps_are_not_cut_to_nothing() -> None:
    pace = StepPace(2048, TARGET_S)
    follow(pace, 30, 0.1, 1.0)
    assert pace.num_tokens == MIN_TOKENS


def test_one_step_that_the_machine_held_up_costs_less_than_a_third_of_the_budget() -> None:
    pace = StepPace(2048, TARGET_S)
    follow(pace, 20, 0.0, 0.0005)
    before = pace.num_tokens
    pace.planned(before)
    pace.stepped(30.0)
    assert pace.num_tokens >= 2 * before // 3


def test_short_steps_of_a_few_tokens_say_nothing_of_full_ones() -> None:
    pace = StepPace(2048, TARGET_S)
    follow(pace, 20, 0.0, 0.0005)
    before = pace.num_tokens
    for num_tokens in (8, 0, 30):
        pace.planned(num_tokens)
        pace.stepped(0.1)
    assert pace.num_tokens == before
    pace.planned(8)
    pace.stepped(0.5)
    assert pace.num_tokens < before, "decodes beside them, or context: too long is too long"


def make(kind: type[PrefillBatcher] | type[RunningBatcher], target_s: float = TARGET_S) -> Batcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(200)), tuple(range(8))))
    bounds = replace(
        limits(max_num_batched_tokens=1024, chunk_tokens=1024), max_context_tokens=3000, target_step_s=target_s
    )
    return kind(bounds, pool, Records(200, 8, 3000).open)


def run_steps(batcher: Batcher, token_s: float, num_steps: int) -> list[int]:
    """Tokens of each step, each of which takes `token_s` a token."""
    sizes, now_s = [], 1.0
    for _ in range(num_steps):
        plan = batcher.decide(now_s)
        assert plan is not None
        sizes.append(plan.num_tokens)
        now_s += token_s * plan.num_tokens
        batcher.record(plan, sampled(plan), now_s)
    return sizes


def sampled(plan: StepPlan) -> StepResult:
    return StepResult({chunk.slot: 7 for chunk in plan.chunks if chunk.sample})


def test_a_worker_that_prefills_keeps_to_the_target() -> None:
    for kind in (PrefillBatcher, RunningBatcher):
        batcher = make(kind)
        batcher.add(Arrival(params(tuple(k % 50 for k in range(2900)), num_reserved_pages=190)))
        sizes = run_steps(batcher, 0.001, 12)
        assert sizes[0] == FIRST_TOKENS
        assert sizes[-1] == 192
        assert batcher.load.max_step_tokens == 192


def test_without_a_target_a_worker_prefills_as_much_as_a_step_may_hold() -> None:
    for kind in (PrefillBatcher, RunningBatcher):
        batcher = make(kind, math.inf)
        batcher.add(Arrival(params(tuple(k % 50 for k in range(2900)), num_reserved_pages=190)))
        assert run_steps(batcher, 1.0, 2) == [1024, 1024]
        assert batcher.load.max_step_tokens == 1024


def test_decodes_are_not_held_back_for_the_target() -> None:
    batcher = make(RunningBatcher)
    for index in range(3):
        batcher.add(Arrival(params((1, 2, 3), index, max_tokens=90)))
    run_steps(batcher, 0.0, 1)
    assert run_steps(batcher, 9.0, 3) == [3, 3, 3]


def test_a_policy_fills_steps_of_the_size_that_fits_and_is_shown_what_steps_cost() -> None:
    batcher = make(RunningBatcher)
    batcher.add(Arrival(params((1, 2, 3), 0, max_tokens=90)))
    run_steps(batcher, 0.0, 1)
    batcher.add(Arrival(params(tuple(k % 50 for k in range(2900)), 1, num_reserved_pages=190)))
    budget = ScriptedBudget(StepShare((0,), 100))
    batcher.set_policy(policy(budget=budget))
    run_steps(batcher, 0.001, 1)
    cost = StepCost(1.0, 2.0, 0.0, 3.0, 0.0)
    batcher.set_cost(cost)
    run_steps(batcher, 0.001, 1)
    assert [view.cost for view in budget.views] == [None, cost]
    assert budget.views[0].max_tokens == FIRST_TOKENS + 1
