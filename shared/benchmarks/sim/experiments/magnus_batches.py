"""Magnus's batches against batches of a fixed size, and both against continuous batching."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import (
    PREDICTION_S,
    figures,
    kendall_tau,
    lengths_of,
    open_limits,
    with_predictions,
)
from benchmarks.sim.report import show
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.policy.registry import PolicySpec
from weir.sim.profile import load_profile
from weir.sim.simulator import simulate
from weir.sim.spec import PoolSpec, SystemSpec
from weir.sim.workloads.workload import burst, draw

_PROFILE = "h100-llama3-8b"
_ARENA = "vtc_arena_tenants_part_a.csv"
_SPREAD = 0.9
_WINDOW = 256
"""Requests that a worker of Magnus's chooses its batches from."""


@dataclass(frozen=True, slots=True)
class _Arm:
    policy: PolicySpec
    batching: Batching
    max_num_seqs: int


_FIXED, _LARGE = "fixed batches of 7", "fixed batches of 64"
_MAGNUS, _MAGNUS_LOOSE = "magnus, static, waste < 50,000", "magnus, static, waste < 2,000,000"
_CONTINUOUS, _MAGNUS_CONTINUOUS = "fcfs, continuous", "magnus, continuous"
_STATIC = {"static_batches": 1, "max_batch": 64}
_ARMS = {
    _FIXED: _Arm(PolicySpec("fcfs"), Batching.STATIC_HOLD, 7),
    _LARGE: _Arm(PolicySpec("fcfs"), Batching.STATIC_HOLD, 64),
    _MAGNUS: _Arm(PolicySpec("magnus", _STATIC), Batching.STATIC_HOLD, _WINDOW),
    _MAGNUS_LOOSE: _Arm(PolicySpec("magnus", _STATIC | {"max_waste": 2_000_000}), Batching.STATIC_HOLD, _WINDOW),
    _CONTINUOUS: _Arm(PolicySpec("fcfs"), Batching.CONTINUOUS, 256),
    _MAGNUS_CONTINUOUS: _Arm(PolicySpec("magnus"), Batching.CONTINUOUS, 256),
}
"""50,000 is the paper's bound, for GPUs on which reading a token again costs more beside a step than here: the weights
that a step reads are as much as 115,000 tokens of context."""


def _run(name: str, num: int, seed: int) -> Mapping[str, float]:
    arm = _ARMS[name]
    workload = draw(lengths_of(_ARENA), burst(num), np.random.default_rng(seed), name="r")
    workload = with_predictions(workload, _SPREAD, seed)
    pool = PoolSpec("local", 1, load_profile(_PROFILE), arm.max_num_seqs)
    spec = SystemSpec((pool,), join=JoinSettings(arm.batching))
    limits = open_limits(max_prefill_tokens=1_000_000)
    result = simulate(spec, workload, limits=limits, policy=arm.policy)
    values = figures(result, prediction_s=PREDICTION_S if arm.policy.name == "magnus" else 0.0)
    return values | {"requests_a_s": num / values["makespan_s"], "tau": kendall_tau(workload)}


def _cases(size: Size) -> list[Case]:
    num, arms = (150, (_FIXED, _MAGNUS_LOOSE)) if size is Size.SMALL else (600, tuple(_ARMS))
    return [Case(arm, partial(_run, arm, num)) for arm in arms]


def _findings(results: Results) -> list[str]:
    sentences = [f"Predictions rank like tau {show(results.estimate('tau', _MAGNUS_LOOSE))}."]
    for arm in results.arms():
        for base in (_FIXED, _LARGE, _CONTINUOUS):
            if base in results.arms() and base != arm:
                rate = results.ratio("requests_a_s", arm, base)
                latency = results.ratio("mean_latency_s", arm, base)
                sentences.append(f"{arm} over {base}: requests/s x {show(rate)}, mean latency x {show(latency)}.")
    return sentences


EXPERIMENT = Experiment(
    name="magnus-batches",
    title="Magnus against fixed batches and against continuous batching",
    claim=(
        "Batches put together by predicted length (Cheng et al., arXiv 2406.04785) serve more than batches of a fixed "
        "size. Against continuous batching no gain is expected."
    ),
    compared=(
        f"One colocated {_PROFILE}, a burst of 600 requests with the arena's lengths. Static batches compute rows that "
        "have ended on to the end of the batch. Predictions are the true lengths with log-normal noise, no trained "
        f"predictor, charged 0.8 ms each; Magnus chooses among {_WINDOW} requests at the worker."
    ),
    cases=_cases,
    figures=(
        Figure("requests_a_s", "requests/s", 2),
        Figure("mean_latency_s", "latency mean, s", 1),
        Figure("mean_ttft_s", "TTFT mean, s", 1),
        Figure("p99_ttft_s", "p99, s", 1),
        Figure("mean_normalized_ms", "latency/token, ms", 0),
    ),
    checks=(
        Check(
            "at least 1.6 times the requests/s of fixed batches of 7",
            lambda results: results.ratio("requests_a_s", _MAGNUS_LOOSE, _FIXED),
            at_least=1.6,
            sizes=(Size.FULL,),
        ),
        Check(
            "more requests/s than fixed batches of 7, small",
            lambda results: results.ratio("requests_a_s", _MAGNUS_LOOSE, _FIXED),
            at_least=1.2,
            sizes=(Size.SMALL,),
        ),
        Check(
            "no gain in requests/s over continuous batching: within 10 %",
            lambda results: results.ratio("requests_a_s", _MAGNUS_CONTINUOUS, _CONTINUOUS),
            at_least=0.9,
            at_most=1.1,
            sizes=(Size.FULL,),
        ),
    ),
    findings=_findings,
    traces=(_ARENA,),
)
