"""Whether a pool goes up and down again and again: the sign of a planner that chases its own tail."""

from collections import deque

from weir.planner.settings import PlannerSettings


class Reversals:
    """Of one pool. A change that repeats the direction of the last one is none."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._window_s = settings.reversal_window_s
        self._max_num = settings.max_reversals
        self._last_direction = 0
        self._at_s: deque[float] = deque()
        self._calm_from_s = float("-inf")

    def note(self, at_s: float, delta: int) -> None:
        """Something is begun, or advised anew."""
        direction = (delta > 0) - (delta < 0)
        if direction == 0:
            return
        if self._last_direction and direction != self._last_direction:
            self._at_s.append(at_s)
        self._last_direction = direction
        if self.num(at_s) >= self._max_num:
            self._calm_from_s = at_s + self._window_s

    def num(self, at_s: float) -> int:
        """Within the window."""
        while self._at_s and self._at_s[0] <= at_s - self._window_s:
            self._at_s.popleft()
        return len(self._at_s)

    def is_alarming(self, at_s: float) -> bool:
        """Nothing is taken away meanwhile."""
        return at_s < self._calm_from_s
