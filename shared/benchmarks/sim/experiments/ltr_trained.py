"""Shortest answer first by a trained predictor, on real prompts that it has not seen, against order of arrival."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.predictors.measure import ScoredLength
from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Size
from benchmarks.sim.experiments._scored_prompts import ALPACA, MADE_UP, prediction_s, scored
from benchmarks.sim.experiments._size_based import figures, open_limits
from benchmarks.sim.report import show
from benchmarks.sim.results import Results
from weir.policy.registry import PolicySpec
from weir.sim.profile import load_profile
from weir.sim.results.outcome import SimResult
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.arrivals import Times, burst, poisson
from weir.sim.workloads.workload import SimRequest, Workload
from weir.training.samples import tau

_PROFILE = "h100-llama3-8b"
_SETS = {
    "Llama-3-8B": f"{ALPACA}Meta-Llama-3-8B-Instruct",
    "Mistral-7B": f"{ALPACA}Mistral-7B-Instruct-v0.2",
    "Qwen1.5-7B": f"{ALPACA}Qwen1.5-7B-Chat",
}
_LOADS = {"0.8x": 0.8, "1.05x": 1.05, "1.2x": 1.2}
_BURST = "burst"
_NUM_REQUESTS = {Size.SMALL: 1200, Size.FULL: 2000}


@dataclass(frozen=True, slots=True)
class _Arm:
    """`score`: what a request is ordered by, None for its arrival."""

    score: str | None
    starvation: bool = False
    is_charged: bool = False


_FCFS, _TRAINED, _FAIR = "fcfs", "ltr, trained", "ltr, trained, starvation control"
_PROMPT, _ORACLE = "ltr, prompt length", "ltr, oracle"
_ARMS: Mapping[str, _Arm] = {
    _FCFS: _Arm(None),
    _PROMPT: _Arm("prompt"),
    _TRAINED: _Arm("trained", is_charged=True),
    _FAIR: _Arm("trained", starvation=True, is_charged=True),
    _ORACLE: _Arm("oracle"),
}


def _score(row: ScoredLength, kind: str) -> float:
    return {"trained": row.score, "prompt": -row.num_prompt_tokens, "oracle": -row.num_output_tokens}[kind]


def _workload(set_name: str, times: Times, source: np.random.Generator, arm: _Arm) -> Workload:
    """Drawn with repeats. Only `trained` tells the scheduler a number of tokens: the others only rank."""
    rows = scored(set_name)
    asked = max(row.num_output_tokens for row in rows)
    picks = source.choice(len(rows), len(times)).tolist()
    requests = [
        SimRequest(
            f"r-{number}",
            at_s,
            rows[pick].num_prompt_tokens,
            rows[pick].num_output_tokens,
            asked,
            predicted_output_tokens=rows[pick].predicted_output_tokens if arm.score == "trained" else 0.0,
            output_score=None if arm.score is None else _score(rows[pick], arm.score),
        )
        for number, (at_s, pick) in enumerate(zip(times.tolist(), picks, strict=True))
    ]
    return Workload(set_name, tuple(requests))


def _simulated(workload: Workload, arm: _Arm) -> SimResult:
    spec = SystemSpec.colocated(1, load_profile(_PROFILE))
    if arm.score is None:
        return simulate(spec, workload, limits=open_limits(), policy=PolicySpec("fcfs"))
    policy = PolicySpec("ltr", {"starvation": float(arm.starvation)})
    return simulate(spec, workload, limits=open_limits(), policy=policy)


@lru_cache(maxsize=8)
def _saturation_a_s(set_name: str) -> float:
    """Requests that end a second while others of 2,000 wait, first come first served."""
    source = np.random.default_rng(1234)
    result = _simulated(_workload(set_name, burst(2000), source, _ARMS[_FCFS]), _ARMS[_FCFS])
    last_grant_s = max(outcome.granted_s for outcome in result.outcomes if outcome.granted_s is not None)
    ends_s = [outcome.ended_s for outcome in result.outcomes if outcome.ended_s is not None]
    return sum(ended_s <= last_grant_s for ended_s in ends_s) / last_grant_s


def _run(arm_name: str, set_name: str, load: str, num: int, seed: int) -> Mapping[str, float]:
    arm = _ARMS[arm_name]
    source = np.random.default_rng(seed)
    rate_a_s = _saturation_a_s(set_name) * _LOADS.get(load, 1.0)
    times = burst(num) if load == _BURST else poisson(rate_a_s, num, source)
    workload = _workload(set_name, times, source, arm)
    result = _simulated(workload, arm)
    charged_s = prediction_s() if arm.is_charged else 0.0
    values = figures(result, prediction_s=charged_s, warmup=0.0 if load == _BURST else 0.1)
    return values | {"rate_a_s": 0.0 if load == _BURST else rate_a_s, "tau": _tau(set_name, arm)}


@lru_cache(maxsize=32)
def _tau(set_name: str, arm: _Arm) -> float:
    """Within the set, each prompt once; 0 for what does not rank."""
    rows = scored(set_name)
    if arm.score is None:
        return 0.0
    scores = np.array([_score(row, arm.score) for row in rows])
    return tau(-scores, np.array([row.num_output_tokens for row in rows]))


def _cases(size: Size) -> list[Case]:
    def case(arm: str, name: str, set_name: str, load: str) -> Case:
        num = _NUM_REQUESTS[size]
        return Case(arm, lambda seed: _run(arm, set_name, load, num, seed), f"{name}, {load}", _LOADS.get(load))

    if size is Size.SMALL:
        return [case(arm, MADE_UP, MADE_UP, _BURST) for arm in (_FCFS, _PROMPT, _TRAINED)]
    points = [(name, set_name, load) for name, set_name in _SETS.items() for load in (_BURST, *_LOADS)]
    return [case(arm, *point) for point in points for arm in _ARMS]


def _findings(results: Results) -> list[str]:
    return [_finding(results, point) for point in results.points()]


def _finding(results: Results, point: str) -> str:
    arms = results.arms()
    gains = {arm: results.ratio("mean_normalized_ms", _FCFS, arm, point) for arm in arms if arm != _FCFS}
    others = ", ".join(f"{show(gain)} ({arm})" for arm, gain in gains.items() if arm != _TRAINED)
    sentence = (
        f"{point}: mean latency per output token is {show(gains[_TRAINED])} times lower than first come, first served "
        f"with the trained predictor (tau {results.estimate('tau', _TRAINED, point).mean:.2f}); {others}. With it p99 "
        f"TTFT is {show(results.ratio('p99_ttft_s', _TRAINED, _FCFS, point))} times as long, the makespan "
        f"{show(results.ratio('makespan_s', _TRAINED, _FCFS, point))} times."
    )
    if _FAIR in arms:
        wait = results.ratio("max_wait_s", _FAIR, _TRAINED, point)
        mean = results.ratio("mean_normalized_ms", _FAIR, _TRAINED, point)
        sentence += f" Starvation control: longest wait x {show(wait)}, mean latency per token x {show(mean)}."
    return sentence


def _gain(claim: str, point: str, at_least: float, base: str = _FCFS, size: Size = Size.FULL) -> Check:
    return Check(
        claim,
        lambda results: results.ratio("mean_normalized_ms", base, _TRAINED, point),
        at_least=at_least,
        sizes=(size,),
    )


def _checks_of(name: str) -> list[Check]:
    """The bands that oracles with noise are asked to keep, for predictors that rank worse than they do."""
    at = {load: f"{name}, {load}" for load in (_BURST, *_LOADS)}
    return [
        _gain(f"{name}, burst: >= 5x lower latency per token", at[_BURST], 5.0),
        _gain(f"{name}, 1.05x saturation: >= 1.8x lower latency per token", at["1.05x"], 1.8),
        _gain(f"{name}, 1.2x saturation: >= 1.8x lower latency per token", at["1.2x"], 1.8),
        _gain(f"{name}, 1.2x: lower than by prompt length", at["1.2x"], 1.0, _PROMPT),
        Check(
            f"{name}: makespan of the burst within 5 %",
            lambda results: results.ratio("makespan_s", _TRAINED, _FCFS, at[_BURST]),
            at_least=0.95,
            at_most=1.05,
            sizes=(Size.FULL,),
        ),
        Check(
            f"{name}: starvation control halves the longest wait at 1.2x",
            lambda results: results.ratio("max_wait_s", _FAIR, _TRAINED, at["1.2x"]),
            at_most=0.5,
            sizes=(Size.FULL,),
        ),
        Check(
            f"{name}: starvation control costs < 15 % of mean latency per token at 1.2x",
            lambda results: results.ratio("mean_normalized_ms", _FAIR, _TRAINED, at["1.2x"]),
            at_most=1.15,
            sizes=(Size.FULL,),
        ),
    ]


EXPERIMENT = Experiment(
    name="ltr-trained",
    title="Learning to rank with the trained predictor, on real prompts",
    claim=(
        "Scores that a network gives to prompts it was not trained on are good enough to lower mean latency per output "
        "token (Fu et al., arXiv 2408.15792); the tail pays for it."
    ),
    compared=(
        f"One colocated {_PROFILE}, steps of 2,048 tokens, 256 sequences. 569 alpaca_eval prompts and three models' "
        "answers to them (the files alpaca_eval_dev_*), 2,000 requests drawn with repeats: at once, and Poisson at "
        "multiples of saturation (figures without the first tenth), what is served of a backlog of 2,000 first come, "
        "first served. Trained: five-fold, each prompt scored by a network that was trained on the other four fifths "
        "(one split for all seeds, so the intervals are of arrivals and draws alone). Tau is within the set, each "
        "prompt once. Each trained prediction is charged what `python -m benchmarks.predictors` measured "
        "(results/predictors.json; p99 of one prompt alone, "
        f"{1000 * prediction_s():.2f} ms), each message to the scheduler 50 us; the other arms nothing. "
        "The longest wait is max(TTFT, worst gap). The small size has made-up prompts."
    ),
    cases=_cases,
    figures=(
        Figure("rate_a_s", "requests/s", 1),
        Figure("tau", "tau", 2),
        Figure("mean_normalized_ms", "latency/token, mean, ms", 1),
        Figure("p99_normalized_ms", "p99, ms", 0),
        Figure("mean_ttft_s", "TTFT mean, s", 2),
        Figure("p50_ttft_s", "p50, s", 2),
        Figure("p99_ttft_s", "p99, s", 2),
        Figure("max_wait_s", "longest wait, s", 1),
        Figure("makespan_s", "makespan, s", 1),
    ),
    checks=(
        _gain("burst, made up, small: >= 1.3x lower", f"{MADE_UP}, {_BURST}", 1.3, size=Size.SMALL),
        _gain(
            "burst, made up, small: >= 1.2x lower than by prompt length",
            f"{MADE_UP}, {_BURST}",
            1.2,
            _PROMPT,
            Size.SMALL,
        ),
        *(check for name in _SETS for check in _checks_of(name)),
    ),
    findings=_findings,
)
