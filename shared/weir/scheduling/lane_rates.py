"""How fast requests of each lane end while others of it wait: each that ends lets one in.

Ends, not grants: the first grants of a queue fill what was free, and say nothing of how long the next ones take.
Time in which nothing could be granted, as in an outage, is left out: it says nothing of the time after it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

_WINDOW_S = 60.0  # requests that began together end together: over a few of them only, it seems faster than it is
_MIN_ENDS, _MAX_ENDS = 4, 256
_MAX_OVERDUE = 4.0
"""How many times slower it counts at most, because the next end is overdue."""
_MIN_S = 1e-6
_REMEMBER_S = 900.0
"""What was measured this long ago still holds, until something newer is."""
_MAX_LANES = 1024


class LanePace(NamedTuple):
    """`s_per_request`: between two ends; `num_running`: of the lane's requests, meanwhile."""

    s_per_request: float
    num_running: int


class _Ends:
    """Of one lane and model, since somebody has been waiting all the time; and what was known before."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque(maxlen=_MAX_ENDS)
        self._num_running = 0
        self._known: LanePace | None = None
        self._known_at_s = 0.0
        self._last_end_at_s = 0.0
        self._still_s = 0.0
        """Left out of the times in `_at_s`, and of no other."""

    def stand_still(self, seconds: float) -> None:
        self._still_s += seconds

    def add(self, now_s: float, num_running: int, *, is_backlogged: bool) -> None:
        if not is_backlogged:
            self._at_s.clear()
            return
        self._at_s.append(now_s - self._still_s)
        self._last_end_at_s = now_s
        self._num_running = num_running
        self._look(now_s)

    def try_pace(self, now_s: float) -> LanePace | None:
        self._look(now_s)
        return self._known if now_s - self._known_at_s <= _REMEMBER_S else None

    def _look(self, now_s: float) -> None:
        at_s, now_s = self._at_s, now_s - self._still_s
        while at_s and at_s[0] < now_s - _WINDOW_S:
            at_s.popleft()
        if len(at_s) < _MIN_ENDS:
            return
        # From end to end, unless the next one is overdue: then it takes at least as long as it has.
        between_s = max((at_s[-1] - at_s[0]) / (len(at_s) - 1), _MIN_S)
        overdue_s = min((now_s - at_s[0]) / len(at_s), _MAX_OVERDUE * between_s)
        self._known = LanePace(max(between_s, overdue_s), self._num_running)
        self._known_at_s = self._last_end_at_s


class LaneRates:
    """By model and lane; the one in which nothing has ended for the longest time goes first."""

    def __init__(self) -> None:
        self._ends: OrderedDict[tuple[str, str], _Ends] = OrderedDict()

    def add(self, model: str, lane: str, num_running: int, now_s: float, *, is_backlogged: bool) -> None:
        """A request has ended beside so many of its lane; `is_backlogged`: others of it wait."""
        key = model, lane
        ends = self._ends.get(key)
        if ends is None:
            ends = self._ends[key] = _Ends()
            if len(self._ends) > _MAX_LANES:
                self._ends.popitem(last=False)
        self._ends.move_to_end(key)
        ends.add(now_s, num_running, is_backlogged=is_backlogged)

    def stand_still(self, seconds: float, is_still: Callable[[str], bool]) -> None:
        """For the seconds before now nothing of the models could be granted."""
        still = {model for model in {model for model, _ in self._ends} if is_still(model)}
        for (model, _), ends in self._ends.items():
            if model in still:
                ends.stand_still(seconds)

    def paces(self, now_s: float) -> dict[tuple[str, str], LanePace]:
        """(model, lane) -> how fast it goes when some wait, where that was seen within a quarter of an hour."""
        found = {key: ends.try_pace(now_s) for key, ends in self._ends.items()}
        return {key: pace for key, pace in found.items() if pace is not None}
