"""How soon it makes sense to try again."""

from collections import deque

_WINDOW_S = 30.0
_MAX_FINISHES = 4096
_UNKNOWN_RETRY_MS = 1000
_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 30_000


class FinishRate:
    """Requests that ended lately, as a rate."""

    def __init__(self) -> None:
        self._finished_at_s: deque[float] = deque(maxlen=_MAX_FINISHES)

    def add(self, now_s: float) -> None:
        self._finished_at_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """0.0: not known."""
        while self._finished_at_s and self._finished_at_s[0] < now_s - _WINDOW_S:
            self._finished_at_s.popleft()
        if len(self._finished_at_s) < 2:
            return 0.0
        return len(self._finished_at_s) / max(now_s - self._finished_at_s[0], 0.001)

    def retry_after_ms(self, num_ahead: int, now_s: float) -> int:
        """When `num_ahead` requests will have ended, at the rate of the last 30 s; between 0.1 and 30 s."""
        rate = self.per_s(now_s)
        if rate == 0.0:
            return _UNKNOWN_RETRY_MS
        return int(min(max(1000 * num_ahead / rate, _MIN_RETRY_MS), _MAX_RETRY_MS))
