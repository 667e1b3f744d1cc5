"""Means with intervals: how far a figure moves when nothing but the seed changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# 97.5 % quantiles of Student's t with 1, 2, 3 … degrees of freedom; beyond the last one the next lower stands in, which
# is the wider interval.
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `num` runs with its 95 % interval; of one run both ends are infinitely far away."""

    mean: float
    low: float
    high: float
    num: int


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Student's t interval of the mean. Raises ValueError without values."""
    if not values:
        raise ValueError("an estimate needs at least one value")
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    if len(array) == 1 or not math.isfinite(mean):
        return Estimate(mean, -math.inf, math.inf, len(array))
    half = _t_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Estimate(mean, mean - half, mean + half, len(array))


def _t_quantile(degrees: int) -> float:
    return _T_QUANTILES[min(degrees, len(_T_QUANTILES)) - 1]
