"""WAIT and Nested WAIT: no evictions at the fluid's pace, and what they lose when arrivals come in bursts."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import figures, open_limits
from benchmarks.sim.report import show
from weir.policy.registry import PolicySpec
from weir.scheduling.limits import MemoryFitName
from weir.sim.profile import load_profile
from weir.sim.results.metrics import gap_percentile_s
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.workload import SimRequest, Workload, gamma, poisson

_PROFILE = "h100-llama3-8b"
_NUM_PAGES = 1000
_TYPES = ((50, 156, 167), (100, 171, 31))
"""(prompt, output, share): the two types of the authors' own simulation."""
_SATURATION_A_S = 80.0
_BURST_CV = 8.0
_LIGHT, _NEAR, _OVER, _BURSTS = "0.5x", "0.9x", "1.5x", "0.8x, bursts"
_LOADS = {_LIGHT: 0.5, _NEAR: 0.9, _OVER: 1.5, _BURSTS: 0.8}
_FCFS, _WAIT, _NESTED, _PAST_FUTURE = "fcfs", "wait", "nested-wait", "fcfs, past-future admission"
_STUBBORN = "wait, always waits"
_ARMS: Mapping[str, tuple[PolicySpec, MemoryFitName]] = {
    _FCFS: (PolicySpec("fcfs"), "aggressive"),
    _WAIT: (PolicySpec("wait"), "aggressive"),
    _STUBBORN: (PolicySpec("wait", {"max_variation": 1e9}), "aggressive"),
    _NESTED: (PolicySpec("nested-wait"), "aggressive"),
    _PAST_FUTURE: (PolicySpec("fcfs"), "past-future"),
}


def _workload(arm: str, point: str, num: int, seed: int) -> Workload:
    source = np.random.default_rng(seed)
    rate_a_s = _LOADS[point] * _SATURATION_A_S
    times = gamma(rate_a_s, _BURST_CV, num, source) if point == _BURSTS else poisson(rate_a_s, num, source)
    shares = np.array([share for _, _, share in _TYPES], np.float64)
    picks = source.choice(len(_TYPES), num, p=shares / shares.sum())
    requests = []
    for number, (at_s, pick) in enumerate(zip(times.tolist(), picks.tolist(), strict=True)):
        prompt, output, _ = _TYPES[pick]
        predicted = 0.0 if arm == _NESTED else float(output)
        requests.append(SimRequest(f"r{number}", at_s, prompt, output, 512, predicted_output_tokens=predicted))
    return Workload("two types", tuple(requests))


def _run(arm: str, point: str, num: int, seed: int) -> Mapping[str, float]:
    policy, memory_fit = _ARMS[arm]
    spec = SystemSpec.colocated(1, load_profile(_PROFILE), num_pages=_NUM_PAGES, max_num_seqs=256)
    limits = open_limits(memory_fit, max_prefill_tokens=8192)
    workload = _workload(arm, point, num, seed)
    result = simulate(spec, workload, limits=limits, policy=policy)
    values = figures(result)
    return values | {
        "preempted_pct": 100 * result.counters["preemptions"] / num,
        "stalled_pct": 100 * result.counters["stalls"] / result.counters["tokens_generated"],
        "requests_a_s": num / values["makespan_s"],
        "p99_gap_ms": 1000 * gap_percentile_s(result, 99),
        "defects": result.counters["policy_defects"],
    }


def _cases(size: Size) -> list[Case]:
    is_small = size is Size.SMALL
    num, points = (250, (_OVER,)) if is_small else (1500, tuple(_LOADS))
    arms = (_FCFS, _WAIT, _NESTED) if is_small else tuple(_ARMS)
    return [Case(arm, partial(_run, arm, point, num), point) for point in points for arm in arms]


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        for arm in results.arms():
            preempted = results.estimate("preempted_pct", arm, point)
            ttft = results.ratio("mean_ttft_s", arm, _FCFS, point)
            tail = results.ratio("p99_worst_gap_s", arm, _FCFS, point)
            sentences.append(
                f"{point}, {arm}: {show(preempted)} % preemptions a request; mean TTFT x {show(ttft)} and p99 of the "
                f"worst gap x {show(tail)} of fcfs."
            )
    return sentences


EXPERIMENT = Experiment(
    name="wait-gate",
    title="WAIT: evictions, and bursts",
    claim=(
        "A gate at the fluid's pace (Ao et al., arXiv 2504.11320) never lets in more than the pages hold to the end, "
        "where arrivals are steady; it knows rates of the past only, so bursts cost it."
    ),
    compared=(
        f"One colocated {_PROFILE} with {_NUM_PAGES} pages; prompts of 50 and 100 tokens with answers of 156 and 171, "
        f"167 to 31, at multiples of {_SATURATION_A_S:g} requests/s; bursts are Gamma arrivals with CV {_BURST_CV:g}. "
        "The scheduler admits as long as pages are free now (aggressive): the gate alone guards them. `wait` is "
        "given true lengths, `nested-wait` none; neither waits when arrivals vary too much, `always waits` does. "
        "Beside them the past-future admission that Weir has for this."
    ),
    cases=_cases,
    figures=(
        Figure("preempted_pct", "preemptions, %", 2),
        Figure("stalled_pct", "stalls a token, %", 2),
        Figure("mean_ttft_s", "TTFT mean, s", 2),
        Figure("p99_ttft_s", "p99, s", 2),
        Figure("p99_gap_ms", "gap p99, ms", 0),
        Figure("mean_normalized_ms", "latency/token, ms", 1),
        Figure("requests_a_s", "requests/s", 1),
    ),
    checks=(
        Check(
            "wait preempts nobody at 1.5x",
            lambda results: results.estimate("preempted_pct", _WAIT, _OVER),
            at_most=0.0,
        ),
        Check(
            "nested-wait, which is given no lengths, preempts nobody at 1.5x",
            lambda results: results.estimate("preempted_pct", _NESTED, _OVER),
            at_most=0.0,
        ),
        Check(
            "fcfs with the same admission preempts more than 1 % there",
            lambda results: results.estimate("preempted_pct", _FCFS, _OVER),
            at_least=1.0,
        ),
        Check(
            "no decision of a gate was refused by the engine",
            lambda results: results.estimate("defects", _WAIT, _OVER),
            at_most=0.0,
        ),
    ),
    findings=_findings,
)
