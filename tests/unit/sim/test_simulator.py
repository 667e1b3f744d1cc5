"""Runs whose result can be worked out by hand, and what must hold of every run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.sim.loads import PROFILE, poisson_load, shared_prompts

from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.memory.preemption import PreemptionSettings
from weir.policy.registry import PolicySpec, policy_names
from weir.scheduling.limits import CoreLimits, LaneLimits
from weir.sim.hand_offs import SimHandOffs
from weir.sim.simulator import SimulationDefect, simulate
from weir.sim.spec import FailureSpec, LinkSpec, PoolSpec, SystemSpec
from weir.sim.workloads.workload import SimRequest, Workload

LOCAL = SystemSpec.colocated(1, PROFILE)
SPLIT = SystemSpec.split(1, 1, PROFILE)
SECONDS = 1e-3
_ROOT = Path(__file__).parents[3]
_RUN = """
import hashlib
from tests.unit.sim.loads import PROFILE, poisson_load, shared_prompts
from weir.policy.registry import PolicySpec
from weir.sim.hand_offs import SimHandOffs
from weir.sim.simulator import SimulationDefect, simulate
from weir.sim.spec import LinkSpec, SystemSpec

lines = []
for workload in (poisson_load(30, 30.0), shared_prompts(30, 30.0)):
    for spec in (SystemSpec.colocated(3, PROFILE), SystemSpec.split(2, 2, PROFILE, link=LinkSpec(10.0))):
        for policy in ("fcfs", "srtf", "slai"):
            result = simulate(spec, workload, policy=PolicySpec(policy))
            lines.append(repr((result.outcomes, result.gap_counts_by_ms, result.queue_lengths,
                               sorted(result.tenant_service.items()), sorted(result.counters.items()))))
print(hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


def one(num_prompt: int, num_output: int, **rest: object) -> Workload:
    return Workload("one", (SimRequest("r0", 0.25, num_prompt, num_output, num_output, **rest),))  # type: ignore[arg-type]


def step_s(num_prefill: int = 0, context: int = 0) -> float:
    cost = PROFILE.step
    if num_prefill:
        pairs = num_prefill * num_prefill / 2
        return (cost.base_ms + cost.prefill_token_ms * num_prefill + cost.prefill_pair_ms * pairs) * SECONDS
    return (cost.base_ms + cost.decode_sequence_ms + cost.context_token_ms * context) * SECONDS


def test_a_single_request_takes_its_messages_its_prompt_and_a_step_for_each_further_token() -> None:
    outcome = simulate(LOCAL, one(100, 3)).outcomes[0]
    way_s = (2 * PROFILE.bus_ms + 2 * PROFILE.stream_ms + PROFILE.decision_us / 1000) * SECONDS
    first_s = 0.25 + way_s + step_s(num_prefill=100)
    assert outcome.first_token_s == pytest.approx(first_s, abs=1e-8)
    assert outcome.last_token_s == pytest.approx(first_s + step_s(context=101) + step_s(context=102), abs=1e-8)
    assert outcome.num_output_tokens == 3
    assert outcome.is_local
    assert outcome.worst_gap_s == pytest.approx(step_s(context=102), abs=1e-8)


def test_a_hand_off_over_a_link_costs_its_bytes_between_the_first_and_the_second_token() -> None:
    in_place = simulate(SPLIT, one(1000, 2)).outcomes[0]
    link = LinkSpec(gbytes_per_s=10, latency_ms=2)
    over_link = simulate(SystemSpec.split(1, 1, PROFILE, link=link), one(1000, 2)).outcomes[0]
    assert in_place.first_token_s == over_link.first_token_s
    bytes_s = 1000 * PROFILE.kv_bytes_per_token / 10e9
    assert over_link.worst_gap_s - in_place.worst_gap_s == pytest.approx(bytes_s + 0.002, abs=1e-8)
    assert not in_place.is_local


def test_transfers_of_a_shared_link_stand_in_line_and_others_do_not() -> None:
    both = tuple(SimRequest(f"r{index}", 0.0, 1000, 2, 2) for index in range(2))
    slowest = {}
    for is_shared in (False, True):
        spec = SystemSpec.split(2, 2, PROFILE, link=LinkSpec(0.5, is_shared=is_shared))
        slowest[is_shared] = max(outcome.worst_gap_s for outcome in simulate(spec, Workload("two", both)).outcomes)
    bytes_s = 1000 * PROFILE.kv_bytes_per_token / 0.5e9
    assert slowest[True] - slowest[False] == pytest.approx(bytes_s, rel=0.1)


@pytest.mark.parametrize("policy", policy_names())
def test_under_every_policy_each_request_ends_once_and_all_pages_come_back(policy: str) -> None:
    workload = poisson_load(60, 30.0)
    for spec in (LOCAL, SPLIT):
        result = simulate(spec, workload, policy=PolicySpec(policy))  # raises SimulationDefect otherwise
        assert all(outcome.is_finished for outcome in result.outcomes)
        counts = [outcome.num_output_tokens for outcome in result.outcomes]
        assert counts == [request.num_output_tokens for request in workload.requests]


def test_cached_prefixes_are_found_and_shorten_prompts() -> None:
    workload = shared_prompts(80, 20.0)
    keeping = simulate(LOCAL, workload)
    forgetting = simulate(SystemSpec((PoolSpec("local", 1, PROFILE),), keeps_prefixes=False), workload)
    assert sum(outcome.num_cached_tokens for outcome in keeping.outcomes) > 0
    assert sum(outcome.num_cached_tokens for outcome in forgetting.outcomes) == 0
    assert keeping.counters["prompt_tokens_computed"] < 0.7 * forgetting.counters["prompt_tokens_computed"]


def test_requests_of_a_worker_that_dies_fail_and_later_ones_are_served_by_its_successor() -> None:
    spec = SystemSpec((PoolSpec("local", 1, PROFILE),), failures=(FailureSpec("local-0", 1.0, 2.0),))
    for fast_forward in (False, True):
        outcomes = simulate(spec, poisson_load(100, 20.0), fast_forward=fast_forward).outcomes
        lost = [outcome for outcome in outcomes if outcome.refusal == "worker_lost"]
        assert lost
        assert all(outcome.ended_s is not None and outcome.ended_s >= 1.0 for outcome in lost)
        assert all(outcome.is_finished for outcome in outcomes if outcome.arrival_s > 2.5)


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
def test_either_end_of_a_hand_off_may_die_and_nothing_leaks(worker_id: str) -> None:
    for link in (None, LinkSpec(1.0)):
        pools = SystemSpec.split(2, 2, PROFILE).pools
        spec = SystemSpec(pools, link, failures=(FailureSpec(worker_id, 0.8, 1.5), FailureSpec(worker_id, 2.2, 2.4)))
        outcomes = simulate(spec, poisson_load(120, 40.0, output=30)).outcomes
        assert any(outcome.refusal == "worker_lost" for outcome in outcomes)
        assert sum(outcome.is_finished for outcome in outcomes) > 60


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    outcome = simulate(LOCAL, one(100, 500, deadline_s=0.3)).outcomes[0]
    assert outcome.refusal == "deadline"
    assert outcome.ended_s == pytest.approx(0.55)
    assert 0 < outcome.num_output_tokens < 500


def test_a_full_lane_refuses() -> None:
    limits = CoreLimits(lanes=(LaneLimits("standard", 2, 60.0),))
    spec = SystemSpec.colocated(1, PROFILE, max_num_seqs=1)
    burst = Workload("burst", tuple(SimRequest(f"r{index}", 0.0, 50, 20, 20) for index in range(8)))
    outcomes = simulate(spec, burst, limits=limits).outcomes
    assert {outcome.refusal for outcome in outcomes} == {"", "queue_full"}


def test_a_static_batch_is_slower_than_a_continuous_one() -> None:
    workload = poisson_load(60, 100.0)
    durations = {}
    for batching in (Batching.CONTINUOUS, Batching.STATIC):
        pools = (PoolSpec("local", 1, PROFILE, max_num_seqs=8),)
        durations[batching] = simulate(SystemSpec(pools, join=JoinSettings(batching)), workload).duration_s
    assert durations[Batching.STATIC] > 1.3 * durations[Batching.CONTINUOUS]


def test_service_of_a_tenant_is_what_its_requests_cost() -> None:
    requests = tuple(SimRequest(f"r{index}", 0.1 * index, 100, 10, 10, tenant=f"t{index % 2}") for index in range(10))
    result = simulate(LOCAL, Workload("two", requests))
    assert {tenant: service[-1][1] for tenant, service in result.tenant_service.items()} == {"t0": 600.0, "t1": 600.0}


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload("w", (SimRequest("a", 0.0, 0, 1, 1),)), "request a: num_prompt_tokens 0"),
        (Workload("w", (SimRequest("a", 0.0, 1, 1, 1),) * 2), "request a: is in the workload twice"),
        (Workload("w", (SimRequest("a", 1.0, 1, 1, 1), SimRequest("b", 0.5, 1, 1, 1))), "request b: arrival_s 0.5"),
        (one(1, 1, deadline_s=-1.0), "request r0: deadline_s -1.0, must be finite and at least 0"),
        (one(1, 1, ttft_target_s=float("inf")), "request r0: ttft_target_s inf"),
        (one(1, 1, predicted_output_tokens=float("nan")), "request r0: predicted_output_tokens nan"),
        (Workload("w", (), block_tokens=10), "block_tokens 10"),
    ],
)
def test_a_workload_that_cannot_be_is_refused_by_name(workload: Workload, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(LOCAL, workload)


def test_a_swap_file_which_would_cost_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"preemption\.num_swap_slots 8: must be 0"):
        replace(LOCAL, preemption=PreemptionSettings(num_swap_slots=8))


def test_a_request_that_is_lost_on_its_way_ends_the_run_as_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler ticks on and workers report for ever: no end of events tells that there is nothing to wait for."""
    monkeypatch.setattr(SimHandOffs, "begin", lambda *_: None)
    with pytest.raises(SimulationDefect, match="1 requests never end"):
        simulate(SPLIT, one(100, 5))


def digest_in_a_process_with(hash_seed: str) -> str:
    environ = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _RUN]
    run = subprocess.run(command, env=environ, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=300)
    return run.stdout


def test_the_same_workload_gives_the_same_result_byte_for_byte_whatever_the_order_of_sets() -> None:
    assert digest_in_a_process_with("1") == digest_in_a_process_with("2")
