"""When requests come: arrays of seconds, ascending. The same generator state gives the same times."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def poisson(rate_a_s: float, num: int, source: np.random.Generator) -> Times:
    """`num` arrivals of a Poisson process. The first is one gap after 0."""
    _check(rate_a_s, num)
    return np.cumsum(source.exponential(1.0 / rate_a_s, num))


def gamma(rate_a_s: float, cv: float, num: int, source: np.random.Generator) -> Times:
    """Gaps drawn from a Gamma distribution with coefficient of variation `cv`: 1 is Poisson, above it is bursty."""
    _check(rate_a_s, num)
    if not 0 < cv <= 100:
        raise ValueError(f"cv {cv}: must be over 0 and at most 100")
    shape = 1.0 / cv**2
    return np.cumsum(source.gamma(shape, 1.0 / (rate_a_s * shape), num))


def burst(num: int, at_s: float = 0.0) -> Times:
    """All at one moment."""
    _check(1.0, num)
    return np.full(num, float(at_s))


def rescaled(arrivals_s: Sequence[float] | Times, rate_a_s: float) -> Times:
    """The same pattern from 0 on, stretched so that the mean rate over its span is `rate_a_s`.

    Raises ValueError where all come at one moment: no stretch gives them a rate.
    """
    _check(rate_a_s, len(arrivals_s))
    times: Times = np.asarray(arrivals_s, np.float64) - arrivals_s[0]
    if times[-1] <= 0:
        raise ValueError(f"{len(times)} arrivals at one moment: they have no rate to change")
    stretch = (len(times) - 1) / rate_a_s / float(times[-1])
    return times * stretch


def jittered_within_ticks(arrivals_s: Sequence[float] | Times, tick_s: float, source: np.random.Generator) -> Times:
    """Times that were rounded down to ticks, spread evenly inside them; sorted."""
    if not tick_s > 0:
        raise ValueError(f"tick_s {tick_s}: must be over 0")
    times = np.asarray(arrivals_s, np.float64)
    return np.sort(times + source.uniform(0.0, tick_s, len(times)))


def _check(rate_a_s: float, num: int) -> None:
    if not 0 < rate_a_s < float("inf"):
        raise ValueError(f"rate_a_s {rate_a_s}: must be finite and over 0")
    if num < 1:
        raise ValueError(f"num {num}: must be at least 1")
