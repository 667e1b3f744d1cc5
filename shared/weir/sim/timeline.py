"""Simulated time: whole nanoseconds, and what happens at each of them in an order that nothing else decides."""

from collections.abc import Callable
from heapq import heappop, heappush

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

Action = Callable[[], None]


class Timeline:
    """Actions by time; those of one instant in the order in which they were planned.

    Implements `weir.core.clock.Clock`. Workloads and their results count from `start_ns`.
    """

    def __init__(self, start_ns: int = 0) -> None:
        self.start_ns = start_ns
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._num_planned = 0

    def now_s(self) -> float:
        return self.now_ns / NS_PER_S

    def since_start_s(self, time_ns: int) -> float:
        return (time_ns - self.start_ns) / NS_PER_S

    def at(self, time_ns: int, action: Action) -> None:
        """Not in the past."""
        if time_ns < self.now_ns:
            raise ValueError(f"planned for {time_ns} ns, it is {self.now_ns} ns already")
        self._num_planned += 1
        heappush(self._heap, (time_ns, self._num_planned, action))

    def after(self, delay_ns: int, action: Action) -> None:
        self.at(self.now_ns + delay_ns, action)

    @property
    def next_ns(self) -> int | None:
        """When something happens next."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Does what is next; there must be something."""
        self.now_ns, _, action = heappop(self._heap)
        action()


def ns_of_ms(milliseconds: float) -> int:
    return round(milliseconds * NS_PER_MS)


def ns_of_s(seconds: float) -> int:
    return round(seconds * NS_PER_S)
