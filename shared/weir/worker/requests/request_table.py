"""The sequences of a worker as gateways see them: what is running, what has ended lately, what was asked for early."""

from collections import OrderedDict
from collections.abc import Iterator

from weir.core.clock import Clock
from weir.engine.messages import SequenceKey
from weir.worker.requests.output_collector import OutputCollector, SequenceEnd


class SequenceTable:
    """One delivery a request: that of its newest attempt. Ended ones are kept for `tail_s`, at most `max_tails`."""

    def __init__(self, clock: Clock, *, tail_s: float, max_tails: int) -> None:
        self._clock = clock
        self._tail_s = tail_s
        self._max_tails = max_tails
        self._collectors: dict[str, OutputCollector] = {}
        self._tails: OrderedDict[str, None] = OrderedDict()  # oldest end first

    @property
    def num_live(self) -> int:
        return len(self._collectors) - len(self._tails)

    def live(self) -> Iterator[OutputCollector]:
        return (collector for collector in self._collectors.values() if collector.ending is None)

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
        self._tails.pop(request_id, None)

    def end(self, collector: OutputCollector, ending: SequenceEnd) -> None:
        """From now on the delivery is a tail."""
        collector.end(ending, self._clock.now_s())
        self._tails[collector.key.request_id] = None
        if len(self._tails) > self._max_tails:
            self.drop(next(iter(self._tails)))

    def sweep(self) -> None:
        """Forgets tails that are old."""
        until_s = self._clock.now_s() - self._tail_s
        while self._tails and self._collectors[oldest := next(iter(self._tails))].ended_at_s <= until_s:
            self.drop(oldest)


class EarlyResumes:
    """Resumes of sequences that a decode worker has yet to be handed; bounded, the oldest are given up."""

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
