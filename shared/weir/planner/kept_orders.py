"""What an autoscaler was told it is told for as long as a worker takes to start: one that loads or restarts is not
seen, and a number without it would end it.
"""

from collections import deque
from dataclasses import replace

from weir.planner.decision import PoolDecision, Reason


class KeptOrders:
    """Of one pool."""

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
