"""The workers that requests may be placed on, arranged for a placer; made anew when a worker comes, goes or changes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from weir.bus.messages import WorkerRecord
from weir.scheduling.accounting.reservations import DecodeLoad, Reservations
from weir.scheduling.workers.estimates import WorkerState
from weir.scheduling.workers.workers import HostView, Workers

_MAX_POOLS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ArenaLoad:
    """Pages that one or several decode workers book in."""

    memory_id: str
    num_pages: int
    loads: tuple[DecodeLoad, ...]

    @property
    def num_booked_pages(self) -> int:
        return sum(load.num_pages for load in self.loads)

    def pages_by_lane(self) -> Mapping[str, int]:
        """As they are charged."""
        if len(self.loads) == 1:
            return self.loads[0].pages_by_lane
        total: Counter[str] = Counter()
        for load in self.loads:
            total.update(load.pages_by_lane)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCandidate:
    """A worker that can write an answer, and where its pages are."""

    station: WorkerState
    memory: ArenaLoad


@dataclass(frozen=True, slots=True, eq=False)
class PrefillCandidate:
    """A worker that can read a prompt, and who of its host can go on from there; `is_local`: only itself."""

    station: WorkerState
    decode: tuple[DecodeCandidate, ...]
    is_local: bool
    writers: frozenset[str]
    """The worker ids of `decode`."""


Pool = tuple[PrefillCandidate, ...]


class WorkerPools:
    """By model and group."""

    def __init__(self, workers: Workers, book: Reservations) -> None:
        self._workers = workers
        self._book = book
        self._pools: dict[tuple[str, str], Pool] = {}
        self._memory_ids: dict[tuple[str, str], tuple[str, ...]] = {}
        self._writers: dict[tuple[str, str], tuple[WorkerState, ...]] = {}
        self._num_changes = -1

    def pool(self, model: str, group: str) -> Pool:
        self._refresh()
        key = (model, group)
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= _MAX_POOLS:
                self._pools.clear()
                self._memory_ids.clear()
                self._writers.clear()
            pool = self._pools[key] = self._make(model, group)
        return pool

    def writers(self, model: str, group: str) -> tuple[WorkerState, ...]:
        """The workers that write answers, each once."""
        pool = self.pool(model, group)
        writers = self._writers.get((model, group))
        if writers is None:
            by_id = {seat.station.worker_id: seat.station for one in pool for seat in one.decode}
            writers = self._writers[model, group] = tuple(by_id.values())
        return writers

    def memory_ids(self, model: str, group: str) -> tuple[str, ...]:
        """Of the workers that read prompts, each once."""
        pool = self.pool(model, group)
        ids = self._memory_ids.get((model, group))
        if ids is None:
            ids = self._memory_ids[model, group] = tuple({seat.station.memory_id: None for seat in pool})
        return ids

    def _refresh(self) -> None:
        if self._num_changes != self._workers.num_changes:
            self._num_changes = self._workers.num_changes
            self._pools.clear()
            self._memory_ids.clear()
            self._writers.clear()
            self._book.forget_idle(self._workers)

    def _make(self, model: str, group: str) -> Pool:
        split: list[PrefillCandidate] = []
        local: list[PrefillCandidate] = []
        for host in self._workers.hosts_of(model, group):
            seats = tuple(self._decode_seat(host, record) for record in host.decode)
            split += [_read_seat(self._station(record), seats, is_local=False) for record in host.prefill]
            local += [_read_seat(seat.station, (seat,), is_local=True) for seat in seats if seat.station.serves_locally]
        return (*split, *local)

    def _station(self, record: WorkerRecord) -> WorkerState:
        worker_id = record.worker_id
        return WorkerState(record, self._book.prefill_load(worker_id), self._book.decode_load(worker_id))

    def _decode_seat(self, host: HostView, record: WorkerRecord) -> DecodeCandidate:
        station = self._station(record)
        if record.num_own_pages:
            return DecodeCandidate(station, ArenaLoad(record.worker_id, record.num_own_pages, (station.decode,)))
        loads = tuple(self._book.decode_load(worker_id) for worker_id in host.all_decode_ids)
        return DecodeCandidate(station, ArenaLoad(host.host_id, host.num_arena_pages, loads))


def _read_seat(station: WorkerState, decode: tuple[DecodeCandidate, ...], *, is_local: bool) -> PrefillCandidate:
    return PrefillCandidate(station, decode, is_local, frozenset(seat.station.worker_id for seat in decode))
