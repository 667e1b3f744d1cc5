"""What the simulator tells the planner of what workers can do."""

from dataclasses import replace

import pytest
from tests.unit.sim.loads import PROFILE

from weir.core.cost import StepCost
from weir.planner.capacity import Prediction
from weir.planner.observation import ExpectedLoad, Pools
from weir.scheduling.limits import CoreLimits
from weir.sim.capacity import CapacitySpec, SimCapacity
from weir.sim.planning import PoolSizes
from weir.sim.results.metrics import Slo
from weir.sim.spec import LinkSpec, SystemSpec

LOAD = ExpectedLoad(10.0, (300, 500, 900), (20, 60, 120))
MOST = Pools(12, 12)


def system(sizes: PoolSizes) -> SystemSpec:
    link = LinkSpec(25.0)
    return SystemSpec.split(sizes.num_prefill, sizes.num_decode, PROFILE, link=link, max_num_seqs=8)


@pytest.fixture
def capacity() -> SimCapacity:
    return SimCapacity(CapacitySpec(system, Slo(ttft_s=0.5, tpot_s=0.1), CoreLimits(), num_requests=80))


def test_heavier_loads_need_more_workers_and_those_are_enough(capacity: SimCapacity) -> None:
    pools = [capacity.least_pools(replace(LOAD, rate_a_s=rate), 0.95, MOST) for rate in (5.0, 20.0, 60.0)]
    assert sum(pools[0]) < sum(pools[1]) < sum(pools[2])
    for rate, found in zip((5.0, 20.0, 60.0), pools, strict=True):
        assert capacity.predict(replace(LOAD, rate_a_s=rate), found).attainment >= 0.95


def test_what_all_workers_together_could_do_is_not_simulated_where_fewer_are_enough(
    capacity: SimCapacity, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, predict = list[Pools](), capacity.predict

    def note(load: ExpectedLoad, pools: Pools) -> Prediction:
        asked.append(pools)
        return predict(load, pools)

    monkeypatch.setattr(capacity, "predict", note)
    capacity.least_pools(LOAD, 0.95, MOST)
    assert MOST not in asked
    capacity.least_pools(replace(LOAD, rate_a_s=2000.0), 0.95, MOST)
    assert MOST in asked


def test_long_prompts_need_prefill_workers_and_long_answers_decode_workers(capacity: SimCapacity) -> None:
    prompts = capacity.least_pools(ExpectedLoad(20.0, (4000,), (4,)), 0.95, MOST)
    answers = capacity.least_pools(ExpectedLoad(20.0, (40,), (200,)), 0.95, MOST)
    assert prompts.prefill > answers.prefill
    assert answers.decode > prompts.decode


def test_prompts_that_are_cached_cost_less(capacity: SimCapacity) -> None:
    load = ExpectedLoad(20.0, (4000,), (10,))
    cached = capacity.least_pools(replace(load, cached_share=0.8), 0.95, MOST)
    assert cached.prefill < capacity.least_pools(load, 0.95, MOST).prefill


def test_answers_read_the_whole_prompt_however_much_of_it_was_cached() -> None:
    """Decode steps whose time is that of their context."""
    profile = replace(PROFILE, step=StepCost(1.0, 0.001, 0.0, 0.0, 1e-3))

    def slow(sizes: PoolSizes) -> SystemSpec:
        link = LinkSpec(1000.0)
        return SystemSpec.split(sizes.num_prefill, sizes.num_decode, profile, link=link, max_num_seqs=4)

    capacity = SimCapacity(CapacitySpec(slow, Slo(ttft_s=5.0, tpot_s=0.1), CoreLimits(), num_requests=80))
    load = ExpectedLoad(12.0, (2000,), (60,))
    whole = capacity.least_pools(load, 0.95, MOST)
    assert whole.decode > 1
    assert capacity.least_pools(replace(load, cached_share=0.9), 0.95, MOST).decode == whole.decode
    one_each = [capacity.predict(replace(load, rate_a_s=0.1, cached_share=share), Pools(1, 1)) for share in (0.0, 0.9)]
    assert one_each[1].itl_s == pytest.approx(one_each[0].itl_s, rel=0.01)
    assert one_each[1].ttft_s < one_each[0].ttft_s


def test_more_pages_are_kept_for_requests_that_ask_for_more() -> None:
    slo, load = Slo(ttft_s=0.5, tpot_s=0.1), ExpectedLoad(20.0, (500,), (60,))
    pools = [
        SimCapacity(CapacitySpec(system, slo, CoreLimits(), num_requests=80, max_tokens=num)).predict(load, Pools(2, 3))
        for num in (0, 10**6)
    ]
    assert pools[1].ttft_s > 1.2 * pools[0].ttft_s


def test_the_same_question_is_simulated_once(capacity: SimCapacity) -> None:
    first = capacity.predict(LOAD, Pools(3, 4))
    num = capacity.num_simulated
    assert capacity.predict(replace(LOAD, rate_a_s=9.99), Pools(3, 4)) == first
    assert capacity.num_simulated == num == 1


def test_what_cannot_be_enough_is_not_simulated(capacity: SimCapacity) -> None:
    heavy = replace(LOAD, rate_a_s=500.0)
    assert capacity.predict(heavy, Pools(1, 1)).attainment == 0.0
    assert capacity.predict(LOAD, Pools(0, 5)).attainment == 0.0
    assert capacity.num_simulated == 0
    assert capacity.least_pools(heavy, 0.95, MOST).decode == MOST.decode
    assert capacity.num_simulated == 0


def test_an_slo_that_nobody_can_meet_asks_for_no_more_workers(capacity: SimCapacity) -> None:
    """A prompt by itself takes longer than its SLO."""
    assert capacity.least_pools(ExpectedLoad(0.2, (30_000,), (10,)), 0.95, MOST) == Pools(1, 1)


def test_a_search_is_bounded_and_remembered() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.1)
    bounded = SimCapacity(CapacitySpec(system, slo, CoreLimits(), num_requests=80, max_steps=1))
    load = replace(LOAD, rate_a_s=60.0)
    first, num_first = bounded.least_pools(load, 0.99, MOST), bounded.num_simulated
    assert num_first <= 4
    assert bounded.least_pools(load, 0.99, MOST) == first
    assert bounded.num_simulated == num_first, "what was simulated is remembered"


def test_without_a_load_one_of_each_is_enough(capacity: SimCapacity) -> None:
    idle = ExpectedLoad(0.0, (), ())
    assert capacity.least_pools(idle, 0.95, MOST) == Pools(1, 1)
    assert capacity.predict(idle, Pools(1, 1)).attainment == 1.0
    assert capacity.num_simulated == 0


def test_time_of_prompts_is_that_of_the_lengths_that_were_asked_about(capacity: SimCapacity) -> None:
    capacity.predict(ExpectedLoad(1.0, (1000,), (10,)), Pools(1, 1))
    step = PROFILE.step
    alone_s = (step.prefill_token_ms * 1000 + step.prefill_pair_ms * 1000 * 500 + step.base_ms * 1000 / 2048) / 1e3
    assert capacity.prefill_s(3000) == pytest.approx(3 * alone_s)
