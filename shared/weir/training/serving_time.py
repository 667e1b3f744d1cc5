"""Magnus's serving-time estimator: k nearest neighbours over batch size, prompt and output length.

Cheng et al., arXiv 2406.04785. It is a `weir.policy.magnus.ServingTime`, in place of the linear one.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sklearn.neighbors import KNeighborsRegressor


@dataclass(frozen=True, slots=True)
class NeighbourSettings:
    """Until `least` requests were seen, prefill_token_ms * prompt + decode_token_ms * output is said."""

    num_neighbours: int = 5
    least: int = 20
    max_observations: int = 2048
    refit_s: float = 120.0
    bad_share: float = 0.1
    prefill_token_ms: float = 0.02
    decode_token_ms: float = 15.0


class NearestServingTime:
    """Bounded; `clock` gives seconds. Refits when the last fit is old enough and a prediction was off by a tenth."""

    def __init__(self, clock: Callable[[], float], settings: NeighbourSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or NeighbourSettings()
        self._seen: deque[tuple[float, float, float, float]] = deque(maxlen=self._settings.max_observations)
        self._fitted: KNeighborsRegressor | None = None
        self._fitted_at_s = -math.inf
        self._is_missing = False
        self.batch_size = 1.0
        """That of the batch which the next predictions are for."""

    def seconds(self, num_uncached_tokens: float, num_output_tokens: float) -> float:
        """How long a request of this size is served in a batch of `batch_size`."""
        if self._fitted is None:
            settings = self._settings
            prefill_ms = settings.prefill_token_ms * num_uncached_tokens
            return max(1e-3, (prefill_ms + settings.decode_token_ms * num_output_tokens) / 1000)
        point = _point(self.batch_size, num_uncached_tokens, num_output_tokens)
        return max(1e-3, float(self._fitted.predict([point])[0]))

    def observe(self, num_uncached_tokens: float, num_output_tokens: float, seconds: float) -> None:
        """A request of this size took so long."""
        off = abs(self.seconds(num_uncached_tokens, num_output_tokens) - seconds)
        self._is_missing = self._is_missing or off > self._settings.bad_share * seconds
        self._seen.append((self.batch_size, num_uncached_tokens, num_output_tokens, seconds))
        now_s = self._clock()
        is_due = now_s - self._fitted_at_s >= self._settings.refit_s and self._is_missing
        if len(self._seen) >= self._settings.least and (is_due or self._fitted is None):
            self._fit(now_s)

    def _fit(self, now_s: float) -> None:
        points = np.array([_point(*entry[:3]) for entry in self._seen])
        seconds = np.array([entry[3] for entry in self._seen])
        regressor = KNeighborsRegressor(min(self._settings.num_neighbours, len(points)), weights="distance")
        self._fitted = regressor.fit(points, seconds)
        self._fitted_at_s, self._is_missing = now_s, False


def _point(batch_size: float, num_prompt_tokens: float, num_output_tokens: float) -> tuple[float, float, float]:
    """Logarithms: twice as long is as far wherever one starts."""
    return math.log1p(batch_size), math.log1p(num_prompt_tokens), math.log1p(num_output_tokens)
