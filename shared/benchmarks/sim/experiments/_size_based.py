"""What the experiments on policies share: ShareGPT lengths, one open lane, predictions that are wrong on purpose, and
what orders by length are asked."""

import dataclasses
from functools import lru_cache

import numpy as np

from benchmarks.sim.experiment import Check, Results, Size
from benchmarks.sim.report import show
from benchmarks.traces import traces_folder
from weir.scheduling.limits import CoreLimits, LaneLimits, MemoryFitName, PlacingLimits
from weir.sim.results.metrics import RequestOutcome, SimResult, summarize, ttft_s
from weir.sim.workloads.traces import read_lengths
from weir.sim.workloads.workload import Lengths, Workload, with_values
from weir.training.samples import tau

SHAREGPT = "sharegpt8k_lengths_part_a.csv"
PREDICTION_S = 0.0008
"""Charged to every request whose length is predicted: what a prediction may take on one core."""


def open_limits(memory_fit: MemoryFitName = "conservative", max_prefill_tokens: int = 2048) -> CoreLimits:
    """One lane that refuses nobody and gives nobody up; one queue, for there is one tenant."""
    lane = LaneLimits("batch", max_queued=50_000, max_wait_s=86_400.0)
    placing = PlacingLimits(memory_fit=memory_fit)
    return CoreLimits(
        lanes=(lane,),
        default_lane="batch",
        tenant_order="arrival",
        placing=placing,
        max_prefills=64,
        max_prefill_tokens=max_prefill_tokens,
    )


@lru_cache(maxsize=4)
def lengths_of(name: str) -> tuple[Lengths, ...]:
    return tuple(read_lengths(traces_folder() / name))


def with_predictions(workload: Workload, spread: float, seed: int) -> Workload:
    """What an oracle with noise predicts: lengths log-normal with `spread` around the truth; 0 is the oracle."""
    noise = np.random.default_rng([seed, 77]).normal(0.0, 1.0, len(workload.requests)) * spread
    logarithms = np.log([request.num_output_tokens for request in workload.requests]) + noise
    return with_values(
        workload, predicted_output_tokens=np.exp(logarithms).tolist(), output_score=(-logarithms).tolist()
    )


def kendall_tau(workload: Workload) -> float:
    """Between predicted and true output lengths (tau-b, over at most 1,000 requests)."""
    some = workload.requests[:1000]
    predicted = np.array([request.predicted_output_tokens for request in some])
    true = np.array([request.num_output_tokens for request in some], np.float64)
    return tau(predicted, true)


def figures(result: SimResult, *, prediction_s: float = 0.0, warmup: float = 0.1) -> dict[str, float]:
    """Of all requests but the warm-up. A prediction delays a request by a constant, which is added to its latencies.

    A burst has no warm-up: all its requests wait for one another.
    """
    if prediction_s:
        outcomes = [_delayed(outcome, prediction_s) for outcome in result.outcomes]
        result = dataclasses.replace(result, outcomes=outcomes)
    values = summarize(result, warmup=warmup).as_dict()
    values["mean_normalized_ms"] = 1000 * values["mean_normalized_s"]
    values["p99_normalized_ms"] = 1000 * values["p99_normalized_s"]
    values["makespan_s"] = result.duration_s
    finished = [outcome for outcome in result.outcomes if outcome.is_finished]
    values["max_wait_s"] = max(max(ttft_s(outcome), outcome.worst_gap_s) for outcome in finished)
    return values


def _delayed(outcome: RequestOutcome, by_s: float) -> RequestOutcome:
    return dataclasses.replace(outcome, arrival_s=outcome.arrival_s - by_s)


def faster(claim: str, arm: str, base: str, point: str, at_least: float, sizes: tuple[Size, ...]) -> Check:
    """How many times lower the arm's mean latency per output token is."""
    return Check(
        claim, lambda results: results.ratio("mean_normalized_ms", base, arm, point), at_least=at_least, sizes=sizes
    )


def same_makespan(claim: str, arm: str, base: str, point: str, sizes: tuple[Size, ...]) -> Check:
    """Within 5 %: whoever goes first, the work is the same."""
    return Check(
        claim, lambda results: results.ratio("makespan_s", arm, base, point), at_least=0.95, at_most=1.05, sizes=sizes
    )


def starvation_checks(prefix: str, controlled: str, plain: str, point: str) -> tuple[Check, Check]:
    """Of the full size: what starvation control gains and costs where the load is 1.2 times saturation."""
    return (
        Check(
            f"{prefix}starvation control halves the longest wait at 1.2x",
            lambda results: results.ratio("max_wait_s", controlled, plain, point),
            at_most=0.5,
            sizes=(Size.FULL,),
        ),
        Check(
            f"{prefix}starvation control costs < 15 % of mean latency per token at 1.2x",
            lambda results: results.ratio("mean_normalized_ms", controlled, plain, point),
            at_most=1.15,
            sizes=(Size.FULL,),
        ),
    )


def starvation_finding(results: Results, controlled: str, plain: str, point: str) -> str:
    """Empty where the controlled arm was not run."""
    if controlled not in results.arms():
        return ""
    wait = results.ratio("max_wait_s", controlled, plain, point)
    mean = results.ratio("mean_normalized_ms", controlled, plain, point)
    return f" Starvation control: longest wait x {show(wait)}, mean latency per token x {show(mean)}."
