"""The load that a system can take: the highest rate at which a share of the offered requests meet their SLOs.

As DistServe (arXiv 2401.09670) defines goodput, with 90 % unless told otherwise; per GPU is for the caller to divide.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TARGET_ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True)
class SustainableRate:
    """`rate_a_s` is 0 where even the lowest rate missed the target; `is_bounded` is False where the highest met it,
    so that the true capacity lies above. `tried` are (rate, attainment), by rate."""

    rate_a_s: float
    is_bounded: bool
    tried: Sequence[tuple[float, float]]


def find_capacity(
    attainment_at: Callable[[float], float],
    low_a_s: float,
    high_a_s: float,
    *,
    target: float = TARGET_ATTAINMENT,
    relative: float = 0.02,
) -> SustainableRate:
    """Bisects between two rates until they are `relative` apart, then interpolates where attainment crosses `target`.

    Attainment is taken to fall as the rate rises; give `attainment_at` the same seed for every rate.
    """
    if not 0 < low_a_s < high_a_s < math.inf:
        raise ValueError(f"low_a_s {low_a_s}, high_a_s {high_a_s}: must be 0 < low < high")
    if not 0 < target <= 1 or not 0 < relative < 1:
        raise ValueError(f"target {target}, relative {relative}: must be in (0, 1]")
    tried = {rate: attainment_at(rate) for rate in (low_a_s, high_a_s)}
    if tried[low_a_s] < target:
        return SustainableRate(0.0, is_bounded=True, tried=sorted(tried.items()))
    if tried[high_a_s] >= target:
        return SustainableRate(high_a_s, is_bounded=False, tried=sorted(tried.items()))
    low, high = low_a_s, high_a_s
    while high - low > relative * low:
        middle = math.sqrt(low * high) if high > 2 * low else (low + high) / 2
        tried[middle] = attainment_at(middle)
        low, high = (middle, high) if tried[middle] >= target else (low, middle)
    return SustainableRate(crossing((low, tried[low]), (high, tried[high]), target), True, sorted(tried.items()))


def crossing(met: tuple[float, float], missed: tuple[float, float], target: float) -> float:
    """Where the line between two (rate, attainment) points, of which the first meets the target, crosses it."""
    (low, low_share), (high, high_share) = met, missed
    if low_share <= high_share:
        return low
    return low + (high - low) * (low_share - target) / (low_share - high_share)
