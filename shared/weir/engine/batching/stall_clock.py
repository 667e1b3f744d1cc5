"""When a sequence has waited too long for a page or slot: not while nobody says whether one is free."""

from collections.abc import Iterable

from weir.engine.sequence import Sequence

MAX_SILENCE_S = 120.0
"""An arena that is silent for longer is not coming back in time: waiting counts again."""


class StallClock:
    """Stands still while the arena leaves demand without any answer, for at most `MAX_SILENCE_S` at a time. A refusal
    is an answer: the arena is full, and waiting for it counts."""

    def __init__(self, max_stall_s: float) -> None:
        self._max_stall_s = max_stall_s
        self._silent_since_s: float | None = None

    def stop(self, now_s: float) -> None:
        """The arena does not answer."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s

    def go_on(self, sequences: Iterable[Sequence], now_s: float) -> None:
        """The arena has answered: the time since `stop` counts for nobody."""
        for sequence in sequences:
            if sequence.stalled_since_s is not None:
                sequence.stalled_since_s += self._stood_still_s(sequence.stalled_since_s, now_s)
        self._silent_since_s = None

    @property
    def is_stopped(self) -> bool:
        return self._silent_since_s is not None

    def is_overdue(self, stalled_since_s: float, now_s: float) -> bool:
        return stalled_since_s + self._stood_still_s(stalled_since_s, now_s) <= now_s - self._max_stall_s

    def overdue_at_s(self, stalled_since_s: float) -> float:
        """Of one that goes on waiting, and an arena that stays as it is."""
        silent_since_s, at_s = self._silent_since_s, stalled_since_s + self._max_stall_s
        if silent_since_s is None or at_s <= silent_since_s:
            return at_s
        return at_s + self._stood_still_s(stalled_since_s, silent_since_s + MAX_SILENCE_S)

    def _stood_still_s(self, stalled_since_s: float, now_s: float) -> float:
        if self._silent_since_s is None:
            return 0.0
        ended_at_s = min(now_s, self._silent_since_s + MAX_SILENCE_S)
        return max(0.0, ended_at_s - max(stalled_since_s, self._silent_since_s))
