"""Fits the cost of a step to steps that were measured: least squares with coefficients that are not negative.

Relative errors count, so that short steps weigh as much as long ones; steps that a machine's hiccup made far longer
than the others of their kind are left out of a second fit (a fit, a cut at `_CUT` median deviations, a fit). With five
coefficients every subset of them can be tried, so the solution is exact (Lawson and Hanson's problem, by enumeration).

That is what a step usually takes. Where steps disturb one another the mean is longer, and queues follow the mean: it is
fitted to all steps, weighted by what was fitted before and not by what was measured, which would favour short ones.
Workers that share the cores of a machine slow one another down, so this fit has a factor beside the cost:

    duration = mean cost * (1 + contention * other workers that computed meanwhile)

The factor is found in a few fits, each with the cost that the one before has found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.core.cost import StepCost

Floats = NDArray[np.float64]
_CUT = 6.0
_MIN_STEPS = 64
_MIN_OF_A_KIND = 16
_NUM_TERMS = 5
_NUM_REWEIGHTS = 2
_NUM_TURNS = 12


class CostSample(NamedTuple):
    """One step, in the terms of `StepCost`, and how long it took."""

    num_prefill_tokens: int
    num_prefill_pairs: float
    num_decodes: int
    num_context_tokens: int
    duration_ms: float
    mean_others: float = 0.0
    """Other workers of the machine that computed meanwhile."""


@dataclass(frozen=True, slots=True)
class CostFit:
    """`r2` of the fit to all samples, in milliseconds squared. Errors are relative: measured by fitted time, less 1."""

    cost: StepCost
    """What steps usually take."""
    mean_cost: StepCost
    """What they take on average, with the slow ones, while no other worker of the machine computes."""
    contention: float
    """By what part longer they take for each other worker that does."""
    num_samples: int
    num_left_out: int
    r2: float
    error_p05: float
    error_p50: float
    error_p95: float


def try_fit_cost(samples: Sequence[CostSample], *, must_decode: bool = True) -> CostFit | None:
    """None while the steps are too few or too much alike to tell the terms apart.

    Without `must_decode` steps of prompts alone are enough: the terms of decodes are then zero.
    """
    if len(samples) < _MIN_STEPS or not _has_variety(samples, must_decode):
        return None
    return fit_cost(samples)


def fit_cost(samples: Sequence[CostSample]) -> CostFit:
    """Raises ValueError for fewer samples than there are coefficients, or a duration that is not above 0."""
    table = np.array(samples, np.float64).reshape(-1, len(CostSample._fields))
    durations_ms, mean_others = table[:, -2], table[:, -1]
    if len(table) < _NUM_TERMS or not (durations_ms > 0).all():
        raise ValueError(f"{len(table)} steps: at least {_NUM_TERMS} are needed, each with a duration above 0")
    terms = np.column_stack([np.ones(len(table)), table[:, :-2]])
    kept = np.ones(len(table), bool)
    coefficients = _solve(terms, durations_ms, durations_ms)
    errors = durations_ms / np.maximum(terms @ coefficients, 1e-9) - 1
    deviation = float(np.median(np.abs(errors - np.median(errors))))
    if deviation > 0:
        kept = np.abs(errors - np.median(errors)) <= _CUT * deviation
        coefficients = _solve(terms[kept], durations_ms[kept], durations_ms[kept])
    means, contention = _solve_means(terms, durations_ms, mean_others, coefficients)
    return _fit_of(coefficients, means, contention, terms, durations_ms, len(table) - int(kept.sum()))


def _has_variety(samples: Sequence[CostSample], must_decode: bool) -> bool:
    prefill_sizes = [sample.num_prefill_tokens for sample in samples if sample.num_prefill_tokens]
    if len(prefill_sizes) < _MIN_OF_A_KIND or max(prefill_sizes) < 2 * min(prefill_sizes):
        return False
    if not must_decode:
        return True
    batch_sizes = [sample.num_decodes for sample in samples if not sample.num_prefill_tokens]
    return len(batch_sizes) >= _MIN_OF_A_KIND and max(batch_sizes) >= 2 * min(batch_sizes)


def _solve_means(
    terms: Floats, durations_ms: Floats, mean_others: Floats, coefficients: Floats
) -> tuple[Floats, float]:
    """Coefficients of the mean, and the contention; `coefficients`: a first guess. What others add is a term of its own
    in each of the fits: in proportion to the cost that the fit before has found."""
    means, contention = coefficients, 0.0
    for _ in range(_NUM_REWEIGHTS if not mean_others.any() else _NUM_TURNS):
        alone_ms = terms @ means
        scales_ms = np.maximum(alone_ms * (1 + contention * mean_others), durations_ms.min() / 2)
        found = _solve(np.column_stack([terms, mean_others * alone_ms]), durations_ms, scales_ms)
        means, contention = found[:-1], float(found[-1])
    return means, contention


def _solve(terms: Floats, durations_ms: Floats, scales_ms: Floats) -> Floats:
    """The coefficients, none negative, with the least sum of squared errors, each relative to its scale."""
    weighted = terms / scales_ms[:, None]
    scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-30)
    scaled = weighted / scale
    gram, moment = scaled.T @ scaled, scaled.T @ (durations_ms / scales_ms)
    num_terms = terms.shape[1]
    best, least = np.zeros(num_terms), np.inf
    for size in range(num_terms, 0, -1):
        for chosen in combinations(range(num_terms), size):
            index = np.array(chosen)
            part, *_ = np.linalg.lstsq(gram[np.ix_(index, index)], moment[index], rcond=None)
            if (part < 0).any():
                continue
            loss = float(part @ gram[np.ix_(index, index)] @ part - 2 * part @ moment[index])
            if loss < least - 1e-12:
                best, least = np.zeros(num_terms), loss
                best[index] = part
        if size == num_terms and least < np.inf:
            break  # no bound holds it back: nothing is better
    found: Floats = best / scale
    return found


def _fit_of(
    coefficients: Floats, means: Floats, contention: float, terms: Floats, durations_ms: Floats, num_left_out: int
) -> CostFit:
    fitted_ms = terms @ coefficients
    spread = float(((durations_ms - durations_ms.mean()) ** 2).sum())
    missed = float(((durations_ms - fitted_ms) ** 2).sum())
    errors = durations_ms / np.maximum(fitted_ms, 1e-9) - 1
    p05, p50, p95 = (float(value) for value in np.percentile(errors, (5, 50, 95)))
    return CostFit(
        cost=StepCost(*(float(value) for value in coefficients)),
        mean_cost=StepCost(*(float(value) for value in means)),
        contention=contention,
        num_samples=len(terms),
        num_left_out=num_left_out,
        r2=1 - missed / spread if spread > 0 else 0.0,
        error_p05=p05,
        error_p50=p50,
        error_p95=p95,
    )
