"""A sequential test with a stated error: whether what the canaries do is better than what the rest does, or worse.

x_1, x_2, … are relative differences of windows, in [-1, 1]. Were there no difference, each would be as likely as its
negative, whatever came before: so it is for two sides of as many workers that are alike, and to which nothing happens
that lasts longer than a window. Then for any a, E[exp(a x) / cosh(a x)] = 1 whatever their spread; the product over
windows is a martingale that begins at 1, and by Ville's inequality it ever reaches 1/error with a probability of at
most `error` (de la Peña, 1999, for symmetric sums). So one may look after each window, and stop when one likes. The
mean of several a is such a product too, and saves choosing one: a large one counts signs, a small one weighs.
"""

import math
from collections.abc import Iterable
from typing import Literal

_SCALES = (4.0, 12.0, 36.0)

Verdict = Literal["better", "worse", "open"]


class SignedEvidence:
    """Of one trial."""

    def __init__(self, max_error: float) -> None:
        self._needed = 1.0 / max_error
        self._logs_better = [0.0] * len(_SCALES)
        self._logs_worse = [0.0] * len(_SCALES)
        self.num_windows = 0

    def add(self, difference: float) -> None:
        """Of one window: over 0 where the canaries did better. Raises ValueError beyond [-1, 1]."""
        if not -1.0 <= difference <= 1.0:
            raise ValueError(f"difference {difference}: must be in [-1, 1]")
        self.num_windows += 1
        for index, scale in enumerate(_SCALES):
            shrink = _log_cosh(scale * difference)
            self._logs_better[index] += scale * difference - shrink
            self._logs_worse[index] += -scale * difference - shrink

    @property
    def needed(self) -> float:
        return self._needed

    @property
    def for_better(self) -> float:
        """So many times likelier than without a difference."""
        return _mean_exp(self._logs_better)

    @property
    def for_worse(self) -> float:
        return _mean_exp(self._logs_worse)

    @property
    def verdict(self) -> Verdict:
        if self.for_better >= self._needed:
            return "better"
        return "worse" if self.for_worse >= self._needed else "open"


def _log_cosh(x: float) -> float:
    """Without overflow."""
    x = abs(x)
    return x + math.log1p(math.exp(-2 * x)) - math.log(2)


def _mean_exp(logs: Iterable[float]) -> float:
    values = list(logs)
    return sum(math.exp(min(700.0, value)) for value in values) / len(values)
