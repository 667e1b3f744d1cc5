"""SLAI against Sarathi-Serve's steps with two orders: what the order gains, and what deferred decodes do."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size, SweepPlot
from benchmarks.sim.experiments._size_based import SHAREGPT, figures, lengths_of, open_limits
from benchmarks.sim.report import show
from weir.policy.registry import PolicySpec
from weir.sim.profile import load_profile
from weir.sim.results.metrics import gap_percentile_s
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.workload import Workload, draw, poisson, with_values

_H100, _A100 = "h100-llama3-8b", "a100-llama3-8b"
_BUDGET, _NUM_SEQS = 512, 128
_SATURATION_A_S = {_H100: 6.4, _A100: 2.9}
"""What each serves a second of a backlog with this budget."""
_STRICT_SHARE, _STRICT_ITL_S, _RELAXED_ITL_S = 0.05, 0.1, 0.5
_LOADS = {_H100: (0.7, 0.9, 1.0, 1.1), _A100: (0.9, 1.1)}
_FCFS, _SPF, _SLAI = "sarathi-fcfs", "sarathi-shortest-prompt", "slai"
_ARMS: Mapping[str, PolicySpec] = {
    _FCFS: PolicySpec("fcfs"),
    _SPF: PolicySpec("shortest-prompt", {"starvation": 0}),
    _SLAI: PolicySpec("slai", {"starvation": 0}),
}


def _point(profile: str, load: float) -> str:
    return f"{profile.partition('-')[0]} {load:g}x"


def _workload(rate_a_s: float, num: int, seed: int) -> Workload:
    source = np.random.default_rng(seed)
    workload = draw(lengths_of(SHAREGPT), poisson(rate_a_s, num, source), source, name="r")
    is_strict = source.random(num) < _STRICT_SHARE
    return with_values(workload, itl_target_s=np.where(is_strict, _STRICT_ITL_S, _RELAXED_ITL_S).tolist())


def _run(arm: str, profile: str, load: float, num: int, seed: int) -> Mapping[str, float]:
    workload = _workload(load * _SATURATION_A_S[profile], num, seed)
    sizes = {"max_num_seqs": _NUM_SEQS, "max_num_batched_tokens": _BUDGET, "chunk_tokens": _BUDGET}
    spec = SystemSpec.colocated(1, load_profile(profile), **sizes)
    result = simulate(spec, workload, limits=open_limits(), policy=_ARMS[arm])
    targets = {request.request_id: request.itl_target_s for request in workload.requests}
    num_met = sum(outcome.worst_gap_s <= targets[outcome.request_id] for outcome in result.outcomes)
    values = figures(result)
    return values | {
        "p50_ttft_ms": 1000 * values["p50_ttft_s"],
        "p99_gap_ms": 1000 * gap_percentile_s(result, 99),
        "gaps_met": num_met / len(result.outcomes),
    }


def _cases(size: Size) -> list[Case]:
    is_small = size is Size.SMALL
    num = 200 if is_small else 800
    loads = {_H100: (1.0,)} if is_small else _LOADS
    return [
        Case(arm, partial(_run, arm, profile, load, num), _point(profile, load), load if profile == _H100 else None)
        for profile in loads
        for load in loads[profile]
        for arm in _ARMS
    ]


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        order = results.ratio("p50_ttft_ms", _SPF, _FCFS, point)
        both = results.ratio("p50_ttft_ms", _SLAI, _FCFS, point)
        gap = results.ratio("p99_gap_ms", _SLAI, _FCFS, point)
        tail = results.ratio("p99_ttft_s", _SLAI, _FCFS, point)
        sentences.append(
            f"{point}: median TTFT is x {show(order)} by the order alone and x {show(both)} with deferred decodes; p99 "
            f"of all gaps x {show(gap)}, p99 TTFT x {show(tail)}."
        )
    return sentences


EXPERIMENT = Experiment(
    name="slai-against-sarathi",
    title="SLAI against Sarathi-Serve",
    claim=(
        "Shortest prompt first with decodes held to their last schedulable time (Bari et al., arXiv 2508.01002) "
        "about halves the median TTFT near capacity; gaps grow towards their target, not over it."
    ),
    compared=(
        f"One colocated worker, budget {_BUDGET} tokens, {_NUM_SEQS} sequences, ShareGPT lengths, Poisson at multiples "
        f"of {', '.join(f'{rate:g} requests/s ({name})' for name, rate in _SATURATION_A_S.items())}. "
        f"{_STRICT_SHARE:.0%} of requests ask for gaps of at most {_STRICT_ITL_S:g} s, others {_RELAXED_ITL_S:g} s. "
        "No starvation control in any arm, as published. `gaps_met`: requests whose every gap met its target."
    ),
    cases=_cases,
    figures=(
        Figure("p50_ttft_ms", "TTFT p50, ms", 0),
        Figure("mean_ttft_s", "mean, s", 2),
        Figure("p99_ttft_s", "p99, s", 2),
        Figure("p99_gap_ms", "gap p99, ms", 0),
        Figure("gaps_met", "gaps met", 3),
        Figure("mean_normalized_ms", "latency/token, ms", 1),
    ),
    checks=(
        Check(
            "median TTFT at 1x at most 0.6 of Sarathi-FCFS",
            lambda results: results.ratio("p50_ttft_ms", _SLAI, _FCFS, "h100 1x"),
            at_most=0.6,
            sizes=(Size.FULL,),
        ),
        Check(
            "median TTFT at 1x at most 0.9 of Sarathi-FCFS, small",
            lambda results: results.ratio("p50_ttft_ms", _SLAI, _FCFS, "h100 1x"),
            at_most=0.9,
            sizes=(Size.SMALL,),
        ),
        Check(
            "every gap within its target for 99 % of requests at 1x",
            lambda results: results.estimate("gaps_met", _SLAI, "h100 1x"),
            at_least=0.99,
        ),
    ),
    findings=_findings,
    plots=(SweepPlot("p50_ttft_ms", "load", is_log=True),),
    traces=(SHAREGPT,),
)
