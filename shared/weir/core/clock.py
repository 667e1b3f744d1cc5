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
    """Stands still until told to go on."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"advance({seconds}): a clock does not run backwards")
        self._now_s += seconds
