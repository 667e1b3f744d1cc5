"""How soon it makes sense to try again."""

from collections import OrderedDict, deque

_WINDOW_S = 30.0
_MAX_FINISHES = 4096
_MIN_FINISHES = 20
_UNKNOWN_RETRY_MS = 1000
_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 30_000


class FinishRate:
    """Requests that ended lately, as a rate."""

    def __init__(self) -> None:
        self._finished_at_s: deque[float] = deque(maxlen=_MAX_FINISHES)
        self._num_backlogged = 0
        """Of the latest, those that ended while others waited."""

    def add(self, now_s: float, *, is_backlogged: bool) -> None:
        self._finished_at_s.append(now_s)
        self._num_backlogged = self._num_backlogged + 1 if is_backlogged else 0

    def per_s(self, now_s: float) -> float:
        """0.0: not known, by fewer than two."""
        return self._per_s(_MAX_FINISHES, 2, now_s)

    def backlogged_per_s(self, now_s: float) -> float:
        """Since somebody has been waiting all the time: without a backlog requests end as they come, which says
        nothing of how many could. 0.0: not known, by too few."""
        return self._per_s(self._num_backlogged, _MIN_FINISHES, now_s)

    def _per_s(self, num_latest: int, min_finishes: int, now_s: float) -> float:
        finished_at_s = self._finished_at_s
        while finished_at_s and finished_at_s[0] < now_s - _WINDOW_S:
            finished_at_s.popleft()
        num_finishes = min(num_latest, len(finished_at_s))
        if num_finishes < min_finishes:
            return 0.0
        return num_finishes / max(now_s - finished_at_s[-num_finishes], 0.001)


class Rates:
    """Of each model, of `max_models` at the most."""

    def __init__(self, max_models: int) -> None:
        self._max_models = max_models
        self._rates: OrderedDict[str, FinishRate] = OrderedDict()

    def add(self, model: str, now_s: float, *, is_backlogged: bool) -> None:
        """A request of the model ended; `is_backlogged`: others wait."""
        rate = self._rates.get(model)
        if rate is None:
            rate = self._rates[model] = FinishRate()
            if len(self._rates) > self._max_models:
                self._rates.popitem(last=False)
        self._rates.move_to_end(model)
        rate.add(now_s, is_backlogged=is_backlogged)

    def retry_after_ms(self, model: str, num_ahead: float, now_s: float) -> int:
        """When `num_ahead` requests will have ended, at the rate of the last 30 s; between 0.1 and 30 s."""
        rate = self._rates.get(model)
        per_s = rate.per_s(now_s) if rate else 0.0
        if per_s == 0.0:
            return _UNKNOWN_RETRY_MS
        return int(min(max(1000 * num_ahead / per_s, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def wait_s(self, model: str, num_ahead: int, now_s: float) -> float:
        """How long `num_ahead` requests take; 0.0: too few have ended since there is a backlog to say."""
        rate = self._rates.get(model)
        per_s = rate.backlogged_per_s(now_s) if rate else 0.0
        return num_ahead / per_s if per_s else 0.0
