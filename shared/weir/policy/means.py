"""What policies learn of the requests that have ended."""

from collections import deque


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
