"""Shortest answer first by a trained predictor, on real prompts that it has not seen, against order of arrival.

alpaca_eval, three models   real answers (AlpacaEval, CC BY-NC 4.0, read from WEIR_TEST_DATA), token table of the
                            built-in model
made up                     lengths follow from the words of a prompt, with noise: for runs without data and model
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from benchmarks.predictors.data import ALPACA_FILES, KEPT_COSTS, DataSet, Prompter, alpaca_sets
from benchmarks.predictors.measure import ScoredLength, scored_lengths
from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import (
    faster,
    figures,
    open_limits,
    same_makespan,
    starvation_checks,
    starvation_finding,
)
from benchmarks.sim.report import show
from benchmarks.traces import TracesMissing, traces_folder
from weir.model.errors import ModelNotFound
from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.token_table import TokenTable, make_token_table
from weir.policy.registry import PolicySpec
from weir.sim.profile import load_profile
from weir.sim.results.metrics import SimResult
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.workload import SimRequest, Times, Workload, burst, poisson
from weir.training.ranking import RankingSettings
from weir.training.samples import tau

_PROFILE = "h100-llama3-8b"
_BUILT_IN_MODEL = "smollm2-135m"
_NUM_WORDS, _NUM_DIMS, _NUM_MADE_UP = 120, 16, 240
_QUICK = RankingSettings(num_members=2, least_steps=60, num_epochs=4)
_ALPACA = "alpaca_eval, "
MADE_UP = "made up"
SET_NAMES = {
    "Llama-3-8B": f"{_ALPACA}Meta-Llama-3-8B-Instruct",
    "Mistral-7B": f"{_ALPACA}Mistral-7B-Instruct-v0.2",
    "Qwen1.5-7B": f"{_ALPACA}Qwen1.5-7B-Chat",
}
_LOADS = {"0.8x": 0.8, "1.05x": 1.05, "1.2x": 1.2}
_BURST = "burst"
_NUM_REQUESTS = {Size.SMALL: 1200, Size.FULL: 2000}


@dataclass(frozen=True, slots=True)
class LtrArm:
    """`score`: what a request is ordered by, None for its arrival."""

    score: str | None
    starvation: bool = False
    is_charged: bool = False


FCFS, _TRAINED, _FAIR = "fcfs", "ltr, trained", "ltr, trained, starvation control"
_PROMPT, _ORACLE = "ltr, prompt length", "ltr, oracle"
_ARMS: Mapping[str, LtrArm] = {
    FCFS: LtrArm(None),
    _PROMPT: LtrArm("prompt"),
    _TRAINED: LtrArm("trained", is_charged=True),
    _FAIR: LtrArm("trained", starvation=True, is_charged=True),
    _ORACLE: LtrArm("oracle"),
}
BURST_FIGURES = (
    Figure("tau", "tau", 2),
    Figure("mean_normalized_ms", "latency/token, mean, ms", 1),
    Figure("p99_normalized_ms", "p99, ms", 0),
    Figure("mean_ttft_s", "TTFT mean, s", 2),
    Figure("p99_ttft_s", "p99, s", 2),
    Figure("makespan_s", "makespan, s", 1),
)
"""Of experiments whose requests all come at once."""


@lru_cache(maxsize=8)
def scored_rows(name: str) -> Sequence[ScoredLength]:
    """Of `made up`, or of the set that `alpaca_eval, MODEL` names; once a process, seconds. Raises TracesMissing if its
    file or the built-in model is not on this machine."""
    if name == MADE_UP:
        return scored_lengths(*made_up_data(), num_parts=2, settings=_QUICK)
    data_sets, table = alpaca_data()
    return scored_lengths(data_sets[name], table)


@lru_cache(maxsize=1)
def alpaca_data() -> tuple[dict[str, DataSet], TokenTable]:
    traces_folder()
    try:
        source = resolve_model(_BUILT_IN_MODEL)
        tokenizer, template = load_tokenizer(source), load_chat_template(source)
        data_sets = alpaca_sets(Prompter(tokenizer, template))
    except (ModelNotFound, FileNotFoundError) as error:
        raise TracesMissing(str(error)) from error
    return {data_set.name: data_set for data_set in data_sets}, load_token_table(source, tokenizer, template)


def made_up_data() -> tuple[DataSet, TokenTable]:
    """Answers are longer the further the mean vector of a prompt's words goes along one direction."""
    source = np.random.default_rng(5)
    vectors = source.normal(size=(_NUM_WORDS, _NUM_DIMS)).astype(np.float32)
    prompts = [tuple(source.integers(0, _NUM_WORDS, source.integers(8, 60)).tolist()) for _ in range(_NUM_MADE_UP)]
    along = np.array([vectors[list(prompt)].mean(axis=0)[0] for prompt in prompts])
    logs = 5 + 0.7 * along / along.std() + 0.6 * source.normal(size=len(prompts))
    lengths = np.maximum(1, np.exp(logs)).astype(np.int64)
    table = make_token_table(vectors, lambda token_id: f" w{token_id}".encode())
    return DataSet(MADE_UP, MADE_UP, prompts, lengths), table


@lru_cache(maxsize=1)
def prediction_s() -> float:
    """What a prediction of one short prompt alone took on one core, p99, as `benchmarks.predictors` measured it."""
    alone = [cost for cost in json.loads(KEPT_COSTS.read_text())["costs"] if cost["batch"] == 1]
    return float(min(alone, key=lambda cost: cost["prompt_tokens"])["p99_ms"]) / 1e3


def _score(row: ScoredLength, kind: str) -> float:
    return {"trained": row.score, "prompt": -row.num_prompt_tokens, "oracle": -row.num_output_tokens}[kind]


def workload_from(
    rows: Sequence[ScoredLength], name: str, times: Times, source: np.random.Generator, arm: LtrArm
) -> Workload:
    """Drawn with repeats. Only `trained` predicts a number of tokens for the scheduler: the others only rank."""
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
    return Workload(name, tuple(requests))


def simulated(workload: Workload, arm: LtrArm) -> SimResult:
    spec = SystemSpec.colocated(1, load_profile(_PROFILE))
    if arm.score is None:
        return simulate(spec, workload, limits=open_limits(), policy=PolicySpec("fcfs"))
    policy = PolicySpec("ltr", {"starvation": float(arm.starvation)})
    return simulate(spec, workload, limits=open_limits(), policy=policy)


@lru_cache(maxsize=8)
def _saturation_a_s(set_name: str) -> float:
    """Requests that end a second while others of 2,000 wait, first come first served."""
    source = np.random.default_rng(1234)
    workload = workload_from(scored_rows(set_name), set_name, burst(2000), source, _ARMS[FCFS])
    result = simulated(workload, _ARMS[FCFS])
    last_grant_s = max(outcome.granted_s for outcome in result.outcomes if outcome.granted_s is not None)
    ends_s = [outcome.ended_s for outcome in result.outcomes if outcome.ended_s is not None]
    return sum(ended_s <= last_grant_s for ended_s in ends_s) / last_grant_s


def _run(arm_name: str, set_name: str, load: str, num: int, seed: int) -> Mapping[str, float]:
    arm = _ARMS[arm_name]
    source = np.random.default_rng(seed)
    rate_a_s = _saturation_a_s(set_name) * _LOADS.get(load, 1.0)
    times = burst(num) if load == _BURST else poisson(rate_a_s, num, source)
    rows = scored_rows(set_name)
    result = simulated(workload_from(rows, set_name, times, source, arm), arm)
    charged_s = prediction_s() if arm.is_charged else 0.0
    values = figures(result, prediction_s=charged_s, warmup=0.0 if load == _BURST else 0.1)
    return values | {"rate_a_s": 0.0 if load == _BURST else rate_a_s, "tau": tau_of(rows, arm)}


def tau_of(rows: Sequence[ScoredLength], arm: LtrArm) -> float:
    """Of what the arm orders by with the answers' lengths, each row once; 0 for what does not rank."""
    if arm.score is None:
        return 0.0
    scores = np.array([_score(row, arm.score) for row in rows])
    return tau(-scores, np.array([row.num_output_tokens for row in rows]))


def _cases(size: Size) -> list[Case]:
    arms: Sequence[str] = tuple(_ARMS)
    points = [(name, set_name, load) for name, set_name in SET_NAMES.items() for load in (_BURST, *_LOADS)]
    if size is Size.SMALL:
        arms, points = (FCFS, _PROMPT, _TRAINED), [(MADE_UP, MADE_UP, _BURST)]
    return [
        Case(arm, partial(_run, arm, set_name, load, _NUM_REQUESTS[size]), f"{name}, {load}", _LOADS.get(load))
        for name, set_name, load in points
        for arm in arms
    ]


def gains(results: Results, point: str) -> str:
    """By what times mean latency per output token is lower than first come, first served, in each of the other arms."""
    return ", ".join(
        f"{show(results.ratio('mean_normalized_ms', FCFS, arm, point))} ({arm}, tau "
        f"{results.estimate('tau', arm, point).mean:.2f})"
        for arm in results.arms()
        if arm != FCFS
    )


def _findings(results: Results) -> list[str]:
    return [_finding(results, point) for point in results.points()]


def _finding(results: Results, point: str) -> str:
    arms = results.arms()
    ratios = {arm: results.ratio("mean_normalized_ms", FCFS, arm, point) for arm in arms if arm != FCFS}
    others = ", ".join(f"{show(ratio)} ({arm})" for arm, ratio in ratios.items() if arm != _TRAINED)
    sentence = (
        f"{point}: mean latency per output token is {show(ratios[_TRAINED])} times lower than first come, first served "
        f"with the trained predictor (tau {results.estimate('tau', _TRAINED, point).mean:.2f}); {others}. With it p99 "
        f"TTFT is {show(results.ratio('p99_ttft_s', _TRAINED, FCFS, point))} times as long, the makespan "
        f"{show(results.ratio('makespan_s', _TRAINED, FCFS, point))} times."
    )
    return sentence + starvation_finding(results, _FAIR, _TRAINED, point)


def _gain(claim: str, point: str, at_least: float, base: str = FCFS, size: Size = Size.FULL) -> Check:
    return faster(claim, _TRAINED, base, point, at_least, (size,))


def _checks_of(name: str) -> list[Check]:
    """The bands that oracles with noise are asked to keep, for predictors that rank worse than they do."""
    at = {load: f"{name}, {load}" for load in (_BURST, *_LOADS)}
    return [
        _gain(f"{name}, burst: >= 5x lower latency per token", at[_BURST], 5.0),
        _gain(f"{name}, 1.05x saturation: >= 1.8x lower latency per token", at["1.05x"], 1.8),
        _gain(f"{name}, 1.2x saturation: >= 1.8x lower latency per token", at["1.2x"], 1.8),
        _gain(f"{name}, 1.2x: lower than by prompt length", at["1.2x"], 1.0, _PROMPT),
        same_makespan(f"{name}: makespan of the burst within 5 %", _TRAINED, FCFS, at[_BURST], (Size.FULL,)),
        *starvation_checks(f"{name}: ", _FAIR, _TRAINED, at["1.2x"]),
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
        "(kept/predictors.json; p99 of one prompt alone, "
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
        *(check for name in SET_NAMES for check in _checks_of(name)),
    ),
    findings=_findings,
    full_traces=ALPACA_FILES,
)
