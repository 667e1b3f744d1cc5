"""Fast-forward changes nothing but the time that it takes: the same outcomes, the same floats."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sim.loads import PROFILE, poisson_load

from weir.core.cost import StepCost
from weir.policy.registry import PolicySpec
from weir.scheduling.limits import CoreLimits
from weir.sim.engines.exact import ExactEngine
from weir.sim.results.metrics import SimResult
from weir.sim.simulator import simulate
from weir.sim.spec import FailureSpec, LinkSpec, PoolSpec, SystemSpec
from weir.sim.workloads.workload import SimRequest, Workload


@st.composite
def systems(draw: st.DrawFn) -> SystemSpec:
    """Some with too little memory, small steps and few places, so that both engines have to do with it."""
    max_num_seqs = draw(st.sampled_from([2, 5, 64]))
    sizes: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.sampled_from([max_num_seqs, 64, 2048])),
        "chunk_tokens": draw(st.sampled_from([1, 16, 2048])),
        "num_pages": draw(st.sampled_from([40, 60, 200, 500, 2000])),
    }
    if draw(st.booleans()):
        spec = SystemSpec.colocated(draw(st.integers(1, 2)), PROFILE, **sizes)
    else:
        link = draw(st.sampled_from([None, LinkSpec(25.0, 0.1), LinkSpec(0.5, is_shared=True)]))
        spec = SystemSpec.split(draw(st.integers(1, 2)), draw(st.integers(1, 2)), PROFILE, link=link, **sizes)
        pools = tuple(
            PoolSpec(p.role, p.num_workers, p.profile, serves_locally=p.role == "decode", **sizes) for p in spec.pools
        )
        spec = replace(spec, pools=pools) if draw(st.booleans()) else spec
    if draw(st.booleans()):
        dies_s = draw(st.floats(0.1, 2.0))
        worker_id = draw(st.sampled_from(spec.worker_ids))
        spec = replace(spec, failures=(FailureSpec(worker_id, dies_s, dies_s + draw(st.floats(0.2, 2.0))),))
    return spec


@st.composite
def loads(draw: st.DrawFn) -> Workload:
    num = draw(st.integers(1, 25))
    rate_a_s = draw(st.sampled_from([1.0, 20.0, 500.0]))
    workload = poisson_load(
        num, rate_a_s, prompt=draw(st.sampled_from([3, 60, 300])), output=20, seed=draw(st.integers())
    )
    lanes = draw(st.sampled_from([("",), ("",), ("",), ("interactive", "batch")]))
    deadline_s = draw(st.sampled_from([0.0, 0.5]))
    requests = [
        replace(
            request,
            num_prompt_tokens=min(request.num_prompt_tokens, 300),
            num_output_tokens=min(request.num_output_tokens, 60),
            max_tokens=100,
            lane=lanes[index % len(lanes)],
            deadline_s=deadline_s if index % 3 == 0 else 0.0,
            arrival_s=round(request.arrival_s, 2) if index % 2 else request.arrival_s,
        )
        for index, request in enumerate(workload.requests)
    ]
    return Workload("any", tuple(sorted(requests, key=lambda request: request.arrival_s)))


def check_equal(
    spec: SystemSpec, workload: Workload, limits: CoreLimits | None = None, policy: str = "fcfs"
) -> SimResult:
    """What came out of both."""
    exact = simulate(spec, workload, limits=limits, policy=PolicySpec(policy), fast_forward=False)
    fast = simulate(spec, workload, limits=limits, policy=PolicySpec(policy), fast_forward=True)
    assert fast.outcomes == exact.outcomes
    assert fast.gap_counts_by_ms == exact.gap_counts_by_ms
    assert fast.queue_lengths == exact.queue_lengths
    assert fast.tenant_service == exact.tenant_service
    shared = fast.counters.keys() & exact.counters.keys()
    assert {name: fast.counters[name] for name in shared} == {name: exact.counters[name] for name in shared}
    return exact


# Run it with many more examples after every change to a fast engine.
@given(systems(), loads(), st.sampled_from([1.0, 3.0]), st.sampled_from(["fcfs", "fcfs", "edf", "slai"]))
@settings(max_examples=30, deadline=None)
def test_both_engines_give_the_same_result_to_the_bit(
    spec: SystemSpec, workload: Workload, overcommit: float, policy: str
) -> None:
    check_equal(spec, workload, CoreLimits(page_overcommit=overcommit), policy)


@pytest.mark.parametrize("num_pages", [60, 100])
def test_a_worker_that_goes_over_to_the_real_batcher_counts_as_if_it_always_had_it(num_pages: int) -> None:
    """With three times the pages promised, sequences are half done when the real batcher takes them."""
    spec = SystemSpec.colocated(1, PROFILE, num_pages=num_pages)
    check_equal(spec, poisson_load(60, 20.0, prompt=100, output=60, seed=3), CoreLimits(page_overcommit=3.0))


LINKS = [None, LinkSpec(25.0, 0.1), LinkSpec(0.5, is_shared=True)]


@pytest.mark.parametrize("link", LINKS, ids=["in place", "link", "slow link"])
def test_long_stretches_of_separate_pools_are_equal_too(link: LinkSpec | None) -> None:
    failures = (FailureSpec("prefill-0", 3.0, 4.0), FailureSpec("decode-1", 4.5, 5.0))
    spec = replace(SystemSpec.split(2, 2, PROFILE, link=link), failures=failures)
    exact = check_equal(spec, poisson_load(120, 20.0, output=120, seed=3))
    assert exact.counters["handed_off"] > 40
    assert exact.counters["tokens_generated"] > 5000
    assert exact.counters["failed"] > 0


SYSTEMS = [SystemSpec.colocated(2, PROFILE), *(SystemSpec.split(2, 2, PROFILE, link=link) for link in LINKS[1:])]


@pytest.mark.parametrize("spec", SYSTEMS, ids=["colocated", "link", "slow link"])
def test_with_pages_for_all_the_real_batcher_is_never_asked(spec: SystemSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests here would compare it with itself."""

    def begin_step(engine: ExactEngine) -> int | None:
        raise AssertionError("a real batcher decides")

    monkeypatch.setattr(ExactEngine, "begin_step", begin_step)
    result = simulate(spec, poisson_load(40, 20.0))
    assert all(outcome.is_finished for outcome in result.outcomes)
    with pytest.raises(AssertionError, match="a real batcher decides"):
        simulate(spec, poisson_load(40, 20.0), fast_forward=False)


def test_prompts_wait_for_places_and_pages_of_those_that_are_being_handed_over() -> None:
    slow = LinkSpec(0.2, is_shared=True)
    burst = Workload("burst", tuple(SimRequest(f"r{index}", 0.0, 300, 20, 100) for index in range(12)))
    few_places = SystemSpec.split(1, 2, PROFILE, link=slow, max_num_seqs=2)
    few_pages = SystemSpec.split(1, 2, PROFILE, link=slow, num_pages=60)
    check_equal(few_places, burst, CoreLimits(page_overcommit=3.0))
    exact = check_equal(few_pages, burst, CoreLimits(page_overcommit=3.0))
    assert exact.counters["stalls"] > 0


def test_what_is_sampled_after_a_deadline_does_not_count_however_short_steps_are() -> None:
    quick = replace(PROFILE, step=StepCost(0.05, 0.0, 0.0, 0.001, 1e-6))
    requests = [SimRequest(f"r{index}", index / 7, 20, 1500, 1500, deadline_s=0.03 * (index % 2)) for index in range(3)]
    exact = check_equal(SystemSpec.colocated(1, quick), Workload("deadlines", tuple(requests)))
    assert [outcome.refusal for outcome in exact.outcomes].count("deadline") == 1


def test_hand_offs_that_wait_for_pages_wait_as_long() -> None:
    """Where a fast decode engine sees that memory gets tight, the run begins again without it."""
    spec = SystemSpec.split(2, 1, PROFILE, link=LinkSpec(25.0), num_pages=120)
    exact = check_equal(spec, poisson_load(40, 200.0, output=100), CoreLimits(page_overcommit=3.0))
    assert exact.counters["hand_offs_that_waited_for_pages"] > 0


def test_workers_in_step_with_each_other_are_told_apart_by_who_was_planned_first() -> None:
    """Their steps end in the same nanosecond."""
    profile = replace(PROFILE, decision_us=0.0)
    requests = [SimRequest(f"r{index}", 0.0, 100, 80, 100) for index in range(2)]
    for spec in (SystemSpec.colocated(2, profile), SystemSpec.split(2, 2, profile)):
        exact = check_equal(spec, Workload("twins", tuple(requests)))
        assert exact.outcomes[0].last_token_s == exact.outcomes[1].last_token_s
        assert exact.outcomes[0].prefill_worker_id != exact.outcomes[1].prefill_worker_id


def test_a_worker_that_runs_out_of_pages_goes_over_to_the_real_batcher() -> None:
    spec = SystemSpec.colocated(1, PROFILE, num_pages=70)
    burst = [SimRequest(f"a{index}", 0.0, 160, 100, 100) for index in range(6)]
    later = [SimRequest(f"b{index}", 60.0 + index, 160, 10, 100) for index in range(3)]
    workload = Workload("both", (*burst, *later))
    limits = CoreLimits(page_overcommit=3.0)
    exact = simulate(spec, workload, limits=limits, fast_forward=False)
    fast = simulate(spec, workload, limits=limits)
    assert exact.counters["preemptions"] > 0
    assert fast.counters["preemptions"] == exact.counters["preemptions"]
    assert fast.outcomes == exact.outcomes
    assert sum(outcome.num_preemptions for outcome in fast.outcomes) == fast.counters["preemptions"]


def test_half_read_prompts_give_way_in_a_simulation_too() -> None:
    """Pages are free again only when a slow link has passed them on. The run begins again with the real batcher."""
    slow = LinkSpec(0.02, is_shared=True)
    spec = SystemSpec.split(1, 2, PROFILE, link=slow, num_pages=60, max_num_batched_tokens=64)
    burst = Workload("burst", tuple(SimRequest(f"r{index}", 0.0, 300, 20, 100) for index in range(12)))
    exact = check_equal(spec, burst, CoreLimits(page_overcommit=3.0))
    assert exact.counters["preemptions"] == sum(outcome.num_preemptions for outcome in exact.outcomes) > 0
    assert exact.counters["tokens_recomputed"] > 0
    assert exact.counters["finished"] == len(burst.requests)
