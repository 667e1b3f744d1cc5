"""Deadlines under overload: the domino effect of earliest deadline first, and Niyama's cure."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size, SweepPlot
from benchmarks.sim.experiments._size_based import SHAREGPT, lengths_of, open_limits
from benchmarks.sim.report import show
from weir.policy.registry import PolicySpec
from weir.sim.profile import load_profile
from weir.sim.results.metrics import after_warmup, ttft_s
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.workload import Workload, draw, poisson, with_values

_PROFILE = "h100-llama3-8b"
_SATURATION_A_S = 7.4
_URGENT_SHARE, _URGENT_S, _PATIENT_S = 0.2, 0.5, 10.0
_LOADS = (0.8, 1.1, 1.3)
_ARMS: Mapping[str, PolicySpec] = {
    "fcfs": PolicySpec("fcfs"),
    "shortest-prompt": PolicySpec("shortest-prompt", {"starvation": 0}),
    "edf": PolicySpec("edf"),
    "hybrid": PolicySpec("hybrid", {"dynamic_chunk": 0, "starvation": 0}),
    "hybrid, all": PolicySpec("hybrid"),
}
_EDF, _HYBRID = "edf", "hybrid"


def _workload(rate_a_s: float, num: int, seed: int) -> Workload:
    source = np.random.default_rng(seed)
    workload = draw(lengths_of(SHAREGPT), poisson(rate_a_s, num, source), source, name="r")
    is_urgent = source.random(num) < _URGENT_SHARE
    return with_values(workload, ttft_target_s=np.where(is_urgent, _URGENT_S, _PATIENT_S).tolist())


def _run(arm: str, load: float, num: int, seed: int) -> Mapping[str, float]:
    workload = _workload(load * _SATURATION_A_S, num, seed)
    spec = SystemSpec.colocated(1, load_profile(_PROFILE))
    result = simulate(spec, workload, limits=open_limits(), policy=_ARMS[arm])
    targets = {request.request_id: request.ttft_target_s for request in workload.requests}
    counted = after_warmup(result.outcomes)
    times = [(ttft_s(outcome), targets[outcome.request_id]) for outcome in counted]
    urgent = [time_s <= target_s for time_s, target_s in times if target_s == _URGENT_S]
    return {
        "attainment": sum(time_s <= target_s for time_s, target_s in times) / len(times),
        "urgent_attainment": sum(urgent) / max(1, len(urgent)),
        "mean_ttft_s": sum(time_s for time_s, _ in times) / len(times),
        "max_ttft_s": max(time_s for time_s, _ in times),
    }


def _cases(size: Size) -> list[Case]:
    loads, num = ((4.0,), 250) if size is Size.SMALL else (_LOADS, 1000)
    arms = (_EDF, _HYBRID) if size is Size.SMALL else tuple(_ARMS)
    return [Case(arm, partial(_run, arm, load, num), f"{load:g}x", load) for load in loads for arm in arms]


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        shares = ", ".join(f"{arm} {show(results.estimate('attainment', arm, point))}" for arm in results.arms())
        slowest = results.ratio("max_ttft_s", _HYBRID, _EDF, point)
        sentences.append(f"{point}: attainment {shares}. The hybrid's longest TTFT is {show(slowest)} times edf's.")
    return sentences


EXPERIMENT = Experiment(
    name="edf-domino",
    title="Earliest deadline first under overload, and the hybrid",
    claim=(
        "Earliest deadline first is good while all deadlines can be met and collapses beyond; Niyama's hybrid with "
        "eager relegation (arXiv 2503.22562) goes on meeting most."
    ),
    compared=(
        f"One colocated {_PROFILE}, ShareGPT lengths, 1,000 Poisson arrivals at multiples of {_SATURATION_A_S:g} "
        f"requests/s. {_URGENT_SHARE:.0%} want their first token within {_URGENT_S:g} s, the others within "
        f"{_PATIENT_S:g} s; attainment is the share that gets it. `hybrid, all` adds dynamic chunks and starvation "
        "control."
    ),
    cases=_cases,
    figures=(
        Figure("attainment", "attainment", 3),
        Figure("urgent_attainment", "of the urgent", 3),
        Figure("mean_ttft_s", "TTFT mean, s", 2),
        Figure("max_ttft_s", "longest, s", 1),
    ),
    checks=(
        Check(
            "below saturation (0.8x) edf meets at least 0.95",
            lambda results: results.estimate("attainment", _EDF, "0.8x"),
            at_least=0.95,
            sizes=(Size.FULL,),
        ),
        Check(
            "at 1.3x edf meets less than half (the domino effect)",
            lambda results: results.estimate("attainment", _EDF, "1.3x"),
            at_most=0.5,
            sizes=(Size.FULL,),
        ),
        Check(
            "at 1.1x the hybrid meets at least 0.85",
            lambda results: results.estimate("attainment", _HYBRID, "1.1x"),
            at_least=0.85,
            sizes=(Size.FULL,),
        ),
        Check(
            "at 4x, for eight seconds, the hybrid meets more than edf",
            lambda results: results.difference("attainment", _HYBRID, _EDF, "4x"),
            at_least=0.05,
            sizes=(Size.SMALL,),
        ),
    ),
    findings=_findings,
    plots=(SweepPlot("attainment", "load"),),
    traces=(SHAREGPT,),
)
