"""Shortest answer first in conversations, by the lengths of their earlier answers, against order of arrival."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from benchmarks.predictors.measure import ScoredLength
from benchmarks.predictors.probes import network_held_out
from benchmarks.predictors.turns import TracedTurn, linked, turn_features
from benchmarks.sim.experiment import Case, Check, Experiment, Results, Size
from benchmarks.sim.experiments._size_based import faster, figures
from benchmarks.sim.experiments.ltr_trained import (
    BURST_FIGURES,
    FCFS,
    LtrArm,
    gains,
    prediction_s,
    simulated,
    tau_of,
    workload_from,
)
from benchmarks.sim.report import show
from benchmarks.traces import MOONCAKE, traces_folder
from weir.sim.workloads.traces import read_trace
from weir.sim.workloads.workload import burst
from weir.training.ranking import RankingSettings

_QUICK = RankingSettings(num_members=2, least_steps=100, num_epochs=5)
_NUM_REQUESTS = {Size.SMALL: 800, Size.FULL: 2000}
_NUM_FOLDS = 5

_WITHOUT, _TURNS, _ORACLE = "ltr, prompt", "ltr, prompt and earlier answers", "ltr, oracle"
_ARMS: Mapping[str, LtrArm] = {
    FCFS: LtrArm(None),
    _WITHOUT: LtrArm("trained", is_charged=True),
    _TURNS: LtrArm("trained", is_charged=True),
    _ORACLE: LtrArm("oracle"),
}
_MADE_UP = "made up"
_LATER = "later turns"


@lru_cache(maxsize=4)
def _turns(point: str) -> Sequence[TracedTurn]:
    if point == _MADE_UP:
        return _made_up()
    return linked(read_trace(traces_folder(MOONCAKE) / MOONCAKE).requests)


def _made_up() -> Sequence[TracedTurn]:
    """150 conversations of three turns, each with a length of its own that its answers vary around."""
    source = np.random.default_rng(3)
    turns: list[TracedTurn] = []
    for conversation in range(150):
        answers = np.maximum(1, np.exp(5 + 0.8 * source.normal() + 0.4 * source.normal(size=3))).astype(int).tolist()
        new_tokens = source.integers(10, 200, 3).tolist()
        turns += [TracedTurn(conversation, new_tokens[n], answers[n], tuple(answers[:n])) for n in range(3)]
    return turns


@lru_cache(maxsize=8)
def _rows(point: str, has_answers: bool) -> Sequence[ScoredLength]:
    """Later turns, scored by networks that were trained on all turns of other conversations. A minute and a half."""
    turns = _turns(point)
    features = turn_features(turns)[:, : None if has_answers else 1]
    lengths = np.array([turn.num_output_tokens for turn in turns], np.int64)
    groups = np.array([turn.conversation for turn in turns], np.int64)
    settings = _QUICK if point == _MADE_UP else RankingSettings()
    scores = -network_held_out(lambda fold: features, lengths, groups, 0, _NUM_FOLDS, settings)
    return [_row(turn, float(score)) for turn, score in zip(turns, scores, strict=True) if turn.earlier]


def _row(turn: TracedTurn, score: float) -> ScoredLength:
    # these networks only rank: no length is predicted for the scheduler
    return ScoredLength(max(1, turn.num_new_tokens), turn.num_output_tokens, score, predicted_output_tokens=0.0)


def _run(arm_name: str, point: str, num: int, seed: int) -> Mapping[str, float]:
    arm, source = _ARMS[arm_name], np.random.default_rng(seed)
    rows = _rows(point, arm_name == _TURNS)
    charged_s = prediction_s() if arm.is_charged else 0.0
    result = simulated(workload_from(rows, point, burst(num), source, arm), arm)
    return figures(result, prediction_s=charged_s, warmup=0.0) | {"tau": tau_of(rows, arm)}


def _cases(size: Size) -> list[Case]:
    point = _MADE_UP if size is Size.SMALL else _LATER
    return [Case(arm, partial(_run, arm, point, _NUM_REQUESTS[size]), point) for arm in _ARMS]


def _findings(results: Results) -> list[str]:
    return [
        f"{point}: mean latency per output token is lower than first come, first served by {gains(results, point)}. "
        f"Earlier answers beside the prompt alone: "
        f"{show(results.ratio('mean_normalized_ms', _WITHOUT, _TURNS, point))}."
        for point in results.points()
    ]


def _checks(point: str, size: Size) -> list[Check]:
    return [
        faster(f"{point}: earlier answers lower latency per token by 1.3x", _TURNS, FCFS, point, 1.3, (size,)),
        faster(f"{point}: and by 1.3x beside prompts alone", _TURNS, _WITHOUT, point, 1.3, (size,)),
    ]


EXPERIMENT = Experiment(
    name="ltr-turns",
    title="Learning to rank by the earlier answers of a conversation",
    claim=(
        "Answers of one conversation are about as long as each other, so that the lengths of the earlier ones rank the "
        "next, and lower latency per token, where prompt lengths do not."
    ),
    compared=(
        "System of `ltr-trained`; 2,000 later turns of Mooncake's conversation trace at once, drawn with repeats. Of "
        "their prompts only what is behind the answer before is computed and counted: the rest is taken to be cached "
        "and shared. Networks (ListMLE, five-fold by conversation) are trained on all turns of other conversations: on "
        "the length of what is new in the prompt, and on that and the three features of earlier answers that "
        "predictors have. Text, which the trace lacks, is in neither. Charged as in `ltr-trained`."
    ),
    cases=_cases,
    figures=BURST_FIGURES,
    checks=(*_checks(_MADE_UP, Size.SMALL), *_checks(_LATER, Size.FULL)),
    findings=_findings,
    full_traces=(MOONCAKE,),
)
