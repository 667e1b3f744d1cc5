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

    arena_id: str
    num_pages: int
    loads: tuple[DecodeLoad, ...]

    @property
    def num_reserved_pages(self) -> int:
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

    worker: WorkerState
    memory: ArenaLoad


@dataclass(frozen=True, slots=True, eq=False)
class PrefillCandidate:
    """A worker that can read a prompt, and who of its host can go on from there; `is_local`: only itself."""

    worker: WorkerState
    decode: tuple[DecodeCandidate, ...]
    is_local: bool
    decode_workers: frozenset[str]
    """The worker ids of `decode`."""


Pool = tuple[PrefillCandidate, ...]


class WorkerPools:
    """By model and group."""

    def __init__(self, workers: Workers, reservations: Reservations) -> None:
        self._workers = workers
        self._reservations = reservations
        self._pools: dict[tuple[str, str], Pool] = {}
        self._arena_ids: dict[tuple[str, str], tuple[str, ...]] = {}
        self._decode_workers: dict[tuple[str, str], tuple[WorkerState, ...]] = {}
        self._num_changes = -1

    def pool(self, model: str, group: str) -> Pool:
        self._refresh()
        key = (model, group)
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= _MAX_POOLS:
                self._pools.clear()
                self._arena_ids.clear()
                self._decode_workers.clear()
            pool = self._pools[key] = self._make(model, group)
        return pool

    def decode_workers(self, model: str, group: str) -> tuple[WorkerState, ...]:
        """The workers that write answers, each once."""
        pool = self.pool(model, group)
        decode_workers = self._decode_workers.get((model, group))
        if decode_workers is None:
            by_id = {candidate.worker.worker_id: candidate.worker for one in pool for candidate in one.decode}
            decode_workers = self._decode_workers[model, group] = tuple(by_id.values())
        return decode_workers

    def arena_ids(self, model: str, group: str) -> tuple[str, ...]:
        """Of the workers that read prompts, each once."""
        pool = self.pool(model, group)
        ids = self._arena_ids.get((model, group))
        if ids is None:
            ids = self._arena_ids[model, group] = tuple({candidate.worker.arena_id: None for candidate in pool})
        return ids

    def _refresh(self) -> None:
        if self._num_changes != self._workers.num_changes:
            self._num_changes = self._workers.num_changes
            self._pools.clear()
            self._arena_ids.clear()
            self._decode_workers.clear()
            self._reservations.forget_idle(self._workers)

    def _make(self, model: str, group: str) -> Pool:
        split: list[PrefillCandidate] = []
        local: list[PrefillCandidate] = []
        for host in self._workers.hosts_of(model, group):
            candidates = tuple(self._decode_candidate(host, record) for record in host.decode)
            split += [
                _prefill_candidate(self._worker_state(record), candidates, is_local=False) for record in host.prefill
            ]
            local += [
                _prefill_candidate(candidate.worker, (candidate,), is_local=True)
                for candidate in candidates
                if candidate.worker.serves_locally
            ]
        return (*split, *local)

    def _worker_state(self, record: WorkerRecord) -> WorkerState:
        worker_id = record.worker_id
        return WorkerState(
            record, self._reservations.prefill_load(worker_id), self._reservations.decode_load(worker_id)
        )

    def _decode_candidate(self, host: HostView, record: WorkerRecord) -> DecodeCandidate:
        worker = self._worker_state(record)
        if record.num_own_pages:
            return DecodeCandidate(worker, ArenaLoad(record.worker_id, record.num_own_pages, (worker.decode,)))
        loads = tuple(self._reservations.decode_load(worker_id) for worker_id in host.all_decode_ids)
        return DecodeCandidate(worker, ArenaLoad(host.host_id, host.num_arena_pages, loads))


def _prefill_candidate(worker: WorkerState, decode: tuple[DecodeCandidate, ...], *, is_local: bool) -> PrefillCandidate:
    return PrefillCandidate(worker, decode, is_local, frozenset(candidate.worker.worker_id for candidate in decode))
