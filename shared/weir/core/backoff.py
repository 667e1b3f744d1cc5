"""How long to wait before the next attempt at what keeps failing."""


class Backoff:
    """Delays that double from `first_s` to `longest_s`, and begin anew after `reset`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._longest_s)
        return delay_s

    def reset(self) -> None:
        """What was attempted holds now."""
        self._next_s = self._first_s
