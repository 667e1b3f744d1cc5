"""Estimates that policies learn from what has ended, small enough to live in a policy: a mean and a linear model."""

from collections import deque
from collections.abc import Sequence
from operator import mul

_REFIT_EVERY = 32


class RecentMean:
    """The mean of the last `max_values` values."""

    def __init__(self, max_values: int = 1000) -> None:
        self._values: deque[float] = deque(maxlen=max_values)
        self._sum = 0.0

    def add(self, value: float) -> None:
        if len(self._values) == self._values.maxlen:
            self._sum -= self._values[0]
        self._values.append(value)
        self._sum += value

    @property
    def value(self) -> float | None:
        """None: nothing was added yet."""
        return self._sum / len(self._values) if self._values else None


class LeastSquares:
    """A linear model, refitted as observations come. Each one weighs `decay` times as much as the next; it begins with,
    and is held near, a prior.

    `scales` are typical sizes of the features: the prior counts as one observation of each feature alone at its scale.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float], decay: float) -> None:
        self._size = len(prior)
        self._decay = decay
        self._prior = tuple(prior)
        self._scales = tuple(scales)
        self._products = [0.0] * self._size**2
        """Row by row."""
        self._targets = [0.0] * self._size
        self._coefficients = list(prior)
        self._num_observed = 0

    def predict(self, features: Sequence[float]) -> float:
        total: float = sum(map(mul, self._coefficients, features))
        return total

    def observe(self, features: Sequence[float], value: float) -> None:
        decay = self._decay
        new = [left * right for left in features for right in features]
        self._products = [decay * product + added for product, added in zip(self._products, new, strict=True)]
        self._targets = [decay * target + one * value for target, one in zip(self._targets, features, strict=True)]
        self._num_observed += 1
        if self._num_observed % _REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        """Gaussian elimination of (products + prior weights) x = targets; the matrix is positive definite."""
        rows = []
        for index, target in enumerate(self._targets):
            weight = self._scales[index] ** 2
            products = self._products[index * self._size : (index + 1) * self._size]
            row = [*products, target + weight * self._prior[index]]
            row[index] += weight
            rows.append(row)
        for pivot in range(self._size):
            for below in range(pivot + 1, self._size):
                factor = rows[below][pivot] / rows[pivot][pivot]
                for column in range(pivot, self._size + 1):
                    rows[below][column] -= factor * rows[pivot][column]
        for pivot in reversed(range(self._size)):
            known = sum(rows[pivot][column] * self._coefficients[column] for column in range(pivot + 1, self._size))
            self._coefficients[pivot] = (rows[pivot][self._size] - known) / rows[pivot][pivot]
