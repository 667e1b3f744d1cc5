"""Which value of a bound is tried next: half or twice as much, then less far; what was no better is left alone."""

import math
from collections.abc import Iterator

from weir.planner.tuning.observation import SideScore
from weir.planner.tuning.settings import Knob, TunerSettings
from weir.planner.tuning.steps import Cause

_FACTORS = (2.0, 2.0**0.5, 2.0**0.25)
WAITING_SHARE = 0.5
"""Of the looks of a window."""


class KnobSearch:
    """Of one knob."""

    def __init__(self, knob: Knob, settings: TunerSettings) -> None:
        self.knob = knob
        self._settings = settings
        self._rejected: dict[int, int] = {}
        """Value -> the window in which it was found no better."""

    def reject(self, value: int, window_number: int) -> None:
        self._rejected[value] = window_number

    def try_next(
        self, current: int, seen: SideScore, waiting_share: float, window_number: int
    ) -> tuple[int, Cause] | None:
        """None: all is as it should be, or nothing is left to try. `seen`: of all workers of the role."""
        is_missed = seen.met_share < self._settings.target and seen.num_tokens > 0
        is_waiting = waiting_share > WAITING_SHARE
        wishes: list[tuple[int, Cause]] = []
        if is_missed:
            wishes += [(value, Cause.MISSED) for value in self._below(current, seen.num_running)]
        if is_waiting:
            wishes += [(value, Cause.WAITING) for value in self._above(current)]
        return next((wish for wish in wishes if self._is_open(wish[0], window_number)), None)

    def _below(self, current: int, num_running: float) -> Iterator[int]:
        """From what runs at most: a bound that nothing reaches changes nothing."""
        top = current
        if self.knob.bound == "max_num_seqs" and num_running >= 1:
            top = min(current, math.ceil(num_running))
        for factor in _FACTORS:
            value = self.knob.clamped(top / factor)
            if value < current:
                yield value

    def _above(self, current: int) -> Iterator[int]:
        for factor in _FACTORS:
            value = self.knob.clamped(current * factor)
            if value > current:
                yield value

    def _is_open(self, value: int, window_number: int) -> bool:
        since = self._rejected.get(value)
        return since is None or window_number - since >= self._settings.retry_windows
