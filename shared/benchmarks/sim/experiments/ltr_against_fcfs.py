"""Shortest predicted answer first against first come, first served: where it gains, and where it loses."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import (
    PREDICTION_S,
    SHAREGPT,
    faster,
    figures,
    kendall_tau,
    lengths_of,
    open_limits,
    same_makespan,
    starvation_checks,
    starvation_finding,
    with_predictions,
)
from benchmarks.sim.report import show
from weir.policy.registry import PolicySpec
from weir.sim.profile import load_profile
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.workload import Workload, burst, draw, poisson

_PROFILE = "h100-llama3-8b"
_ARENA = "vtc_arena_tenants_part_a.csv"
_SATURATION_A_S = 7.4
"""ShareGPT requests that the system ends a second while 2,000 wait, first come first served."""
_SPREADS = {SHAREGPT: 0.6, _ARENA: 0.9}
"""Of the noise around the oracle, such that Kendall's tau is about 0.6: what trained rankers reach."""
_LONG = "1.05x, 3,200 requests"
_LOADS = {"0.8x": 0.8, "1.05x": 1.05, "1.2x": 1.2, _LONG: 1.05}
_NUM_POISSON = {point: 3200 if point == _LONG else 800 for point in _LOADS}
_ARENA_BURST = "burst, arena"
_FCFS, _ORACLE, _NOISY, _FAIR = "fcfs", "ltr, oracle", "ltr, oracle + noise", "ltr, oracle + noise, starvation control"
_ARMS: Mapping[str, tuple[PolicySpec, bool]] = {
    _FCFS: (PolicySpec("fcfs"), False),
    _ORACLE: (PolicySpec("ltr", {"starvation": 0}), False),
    _NOISY: (PolicySpec("ltr", {"starvation": 0}), True),
    _FAIR: (PolicySpec("ltr"), True),
}
"""arm -> policy, whether its predictions are noisy."""


def _workload(point: str, num: int, seed: int) -> Workload:
    source = np.random.default_rng(seed)
    trace = _ARENA if point == _ARENA_BURST else SHAREGPT
    times = poisson(_LOADS[point] * _SATURATION_A_S, num, source) if point in _LOADS else burst(num)
    return draw(lengths_of(trace), times, source, name="r")


def _run(arm: str, point: str, num: int, seed: int) -> Mapping[str, float]:
    policy, is_noisy = _ARMS[arm]
    spread = _SPREADS[_ARENA if point == _ARENA_BURST else SHAREGPT] if is_noisy else 0.0
    workload = with_predictions(_workload(point, num, seed), spread, seed)
    spec = SystemSpec.colocated(1, load_profile(_PROFILE))
    result = simulate(spec, workload, limits=open_limits(), policy=policy)
    if arm == _FCFS:
        return figures(result) | {"tau": 0.0}
    return figures(result, prediction_s=PREDICTION_S) | {"tau": kendall_tau(workload)}


def _cases(size: Size) -> list[Case]:
    is_small = size is Size.SMALL
    bursts = {_ARENA_BURST: 400} if is_small else {_ARENA_BURST: 2000}
    points = bursts if is_small else bursts | _NUM_POISSON
    arms = (_FCFS, _NOISY) if is_small else tuple(_ARMS)
    return [
        Case(arm, partial(_run, arm, point, num), point, None if point == _LONG else _LOADS.get(point))
        for point, num in points.items()
        for arm in arms
    ]


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        gain = results.ratio("mean_normalized_ms", _FCFS, _NOISY, point)
        tail = results.ratio("p99_ttft_s", _NOISY, _FCFS, point)
        makespan = results.ratio("makespan_s", _NOISY, _FCFS, point)
        sentence = (
            f"{point}: at tau {show(results.estimate('tau', _NOISY, point))} mean latency per output token is "
            f"{show(gain)} times lower than first come, first served; p99 TTFT is {show(tail)} times as long, the "
            f"makespan {show(makespan)} times."
        )
        sentences.append(sentence + starvation_finding(results, _FAIR, _NOISY, point))
    return sentences


def _gain(claim: str, point: str, at_least: float, sizes: tuple[Size, ...]) -> Check:
    return faster(claim, _NOISY, _FCFS, point, at_least, sizes)


EXPERIMENT = Experiment(
    name="ltr-against-fcfs",
    title="Learning to rank against first come, first served",
    claim=(
        "Ordering by predicted length (Fu et al., arXiv 2408.15792) lowers mean latency per output token at and over "
        "saturation, not throughput; the tail pays for it."
    ),
    compared=(
        f"One colocated {_PROFILE}, steps of 2,048 tokens, 256 sequences. A burst of 2,000 (arena lengths), and 800 "
        f"Poisson arrivals (ShareGPT lengths) at multiples of {_SATURATION_A_S:g} requests/s, what it serves of a "
        "backlog of them. Slightly over saturation the queue, and with it the gain, grows with the run: 1.05x is shown "
        "with 3,200 arrivals as well. Predictions are the true lengths with log-normal noise, no trained predictor: "
        "`tau` is what they rank like. Each predicted request is charged 0.8 ms, each message to the scheduler 50 us. "
        "The longest wait is max(TTFT, worst gap)."
    ),
    cases=_cases,
    figures=(
        Figure("mean_normalized_ms", "latency/token, mean, ms", 1),
        Figure("p99_normalized_ms", "p99, ms", 0),
        Figure("mean_ttft_s", "TTFT mean, s", 2),
        Figure("p50_ttft_s", "p50, s", 2),
        Figure("p99_ttft_s", "p99, s", 2),
        Figure("max_wait_s", "longest wait, s", 1),
        Figure("makespan_s", "makespan, s", 1),
        Figure("tau", "tau", 2),
    ),
    checks=(
        _gain("burst (arena): >= 5x lower latency per token", _ARENA_BURST, 5.0, (Size.FULL,)),
        _gain("burst (arena), small: >= 1.5x lower", _ARENA_BURST, 1.5, (Size.SMALL,)),
        _gain("1.05x saturation: >= 1.8x lower latency per token", "1.05x", 1.8, (Size.FULL,)),
        _gain("1.05x, four times as long: >= 1.8x lower latency per token", _LONG, 1.8, (Size.FULL,)),
        _gain("1.2x saturation: >= 1.8x lower latency per token", "1.2x", 1.8, (Size.FULL,)),
        same_makespan("makespan of the burst within 5 %", _NOISY, _FCFS, _ARENA_BURST, tuple(Size)),
        *starvation_checks("", _FAIR, _NOISY, "1.2x"),
    ),
    findings=_findings,
    traces=(SHAREGPT, _ARENA),
)
