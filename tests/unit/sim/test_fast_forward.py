"""Fast-forward changes nothing but the time that it takes: the same outcomes, the same floats."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sim.loads import PROFILE, poisson_load

from weir.scheduling.limits import CoreLimits
from weir.sim.simulator import simulate
from weir.sim.spec import FailureSpec, LinkSpec, PoolSpec, SystemSpec
from weir.sim.workload import SimRequest, Workload


@st.composite
def systems(draw: st.DrawFn) -> SystemSpec:
    """Some with too little memory, small steps and few places, so that both engines have to do with it."""
    max_num_seqs = draw(st.sampled_from([2, 5, 64]))
    sizes: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.sampled_from([max_num_seqs, 64, 2048])),
        "chunk_tokens": draw(st.sampled_from([1, 16, 2048])),
        "num_pages": draw(st.sampled_from([60, 200, 2000])),
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
    lanes = draw(st.sampled_from([("",), ("interactive", "batch")]))
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


@given(systems(), loads(), st.sampled_from([1.0, 3.0]))
@settings(max_examples=25, deadline=None)
def test_both_engines_give_the_same_result_to_the_bit(spec: SystemSpec, workload: Workload, overcommit: float) -> None:
    limits = CoreLimits(page_overcommit=overcommit)
    exact = simulate(spec, workload, limits=limits, fast_forward=False)
    fast = simulate(spec, workload, limits=limits, fast_forward=True)
    assert fast.outcomes == exact.outcomes
    assert fast.gap_counts_by_ms == exact.gap_counts_by_ms
    assert fast.queue_lengths == exact.queue_lengths
    assert fast.tenant_service == exact.tenant_service
    shared = fast.counters.keys() & exact.counters.keys()
    assert {name: fast.counters[name] for name in shared} == {name: exact.counters[name] for name in shared}


def test_a_worker_that_runs_out_of_pages_goes_over_to_the_real_batcher_and_back() -> None:
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
