"""Admission by memory: the worst case, what fits now, and what the past tells of the future."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import SHAREGPT, lengths_of, open_limits
from benchmarks.sim.report import show
from weir.scheduling.limits import MemoryFitName, PlacingLimits
from weir.sim.profile import load_profile
from weir.sim.results.metrics import Slo, Slos, summarize
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.workload import Lengths, Workload, draw, poisson, with_values

_PROFILE = "h100-llama3-8b"
_KV_TOKENS = 60_000
_RATES_A_S = (3.0, 4.0, 5.0)
_SLOS = Slos(Slo(ttft_s=10.0, worst_gap_s=1.5))
_ARMS: Mapping[str, MemoryFitName] = {
    "conservative": "conservative",
    "aggressive": "aggressive",
    "past-future": "past-future",
    "oracle": "predicted",
}
_CONSERVATIVE, _AGGRESSIVE, _PAST_FUTURE, _ORACLE = _ARMS
_SHAREGPT, _GENEROUS, _LONG = "ShareGPT", "ShareGPT, 4096 allowed", "long outputs"
_MAX_TOKENS = {_SHAREGPT: 1024, _GENEROUS: 4096, _LONG: 8192}
_GENEROUS_RATE_A_S, _LONG_RATE_A_S = 4.0, 0.5


def _long_outputs(num: int, source: np.random.Generator) -> list[Lengths]:
    """As reasoning models write: log-normal outputs around 2,700 tokens, prompts around 200."""
    outputs = np.clip(source.lognormal(7.9, 0.45, num), 200, 8192).astype(int)
    prompts = np.clip(source.lognormal(5.2, 0.6, num), 20, 2000).astype(int)
    return [Lengths(prompt, output) for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)]


def _workload(kind: str, rate_a_s: float, num: int, seed: int, *, knows_lengths: bool) -> Workload:
    source = np.random.default_rng(seed)
    lengths = _long_outputs(num, source) if kind == _LONG else lengths_of(SHAREGPT)
    workload = draw(lengths, poisson(rate_a_s, num, source), source, name="r", max_tokens=_MAX_TOKENS[kind])
    if not knows_lengths:
        return workload
    true_lengths = [float(request.num_output_tokens) for request in workload.requests]
    return with_values(workload, predicted_output_tokens=true_lengths)


def _run(arm: str, kind: str, rate_a_s: float, num: int, seed: int) -> Mapping[str, float]:
    workload = _workload(kind, rate_a_s, num, seed, knows_lengths=arm == _ORACLE)
    limits = dataclasses.replace(open_limits(), placing=PlacingLimits(memory_fit=_ARMS[arm], seed=seed))
    spec = SystemSpec.colocated(1, load_profile(_PROFILE), num_pages=_KV_TOKENS // 16)
    result = simulate(spec, workload, limits=limits)
    summary = summarize(result, _SLOS)
    return {
        "goodput_a_s": summary.goodput_a_s,
        "attainment": summary.attainment,
        "evictions_a_request": result.counters.get("preemptions", 0.0) / num,
        "p99_ttft_s": summary.p99_ttft_s,
        "p99_gap_s": summary.p99_worst_gap_s,
    }


def _cases(size: Size) -> list[Case]:
    def case(arm: str, kind: str, rate_a_s: float, num: int) -> Case:
        return Case(arm, partial(_run, arm, kind, rate_a_s, num), _point(kind, rate_a_s), rate_a_s)

    if size is Size.SMALL:
        return [case(arm, _GENEROUS, _GENEROUS_RATE_A_S, 250) for arm in (_CONSERVATIVE, _PAST_FUTURE)]
    points = [*((_SHAREGPT, rate_a_s) for rate_a_s in _RATES_A_S), (_GENEROUS, _GENEROUS_RATE_A_S)]
    return [case(arm, kind, rate_a_s, 600) for kind, rate_a_s in points for arm in _ARMS] + [
        case(arm, _LONG, _LONG_RATE_A_S, 300) for arm in _ARMS
    ]


def _point(kind: str, rate_a_s: float) -> str:
    return f"{kind}, {rate_a_s:g}/s"


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        over_worst = results.difference("attainment", _PAST_FUTURE, _CONSERVATIVE, point)
        evictions = ", ".join(
            f"{arm} {show(results.estimate('evictions_a_request', arm, point))}" for arm in results.arms()
        )
        sentences.append(
            f"{point}: past-future meets the SLO for {show(over_worst)} more of the requests than conservative; "
            f"evictions a request: {evictions}."
        )
    return sentences


_HARD = _point(_GENEROUS, _GENEROUS_RATE_A_S)
_FULL_ONLY = (Size.FULL,)

EXPERIMENT = Experiment(
    name="past-future",
    title="Admission by memory: conservative, aggressive, past-future, oracle",
    claim=(
        "Drawing the ends of running requests from the lengths of the last outputs admits as many as knowing them, "
        "without the evictions of admitting whatever fits now (Past-Future Scheduler, ASPLOS 2025, arXiv 2507.10150)."
    ),
    compared=(
        f"One colocated {_PROFILE} with {_KV_TOKENS:,} tokens of KV cache, fcfs, Poisson arrivals. ShareGPT lengths "
        "with max_tokens 1024 (their longest output) and 4096 (what clients leave open), 600 requests; outputs as "
        "reasoning models write (log-normal, around 2,700 tokens, 8192 allowed), 300 requests. SLO: first token within "
        "10 s, no gap over 1.5 s. The oracle knows every output's length. The history starts with 100 outputs of the "
        "longest kind, as the paper's does."
    ),
    cases=_cases,
    figures=(
        Figure("goodput_a_s", "goodput, requests/s", 2),
        Figure("attainment", "attainment", 3),
        Figure("evictions_a_request", "evictions a request", 4),
        Figure("p99_ttft_s", "TTFT p99, s", 1),
        Figure("p99_gap_s", "worst gap p99, s", 3),
    ),
    checks=(
        Check(
            f"past-future evicts less than 1 % of requests ({_HARD})",
            lambda results: results.estimate("evictions_a_request", _PAST_FUTURE, _HARD),
            at_most=0.01,
        ),
        Check(
            f"goodput of past-future over conservative is at least 1.5 ({_HARD})",
            lambda results: results.ratio("goodput_a_s", _PAST_FUTURE, _CONSERVATIVE, _HARD),
            at_least=1.5,
            sizes=_FULL_ONLY,
        ),
        Check(
            f"past-future meets the SLO more often than conservative ({_HARD})",
            lambda results: results.difference("attainment", _PAST_FUTURE, _CONSERVATIVE, _HARD),
            at_least=0.02,
        ),
        Check(
            "goodput of past-future over that of the oracle is at least 0.95 (ShareGPT, 4/s)",
            lambda results: results.ratio("goodput_a_s", _PAST_FUTURE, _ORACLE, _point(_SHAREGPT, 4.0)),
            at_least=0.95,
            sizes=_FULL_ONLY,
        ),
    ),
    findings=_findings,
    traces=(SHAREGPT,),
)
