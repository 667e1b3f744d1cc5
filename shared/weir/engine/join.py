"""When waiting sequences may join the batch.

    continuous   whenever there is a place: every step, what has ended is gone and what waits joins
    static       when the batch has ended, up to a full one of what waits then; nobody joins until all of it has ended
    static-hold  the same, and rows that have ended are computed on to the end of the batch, as a padded batch does
    dynamic      as static, but a batch starts only when it is full, or a window after the first sequence began to wait

Continuous batching is how Weir serves; the others are what it is measured against. A dynamic batch runs to its end
like a static one, because that is what a server does that collects requests in front of a model which answers whole
batches; letting the window's sequences join a running batch would be continuous batching with a delay.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Batching(Enum):
    """The rules by name."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    STATIC_HOLD = "static-hold"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Which rule; `window_s` is for the dynamic one alone."""

    batching: Batching = Batching.CONTINUOUS
    window_s: float = 0.05

    @property
    def holds_rows(self) -> bool:
        return self.batching is Batching.STATIC_HOLD


class JoinRule(Protocol):
    """Asked once a step. Time is the caller's."""

    def num_joining(self, now_s: float, num_waiting: int, num_in_batch: int) -> int:
        """How many may join now, at most; never more than there are places."""
        ...

    @property
    def next_deadline_s(self) -> float | None:
        """When to ask again although nothing has happened; None: only when something has."""
        ...


def make_join_rule(settings: JoinSettings, max_batch_size: int) -> JoinRule:
    match settings.batching:
        case Batching.CONTINUOUS:
            return ContinuousJoin(max_batch_size)
        case Batching.STATIC | Batching.STATIC_HOLD:
            return StaticJoin(max_batch_size)
        case Batching.DYNAMIC:
            return DynamicJoin(max_batch_size, settings.window_s)


class ContinuousJoin:
    """A place is enough."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size

    def num_joining(self, now_s: float, num_waiting: int, num_in_batch: int) -> int:
        del now_s, num_waiting
        return max(0, self._max_batch_size - num_in_batch)

    @property
    def next_deadline_s(self) -> float | None:
        return None


class StaticJoin:
    """The batch must have ended."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size

    def num_joining(self, now_s: float, num_waiting: int, num_in_batch: int) -> int:
        del now_s, num_waiting
        return 0 if num_in_batch else self._max_batch_size

    @property
    def next_deadline_s(self) -> float | None:
        return None


class DynamicJoin:
    """The batch must have ended, and the next one be full or its window over.

    The window is counted from when the first of those that wait was seen, so it runs while a batch does.
    """

    def __init__(self, max_batch_size: int, window_s: float) -> None:
        self._max_batch_size = max_batch_size
        self._window_s = window_s
        self._first_waits_since_s: float | None = None
        self._next_deadline_s: float | None = None

    def num_joining(self, now_s: float, num_waiting: int, num_in_batch: int) -> int:
        self._next_deadline_s = None
        if num_waiting == 0:
            self._first_waits_since_s = None
            return 0
        if self._first_waits_since_s is None:
            self._first_waits_since_s = now_s
        if num_in_batch:
            return 0
        ends_at_s = self._first_waits_since_s + self._window_s
        if num_waiting < self._max_batch_size and now_s < ends_at_s:
            self._next_deadline_s = ends_at_s
            return 0
        if num_waiting > self._max_batch_size:
            self._first_waits_since_s = now_s  # of those that are left over
        else:
            self._first_waits_since_s = None
        return self._max_batch_size

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s
