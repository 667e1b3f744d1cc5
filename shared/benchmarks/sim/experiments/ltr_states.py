"""Shortest answer first by a small model's hidden state, and what reading it costs, against what predictors see today.

Before the scheduler orders a request somebody has to have read its prompt. `free` is a reader that costs nothing beside
the server (an accelerator, for which 135 million parameters are a small share of the served model's); the others read
the prompts one by one on so many cores, in order of arrival, and each request waits for it.
"""

import dataclasses
import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from benchmarks.predictors.answers import Answer
from benchmarks.predictors.data import ALPACA_FILES, KEPT_PROBES, DataSet
from benchmarks.predictors.hidden_states import LAYERS, StateReader, read_states
from benchmarks.predictors.measure import ScoredLength
from benchmarks.predictors.probes import ProbeSettings, Views, ridge_held_out
from benchmarks.predictors.state_probes import views_of
from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import faster, figures
from benchmarks.sim.experiments.ltr_trained import (
    MADE_UP,
    SET_NAMES,
    LtrArm,
    alpaca_data,
    made_up_data,
    prediction_s,
    scored_rows,
    simulated,
    workload_from,
)
from benchmarks.sim.report import show
from weir.model.files.source import resolve_model
from weir.policy.predictors.features import PromptFeatures
from weir.sim.results.metrics import SimResult
from weir.sim.workloads.workload import Workload, burst
from weir.training.samples import tau

_MODEL = "smollm2-135m"
_MOST_TOKENS = 2048
_SETTINGS = ProbeSettings()
_NUM_REQUESTS = {Size.SMALL: 800, Size.FULL: 2000}


@dataclass(frozen=True, slots=True)
class _Arm:
    """`states`: scores of the hidden state, and not of today's features; `num_cores` that read it, None for free."""

    ltr: LtrArm
    states: bool = False
    num_cores: int | None = None


_FCFS, _TODAY, _FREE, _ORACLE = "fcfs", "ltr, trained", "ltr, state, free", "ltr, oracle"
_ARMS: Mapping[str, _Arm] = {
    _FCFS: _Arm(LtrArm(None)),
    _TODAY: _Arm(LtrArm("trained", is_charged=True)),
    _FREE: _Arm(LtrArm("trained"), states=True),
    "ltr, state, 1 core": _Arm(LtrArm("trained"), states=True, num_cores=1),
    **{f"ltr, state, {num} cores": _Arm(LtrArm("trained"), states=True, num_cores=num) for num in (4, 16)},
    _ORACLE: _Arm(LtrArm("oracle")),
}


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows in the order of the set's prompts, and how many tokens of each are read: not the template's beginning."""

    rows: Sequence[ScoredLength]
    num_tokens: Sequence[int]


@lru_cache(maxsize=8)
def _read(set_name: str) -> _Read:
    """Each prompt scored by a ridge regression that was trained on the other four fifths."""
    if set_name == MADE_UP:
        data, table = made_up_data()
        views: Views = {"vectors": (PromptFeatures(table).of(data.prompts)[:, -table.num_dims :],)}
        num_frame_tokens = 0
    else:
        data_sets, table = alpaca_data()
        data, views = data_sets[set_name], _alpaca_views()
        num_frame_tokens = len(table.frame.prefix)
    groups = np.arange(len(data.prompts), dtype=np.int64)
    scores = ridge_held_out(views, data.num_output_tokens, groups, 0, _SETTINGS).scores
    rows = [
        ScoredLength(len(prompt), int(length), float(-score), float(np.exp(score)))
        for prompt, length, score in zip(data.prompts, data.num_output_tokens, scores, strict=True)
    ]
    return _Read(rows, [max(1, len(prompt) - num_frame_tokens) for prompt in data.prompts])


@lru_cache(maxsize=1)
def _alpaca_views() -> Views:
    """The same prompts were asked of all three models. Half a minute."""
    data_sets, table = alpaca_data()
    data: DataSet = next(iter(data_sets.values()))
    reader = StateReader(resolve_model(_MODEL), LAYERS, _MOST_TOKENS)
    asked = [Answer(data.name, number, 0, len(prompt), 1, False) for number, prompt in enumerate(data.prompts)]
    states = read_states(reader, data.prompts, asked, len(table.frame.prefix))
    return views_of("last", states.last[:, 0])


@lru_cache(maxsize=1)
def _token_s() -> float:
    """What the state of one token took on one core, as `benchmarks.predictors.probe` measured it."""
    return float(json.loads(KEPT_PROBES.read_text())["state_ms_a_token"]) / 1e3


def _run(arm_name: str, set_name: str, num: int, seed: int) -> Mapping[str, float]:
    arm, source = _ARMS[arm_name], np.random.default_rng(seed)
    rows = _read(set_name).rows if arm.states else scored_rows(set_name)
    workload = workload_from(rows, set_name, burst(num), source, arm.ltr)
    waits_s = [0.0] * num if arm.num_cores is None else _waits_s(set_name, workload, seed, arm.num_cores)
    result = _waited(simulated(_delayed(workload, waits_s), arm.ltr), workload, waits_s)
    charged_s = prediction_s() if arm.ltr.is_charged else 0.0
    return figures(result, prediction_s=charged_s, warmup=0.0) | {"tau": _tau(set_name, arm_name)}


def _waits_s(set_name: str, workload: Workload, seed: int, num_cores: int) -> list[float]:
    """Until each request's prompt has been read: who is free takes the next."""
    num_tokens = _read(set_name).num_tokens
    picks = np.random.default_rng(seed).choice(len(num_tokens), len(workload.requests)).tolist()
    free_s = [0.0] * num_cores
    waits_s: list[float] = []
    for request, pick in zip(workload.requests, picks, strict=True):
        ready_s = max(heapq.heappop(free_s), request.arrival_s) + num_tokens[pick] * _token_s()
        heapq.heappush(free_s, ready_s)
        waits_s.append(ready_s - request.arrival_s)
    return waits_s


def _delayed(workload: Workload, waits_s: Sequence[float]) -> Workload:
    """As the scheduler sees it."""
    requests = [
        dataclasses.replace(request, arrival_s=request.arrival_s + wait_s)
        for request, wait_s in zip(workload.requests, waits_s, strict=True)
    ]
    return dataclasses.replace(workload, requests=tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _waited(result: SimResult, workload: Workload, waits_s: Sequence[float]) -> SimResult:
    """As the client sees it."""
    waited = {request.request_id: wait_s for request, wait_s in zip(workload.requests, waits_s, strict=True)}
    outcomes = [
        dataclasses.replace(outcome, arrival_s=outcome.arrival_s - waited[outcome.request_id])
        for outcome in result.outcomes
    ]
    return dataclasses.replace(result, outcomes=outcomes)


@lru_cache(maxsize=64)
def _tau(set_name: str, arm_name: str) -> float:
    arm = _ARMS[arm_name]
    if arm.ltr.score is None:
        return 0.0
    rows = _read(set_name).rows if arm.states else scored_rows(set_name)
    lengths = np.array([row.num_output_tokens for row in rows])
    return 1.0 if arm.ltr.score == "oracle" else tau(-np.array([row.score for row in rows]), lengths)


def _cases(size: Size) -> list[Case]:
    names = {MADE_UP: MADE_UP} if size is Size.SMALL else dict(SET_NAMES)
    arms = (_FCFS, _TODAY, _FREE) if size is Size.SMALL else tuple(_ARMS)
    return [
        Case(arm, partial(_run, arm, set_name, _NUM_REQUESTS[size]), name)
        for name, set_name in names.items()
        for arm in arms
    ]


def _findings(results: Results) -> list[str]:
    return [_finding(results, point) for point in results.points()]


def _finding(results: Results, point: str) -> str:
    arms = [arm for arm in results.arms() if arm != _FCFS]
    gains = ", ".join(
        f"{show(results.ratio('mean_normalized_ms', _FCFS, arm, point))} ({arm}, tau "
        f"{results.estimate('tau', arm, point).mean:.2f})"
        for arm in arms
    )
    beside = ", ".join(
        f"{show(results.ratio('mean_normalized_ms', _TODAY, arm, point))} ({arm})" for arm in arms if arm != _TODAY
    )
    return (
        f"{point}: mean latency per output token is lower than first come, first served by {gains}; than with the "
        f"trained predictor by {beside}."
    )


def _checks_of(name: str) -> list[Check]:
    return [
        faster(f"{name}: a free state lowers latency per token below today's", _FREE, _TODAY, name, 1.0, (Size.FULL,)),
        faster(f"{name}: and so do 16 cores", "ltr, state, 16 cores", _TODAY, name, 1.0, (Size.FULL,)),
        faster(f"{name}: and so do 4 cores", "ltr, state, 4 cores", _TODAY, name, 1.0, (Size.FULL,)),
        faster(f"{name}: and so does one core", "ltr, state, 1 core", _TODAY, name, 1.0, (Size.FULL,)),
    ]


EXPERIMENT = Experiment(
    name="ltr-states",
    title="Learning to rank with a small model's hidden state",
    claim=(
        "The state of a prompt's last token in a model of 135 M parameters ranks three larger models' answers well "
        "enough to lower latency per token in a burst below what pooled embeddings reach, as long as reading it does "
        "not hold up the queue."
    ),
    compared=(
        "System, prompts, draws and folds of `ltr-trained`, its burst alone: 2,000 requests at once. State: ridge "
        "regression on SmolLM2-135M's last-token state in int8, layer and penalty chosen within the training folds, "
        "each prompt scored by one that has not seen it. A core reads a token in `state_ms_a_token` of "
        "kept/probes.json of `benchmarks.predictors`, all tokens but the template's beginning. `ltr, trained` is "
        "charged as there. The small size has made-up prompts, and vectors for states."
    ),
    cases=_cases,
    figures=(
        Figure("tau", "tau", 2),
        Figure("mean_normalized_ms", "latency/token, mean, ms", 1),
        Figure("p99_normalized_ms", "p99, ms", 0),
        Figure("mean_ttft_s", "TTFT mean, s", 2),
        Figure("p99_ttft_s", "p99, s", 2),
        Figure("makespan_s", "makespan, s", 1),
    ),
    checks=(
        faster("made up, small: >= 1.3x lower", _FREE, _FCFS, MADE_UP, 1.3, (Size.SMALL,)),
        *(check for name in SET_NAMES for check in _checks_of(name)),
    ),
    findings=_findings,
    full_traces=ALPACA_FILES,
)
