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
from benchmarks.sim.experiment import Case, Check, Experiment, Results, Size
from benchmarks.sim.experiments._size_based import faster, figures
from benchmarks.sim.experiments.ltr_trained import (
    BURST_FIGURES,
    FCFS,
    MADE_UP,
    SET_NAMES,
    LtrArm,
    alpaca_data,
    gains,
    made_up_data,
    prediction_s,
    scored_rows,
    simulated,
    tau_of,
    workload_from,
)
from benchmarks.sim.report import show
from weir.model.files.source import resolve_model
from weir.policy.predictors.features import PromptFeatures
from weir.sim.results.metrics import SimResult
from weir.sim.workloads.workload import Workload, burst

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


_TODAY, _FREE, _ONE_CORE, _ORACLE = "ltr, trained", "ltr, state, free", "ltr, state, 1 core", "ltr, oracle"
_ARMS: Mapping[str, _Arm] = {
    FCFS: _Arm(LtrArm(None)),
    _TODAY: _Arm(LtrArm("trained", is_charged=True)),
    _FREE: _Arm(LtrArm("trained"), states=True),
    _ONE_CORE: _Arm(LtrArm("trained"), states=True, num_cores=1),
    **{f"ltr, state, {num} cores": _Arm(LtrArm("trained"), states=True, num_cores=num) for num in (4, 16)},
    _ORACLE: _Arm(LtrArm("oracle")),
}


@lru_cache(maxsize=8)
def _state_rows(set_name: str) -> Sequence[ScoredLength]:
    """Each prompt scored by a ridge regression that was trained on the other four fifths."""
    if set_name == MADE_UP:
        data, table = made_up_data()
        views: Views = {"vectors": (PromptFeatures(table).of(data.prompts)[:, -table.num_dims :],)}
    else:
        data_sets, _ = alpaca_data()
        data, views = data_sets[set_name], _alpaca_views()
    groups = np.arange(len(data.prompts), dtype=np.int64)
    scores = ridge_held_out(views, data.num_output_tokens, groups, 0, _SETTINGS).scores
    return [
        ScoredLength(len(prompt), int(length), float(-score), float(np.exp(score)))
        for prompt, length, score in zip(data.prompts, data.num_output_tokens, scores, strict=True)
    ]


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
    rows = _state_rows(set_name) if arm.states else scored_rows(set_name)
    workload = workload_from(rows, set_name, burst(num), source, arm.ltr)
    waits_s = [0.0] * num
    if arm.num_cores is not None:
        waits_s = reading_waits_s(workload, arm.num_cores, _num_frame_tokens(set_name), _token_s())
    result = simulated_behind_readers(workload, waits_s, arm.ltr)
    charged_s = prediction_s() if arm.ltr.is_charged else 0.0
    return figures(result, prediction_s=charged_s, warmup=0.0) | {"tau": tau_of(rows, arm.ltr)}


def _num_frame_tokens(set_name: str) -> int:
    """Of the template's beginning, which is the same in every prompt and need not be read."""
    return 0 if set_name == MADE_UP else len(alpaca_data()[1].frame.prefix)


def reading_waits_s(workload: Workload, num_cores: int, num_frame_tokens: int, token_s: float) -> list[float]:
    """Until each request's prompt has been read but for `num_frame_tokens`, at `token_s` each: the core that is free
    first takes the next."""
    free_s = [0.0] * num_cores
    waits_s: list[float] = []
    for request in workload.requests:
        num_tokens = max(1, request.num_prompt_tokens - num_frame_tokens)
        ready_s = max(heapq.heappop(free_s), request.arrival_s) + num_tokens * token_s
        heapq.heappush(free_s, ready_s)
        waits_s.append(ready_s - request.arrival_s)
    return waits_s


def simulated_behind_readers(workload: Workload, waits_s: Sequence[float], arm: LtrArm) -> SimResult:
    """Of requests that the scheduler sees `waits_s` after they were sent, with the times at which they were sent."""
    return _seen_by_client(simulated(_seen_by_scheduler(workload, waits_s), arm), workload, waits_s)


def _seen_by_scheduler(workload: Workload, waits_s: Sequence[float]) -> Workload:
    requests = [
        dataclasses.replace(request, arrival_s=request.arrival_s + wait_s)
        for request, wait_s in zip(workload.requests, waits_s, strict=True)
    ]
    return dataclasses.replace(workload, requests=tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _seen_by_client(result: SimResult, workload: Workload, waits_s: Sequence[float]) -> SimResult:
    waited = {request.request_id: wait_s for request, wait_s in zip(workload.requests, waits_s, strict=True)}
    outcomes = [
        dataclasses.replace(outcome, arrival_s=outcome.arrival_s - waited[outcome.request_id])
        for outcome in result.outcomes
    ]
    return dataclasses.replace(result, outcomes=outcomes)


def _cases(size: Size) -> list[Case]:
    names = {MADE_UP: MADE_UP} if size is Size.SMALL else dict(SET_NAMES)
    arms = (FCFS, _TODAY, _FREE, _ONE_CORE) if size is Size.SMALL else tuple(_ARMS)
    return [
        Case(arm, partial(_run, arm, set_name, _NUM_REQUESTS[size]), name)
        for name, set_name in names.items()
        for arm in arms
    ]


def _findings(results: Results) -> list[str]:
    return [_finding(results, point) for point in results.points()]


def _finding(results: Results, point: str) -> str:
    others = [arm for arm in results.arms() if arm not in (FCFS, _TODAY)]
    beside = ", ".join(f"{show(results.ratio('mean_normalized_ms', _TODAY, arm, point))} ({arm})" for arm in others)
    return (
        f"{point}: mean latency per output token is lower than first come, first served by {gains(results, point)}; "
        f"than with the trained predictor by {beside}."
    )


def _checks_of(name: str) -> list[Check]:
    return [
        faster(f"{name}: a free state lowers latency per token below today's", _FREE, _TODAY, name, 1.0, (Size.FULL,)),
        faster(f"{name}: and so do 16 cores", "ltr, state, 16 cores", _TODAY, name, 1.0, (Size.FULL,)),
        faster(f"{name}: and so do 4 cores", "ltr, state, 4 cores", _TODAY, name, 1.0, (Size.FULL,)),
        faster(f"{name}: and so does one core", _ONE_CORE, _TODAY, name, 1.0, (Size.FULL,)),
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
    figures=BURST_FIGURES,
    checks=(
        faster("made up, small: >= 1.3x lower", _FREE, FCFS, MADE_UP, 1.3, (Size.SMALL,)),
        faster("made up, small: one core that reads holds up the queue", _FREE, _ONE_CORE, MADE_UP, 1.1, (Size.SMALL,)),
        *(check for name in SET_NAMES for check in _checks_of(name)),
    ),
    findings=_findings,
    full_traces=ALPACA_FILES,
)
