"""What rate is likely some time ahead: Holt's double exponential smoothing (1957; Winters 1960), never below what the
last window had."""

import math

_MOST_GROWTH = 2.0
"""A trend is followed up to so many times the last window's rate: further it is a guess."""


class RateTrend:
    """Level and slope of a rate, each step weighted by the time that it stands for."""

    def __init__(self, half_life_s: float) -> None:
        """`half_life_s`: after so long half of what is known is newer."""
        self._half_life_s = half_life_s
        self._at_s: float | None = None
        self._level = 0.0
        self._slope_a_s = 0.0

    def add(self, at_s: float, rate_a_s: float) -> None:
        """In the order of time."""
        if self._at_s is None:
            self._at_s, self._level = at_s, rate_a_s
            return
        passed_s = at_s - self._at_s
        if passed_s <= 0:
            return
        share = 1 - math.exp(-math.log(2) * passed_s / self._half_life_s)
        before, expected = self._level, self._level + self._slope_a_s * passed_s
        self._level = expected + share * (rate_a_s - expected)
        self._slope_a_s += share * ((self._level - before) / passed_s - self._slope_a_s)
        self._at_s = at_s

    def ahead(self, horizon_s: float, last_rate_a_s: float) -> float:
        """Requests a second: the larger of the last window's and the trend's, from 0 to twice the last window's."""
        trend = self._level + self._slope_a_s * horizon_s
        return max(last_rate_a_s, min(trend, _MOST_GROWTH * last_rate_a_s))
