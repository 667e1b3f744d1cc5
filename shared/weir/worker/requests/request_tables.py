"""What a worker remembers of requests, all of it bounded: the sequences that it has or had a moment ago, resumes that
came before their sequence, and cancelled attempts."""

from collections import OrderedDict

from weir.core.attempt import Attempt
from weir.core.clock import Clock
from weir.engine.messages import SequenceEnded, SequenceForgotten, SequenceKey
from weir.worker.requests.output_collector import OutputCollector


class SequenceTable:
    """One collector a request: that of its newest attempt. Those of ended sequences are retained for `retained_s`, at
    most `max_retained` of them."""

    def __init__(self, clock: Clock, *, retained_s: float, max_retained: int) -> None:
        self._clock = clock
        self._retained_s = retained_s
        self._max_retained = max_retained
        self._collectors: dict[str, OutputCollector] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # oldest end first

    @property
    def num_live(self) -> int:
        return len(self._collectors) - len(self._ended)

    def of_gateway(self, gateway_id: str) -> list[OutputCollector]:
        return [collector for collector in self._collectors.values() if collector.gateway_id == gateway_id]

    def find(self, request_id: str) -> OutputCollector | None:
        """The newest attempt's."""
        return self._collectors.get(request_id)

    def get(self, key: SequenceKey) -> OutputCollector | None:
        """None also for an attempt that a newer one has replaced."""
        collector = self._collectors.get(key.request_id)
        return collector if collector is not None and collector.key == key else None

    def open(self, collector: OutputCollector) -> None:
        """Replaces an older attempt's."""
        self.drop(collector.key.request_id)
        self._collectors[collector.key.request_id] = collector

    def drop(self, request_id: str) -> None:
        self._collectors.pop(request_id, None)
        self._ended.pop(request_id, None)

    def end(self, collector: OutputCollector, ending: SequenceEnded | SequenceForgotten) -> None:
        """From now on the collector is only retained."""
        collector.end(ending, self._clock.now_s())
        self._ended[collector.key.request_id] = None
        if len(self._ended) > self._max_retained:
            self.drop(next(iter(self._ended)))

    def sweep(self) -> None:
        """Forgets sequences that ended too long ago."""
        until_s = self._clock.now_s() - self._retained_s
        while self._ended and self._collectors[oldest := next(iter(self._ended))].ended_at_s <= until_s:
            self.drop(oldest)


class PendingResumes:
    """Resumes of sequences that a decode worker has yet to be handed; of too many, the oldest is forgotten."""

    def __init__(self, clock: Clock, *, ttl_s: float, max_entries: int) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: OrderedDict[SequenceKey, tuple[str, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: SequenceKey, gateway_id: str, next_index: int) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (gateway_id, next_index, self._clock.now_s() + self._ttl_s)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def try_take(self, key: SequenceKey, gateway_id: str) -> int | None:
        """The index that the gateway asked for, if it did."""
        entry = self._entries.pop(key, None)
        return entry[1] if entry is not None and entry[0] == gateway_id else None

    def drop_gateway(self, gateway_id: str) -> None:
        for key in [key for key, entry in self._entries.items() if entry[0] == gateway_id]:
            del self._entries[key]

    def take_expired(self) -> list[tuple[str, SequenceKey, int]]:
        """(gateway, sequence, index) of those that waited for too long."""
        now_s, expired = self._clock.now_s(), []
        while self._entries and next(iter(self._entries.values()))[2] <= now_s:
            key, (gateway_id, next_index, _) = self._entries.popitem(last=False)
            expired.append((gateway_id, key, next_index))
        return expired


class CancelledRequests:
    """The newest cancelled attempt of each request, for `ttl_s`: that one and older ones are not to be started, even if
    they come after the Cancel."""

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
