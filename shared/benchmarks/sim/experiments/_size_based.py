"""What the experiments on policies share: ShareGPT lengths, one open lane, predictions that are wrong on purpose."""

import dataclasses
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.sim.experiment import traces_folder
from weir.scheduling.limits.core_limits import CoreLimits, LaneLimits
from weir.scheduling.limits.placing_limits import MemoryFitName, PlacingLimits
from weir.sim.results.metrics import summarize, ttft_s
from weir.sim.results.outcome import RequestOutcome, SimResult
from weir.sim.workloads.compose import Lengths
from weir.sim.workloads.traces import read_lengths
from weir.sim.workloads.workload import Workload

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
    """Lengths as an oracle with noise tells them: log-normal with `spread` around the truth; 0 is the oracle."""
    noise = np.random.default_rng([seed, 77]).normal(0.0, 1.0, len(workload.requests)) * spread
    changed = []
    for request, error in zip(workload.requests, noise.tolist(), strict=True):
        logarithm = float(np.log(request.num_output_tokens)) + error
        predicted = float(np.exp(logarithm))
        changed.append(dataclasses.replace(request, predicted_output_tokens=predicted, output_score=-logarithm))
    return dataclasses.replace(workload, requests=tuple(changed))


def kendall_tau(workload: Workload) -> float:
    """Between predicted and true output lengths (tau-b, over at most 1,000 requests)."""
    some = workload.requests[:1000]
    predicted = np.array([request.predicted_output_tokens for request in some])
    true = np.array([request.num_output_tokens for request in some], np.float64)
    one, other = _signs(predicted), _signs(true)
    return float((one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum()))


def _signs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    signs: NDArray[np.float64] = np.sign(values[:, None] - values[None, :])
    return signs


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
