"""What earlier decisions of a pool say against the next one: it goes up and down again and again, the sign of a planner
that chases its own tail, or takes back what was ordered and is not seen yet.
"""

from collections import deque
from dataclasses import replace

from weir.planner.decision import PoolDecision, Reason
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


class KeptOrders:
    """Of one pool. What an autoscaler was told it is told for as long as a worker takes to start: one that loads or
    restarts is not seen, and a number without it would end it."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._wanted: deque[tuple[float, int]] = deque()
        """When, and how many; falling, so that the first is the most."""

    def kept(self, at_s: float, wish: PoolDecision) -> PoolDecision:
        """At least as many as were wanted within `keep_s`, unless one is to spare. In the order of time."""
        if wish.reason is Reason.SPARE:
            self._wanted.clear()
        while self._wanted and self._wanted[0][0] <= at_s - self._keep_s:
            self._wanted.popleft()
        while self._wanted and self._wanted[-1][1] <= wish.wanted:
            self._wanted.pop()
        self._wanted.append((at_s, wish.wanted))
        most = self._wanted[0][1]
        return wish if most == wish.wanted else replace(wish, wanted=most, reason=Reason.KEPT)
