"""Time as a parameter: pure cores take a `Clock`, tests and the simulator drive a `ManualClock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock of this process; only differences mean something."""

    def now_s(self) -> float: ...


class SystemClock:
    """`time.monotonic`."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """Stands still until `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"advance({seconds}): a clock does not run backwards")
        self._now_s += seconds


class Backoff:
    """How long to wait before the next attempt at what keeps failing: delays that double from `first_s` to
    `longest_s`, and begin anew after `reset`."""

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
