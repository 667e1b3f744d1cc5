"""Requests that were cancelled, perhaps before this worker knew of them; bounded, and forgotten after a while."""

from collections import OrderedDict

from weir.core.attempt import Attempt
from weir.core.clock import Clock
from weir.engine.messages import SequenceKey


class CancelledRequests:
    """The newest cancelled attempt of each request: that one and older ones are not to be started."""

    def __init__(self, clock: Clock, *, ttl_s: float, max_entries: int) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: OrderedDict[str, tuple[Attempt, float]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: SequenceKey) -> None:
        attempt, _ = self._entries.pop(key.request_id, (key.attempt, 0.0))
        self._entries[key.request_id] = (max(attempt, key.attempt), self._clock.now_s() + self._ttl_s)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def covers(self, key: SequenceKey) -> bool:
        entry = self._entries.get(key.request_id)
        return entry is not None and key.attempt <= entry[0]

    def sweep(self) -> None:
        """Forgets what is old."""
        now_s = self._clock.now_s()
        while self._entries and next(iter(self._entries.values()))[1] <= now_s:
            self._entries.popitem(last=False)
