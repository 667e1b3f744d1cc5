"""When waiting sequences may join the batch: the rules that are a worker's own setting, as gates.

    continuous   whenever there is room: every step, what has ended is gone and what waits joins; no gate at all
    static       when the batch has ended, up to a full one of what waits then; nobody joins until all of it has ended
    static-hold  the same, and rows that have ended are computed on to the end of the batch, as a padded batch does
    dynamic      as static, but a batch starts only when it is full, or a window after the first sequence began to wait

Continuous batching is how Weir serves; the others are what it is measured against. A dynamic batch runs to its end
like a static one, because that is what a server does that collects requests in front of a model which answers whole
batches; letting the window's sequences join a running batch would be continuous batching with a delay.
"""

from dataclasses import dataclass
from enum import Enum

from weir.policy.seams import BatchView, Gate, GateDecision

_NOBODY = GateDecision(())


class Batching(Enum):
    """The rules, as the drawing above names them."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    STATIC_HOLD = "static-hold"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """`window_s` is for dynamic batching alone."""

    batching: Batching = Batching.CONTINUOUS
    window_s: float = 0.05

    @property
    def holds_rows(self) -> bool:
        return self.batching is Batching.STATIC_HOLD


def make_gate(settings: JoinSettings) -> Gate | None:
    """None: whoever waits joins while there is room."""
    match settings.batching:
        case Batching.CONTINUOUS:
            return None
        case Batching.STATIC | Batching.STATIC_HOLD:
            return StaticGate()
        case Batching.DYNAMIC:
            return DynamicGate(settings.window_s)


class StaticGate:
    """Lets nobody join before the batch has ended."""

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        del now_s
        return _NOBODY if view.running else _first(view)

    @property
    def next_deadline_s(self) -> float | None:
        return None


class DynamicGate:
    """Lets nobody join before the batch has ended, and the next one is full or its window over.

    The window begins when the first of those that wait is seen, so it runs while a batch does.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._first_waits_since_s: float | None = None
        self._next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._next_deadline_s = None
        num_waiting = len(view.waiting)
        if num_waiting == 0:
            self._first_waits_since_s = None
            return _NOBODY
        if self._first_waits_since_s is None:
            self._first_waits_since_s = now_s
        if view.running:
            return _NOBODY
        ends_at_s = self._first_waits_since_s + self._window_s
        if num_waiting < view.max_running and now_s < ends_at_s:
            self._next_deadline_s = ends_at_s
            return _NOBODY
        if num_waiting > view.max_running:
            self._first_waits_since_s = now_s  # of those that are left over
        else:
            self._first_waits_since_s = None
        return _first(view)

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s


def _first(view: BatchView) -> GateDecision:
    return GateDecision(range(min(view.max_running, len(view.waiting))))
