"""Fairness between tenants on a real trace: virtual token counters against one queue for all."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size, SweepPlot
from benchmarks.traces import traces_folder
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits
from weir.sim.profile import load_profile
from weir.sim.results.fairness import delivered_service, widest_gap
from weir.sim.results.metrics import summarize
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.traces import read_trace
from weir.sim.workloads.workload import Workload, at_rate, first, with_values

_TRACE = "vtc_arena_tenants_part_a.csv"
_MAX_NUM_SEQS = 8
"""Little, as the paper's GPU had: then the tenants of this trace overload it."""
_OUTPUT_PRICE = 2.0
_NUM_HEAVY = 2
_ARMS = ("fcfs", "vtc")
_OVERLOADED = "8 requests/s"


def _workload(rate_a_s: float, num_requests: int, seed: int) -> Workload:
    """Seed 0 is the trace; others draw each request's lengths anew from those of its own tenant."""
    workload = first(read_trace(traces_folder() / _TRACE), num_requests or 10**6)
    source = np.random.default_rng(seed)
    if seed:
        of_tenant: dict[str, list[tuple[int, int]]] = {}
        for request in workload.requests:
            of_tenant.setdefault(request.tenant, []).append((request.num_prompt_tokens, request.num_output_tokens))
        lengths = [of_tenant[request.tenant] for request in workload.requests]
        sampled = [some[int(source.integers(len(some)))] for some in lengths]
        prompts, outputs = zip(*sampled, strict=True)
        workload = with_values(workload, num_prompt_tokens=prompts, num_output_tokens=outputs)
    return at_rate(workload, rate_a_s)


def _limits(arm: str, tenants: Sequence[str]) -> CoreLimits:
    """Nobody is refused or given up, so that both arms serve the same requests."""
    return CoreLimits(
        lanes=(LaneLimits("standard", max_queued=50_000, max_wait_s=86_400.0),),
        tenants=tuple(TenantLimits(tenant) for tenant in tenants),
        tenant_order="fair" if arm == "vtc" else "arrival",
    )


def _run(arm: str, rate_a_s: float, num_requests: int, seed: int) -> Mapping[str, float]:
    workload = _workload(rate_a_s, num_requests, seed)
    counts = Counter(request.tenant for request in workload.requests)
    heavy = {tenant for tenant, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_NUM_HEAVY]}
    spec = SystemSpec.colocated(1, load_profile("h100-llama3-8b"), max_num_seqs=_MAX_NUM_SEQS)
    result = simulate(spec, workload, limits=_limits(arm, sorted(counts)))
    result = dataclasses.replace(result, tenant_service=delivered_service(result.outcomes, sample_s=0.25))
    light = summarize(result, wanted=lambda outcome: outcome.tenant not in heavy)
    heaviest = summarize(result, wanted=lambda outcome: outcome.tenant in heavy)
    # 2 max(w_p L, w_q M): M, all tokens of a full batch, is more than any prompt.
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in workload.requests)
    bound = 2 * _OUTPUT_PRICE * _MAX_NUM_SEQS * longest
    gap = widest_gap(result).service
    return {
        "light_ttft_s": light.mean_ttft_s,
        "light_p99_ttft_s": light.p99_ttft_s,
        "heavy_ttft_s": heaviest.mean_ttft_s,
        "gap": gap,
        "gap_of_bound": gap / bound,
        "output_tokens_a_s": summarize(result).output_tokens_a_s,
    }


def _cases(size: Size) -> list[Case]:
    rates, num_requests = ((8.0,), 250) if size is Size.SMALL else ((3.0, 4.0, 5.0, 6.0, 7.0, 8.0), 0)
    return [
        Case(arm, partial(_run, arm, rate_a_s, num_requests), f"{rate_a_s:g} requests/s", rate_a_s)
        for rate_a_s in rates
        for arm in _ARMS
    ]


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        light = results.ratio("light_ttft_s", "fcfs", "vtc", point)
        heavy = results.ratio("heavy_ttft_s", "vtc", "fcfs", point)
        tail = results.ratio("light_p99_ttft_s", "vtc", "fcfs", point)
        sentences.append(
            f"{point}: light tenants wait {light.mean:.1f} times shorter for their first token under VTC on the mean, "
            f"their p99 is {tail.mean:.2f} times FCFS's; the {_NUM_HEAVY} heaviest wait {heavy.mean:.2f} times as long."
        )
    return sentences


EXPERIMENT = Experiment(
    name="vtc-arena",
    title="Tenants of the chatbot arena under overload: VTC against FCFS",
    claim=(
        "Virtual token counters (arXiv 2401.00588) keep light tenants' waits short when heavy ones overload the "
        "system, at the same throughput, and hold the difference in service between tenants that wait under "
        "2 max(w_p L, w_q M)."
    ),
    compared=(
        f"Arms: one queue by arrival, and a counter a tenant, the same policy and weights. {_TRACE} (22 tenants) at "
        f"higher rates; one colocated worker, h100-llama3-8b, {_MAX_NUM_SEQS} sequences. Seed 0 is the trace itself, "
        f"other seeds draw each request's lengths from its own tenant's. Light: all but the {_NUM_HEAVY} tenants with "
        "most requests. Service is that delivered, not what the scheduler counted: prompt at grant, 2 an output token."
    ),
    cases=_cases,
    figures=(
        Figure("light_ttft_s", "light: mean TTFT s"),
        Figure("light_p99_ttft_s", "light: p99 TTFT s"),
        Figure("heavy_ttft_s", "heavy: mean TTFT s"),
        Figure("gap", "widest gap"),
        Figure("gap_of_bound", "gap / bound"),
        Figure("output_tokens_a_s", "output tokens/s", 4),
    ),
    checks=(
        Check(
            f"light tenants' mean TTFT at {_OVERLOADED}, FCFS over VTC",
            lambda results: results.ratio("light_ttft_s", "fcfs", "vtc", _OVERLOADED),
            at_least=3.0,
        ),
        Check(
            f"VTC's widest gap at {_OVERLOADED}, of its bound",
            lambda results: results.estimate("gap_of_bound", "vtc", _OVERLOADED),
            at_most=1.0,
        ),
        Check(
            f"widest gap at {_OVERLOADED}, FCFS over VTC",
            lambda results: results.ratio("gap", "fcfs", "vtc", _OVERLOADED),
            at_least=2.0,
        ),
        Check(
            f"output tokens/s at {_OVERLOADED}, VTC over FCFS",
            lambda results: results.ratio("output_tokens_a_s", "vtc", "fcfs", _OVERLOADED),
            at_least=0.97,
        ),
    ),
    findings=_findings,
    plots=(SweepPlot("light_ttft_s", "requests/s", is_log=True), SweepPlot("heavy_ttft_s", "requests/s", is_log=True)),
    traces=(_TRACE,),
)
