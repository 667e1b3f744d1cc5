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
        places = range(self._size)
        self._pairs = tuple((row, column) for row in places for column in places[row:])
        self._products = [0.0] * len(self._pairs)
        """Of each pair of features, which is as good both ways."""
        self._targets = [0.0] * self._size
        self._coefficients = list(prior)
        self._num_observed = 0

    def predict(self, features: Sequence[float]) -> float:
        total: float = sum(map(mul, self._coefficients, features))
        return total

    def observe(self, features: Sequence[float], value: float) -> None:
        decay = self._decay
        pairs = zip(self._products, self._pairs, strict=True)
        self._products = [decay * product + features[row] * features[column] for product, (row, column) in pairs]
        self._targets = [decay * target + one * value for target, one in zip(self._targets, features, strict=True)]
        self._num_observed += 1
        if self._num_observed % _REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        """Gaussian elimination of (products + prior weights) x = targets; the matrix is positive definite."""
        rows = [[0.0] * self._size for _ in self._targets]
        for (row, column), product in zip(self._pairs, self._products, strict=True):
            rows[row][column] = rows[column][row] = product
        for index, target in enumerate(self._targets):
            weight = self._scales[index] ** 2
            rows[index][index] += weight
            rows[index].append(target + weight * self._prior[index])
        for pivot in range(self._size):
            for below in range(pivot + 1, self._size):
                factor = rows[below][pivot] / rows[pivot][pivot]
                for column in range(pivot, self._size + 1):
                    rows[below][column] -= factor * rows[pivot][column]
        for pivot in reversed(range(self._size)):
            known = sum(rows[pivot][column] * self._coefficients[column] for column in range(pivot + 1, self._size))
            self._coefficients[pivot] = (rows[pivot][self._size] - known) / rows[pivot][pivot]
