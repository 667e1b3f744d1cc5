"""The workers of one model and group as requests are placed on them; arranged anew when a worker comes or changes."""

from dataclasses import dataclass

from weir.bus.messages import WorkerRecord
from weir.scheduling.accounting.reservations import Reservations
from weir.scheduling.workers.slots import OpenSlots
from weir.scheduling.workers.worker_state import ArenaLoad, WorkerState
from weir.scheduling.workers.workers import HostView, Workers

_MAX_POOLS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class PrefillCandidate:
    """A worker that can prefill a request, and the workers that can decode it then."""

    worker: WorkerState
    decode_workers: tuple[WorkerState, ...]
    """Of its host; of a local candidate only itself."""
    is_local: bool
    """A decode worker that prefills beside what it decodes."""
    decode_ids: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Without candidates while no host can serve the model."""

    candidates: tuple[PrefillCandidate, ...]
    """Prefill workers first, local candidates last."""
    slots: OpenSlots
    arena_ids: tuple[str, ...]
    """Of the candidates, each once."""
    host_sizes: tuple[tuple[int, int], ...]
    """(pages, tokens of context) that one request can have on each host if nothing else runs."""
    num_pages: int
    """Of all arenas that its requests reserve in."""
    has_own_group: bool
    """These are workers that other lanes do not get."""

    @property
    def num_choices(self) -> int:
        """Workers that are compared: for the prefill, or for decoding on one host, whichever are more."""
        return max(len(self.candidates), len(self.candidates[0].decode_workers)) if self.candidates else 0

    def can_ever_hold(self, num_tokens: int, num_pages: int) -> bool:
        return any(num_pages <= pages and num_tokens <= tokens for pages, tokens in self.host_sizes)


class WorkerPools:
    """One `Pool` for each model and worker group, under one `slot_overcommit` of the limits."""

    def __init__(self, workers: Workers, reservations: Reservations, slot_overcommit: float) -> None:
        self._workers = workers
        self._reservations = reservations
        self._slot_overcommit = slot_overcommit
        self._pools: dict[tuple[str, str], Pool] = {}
        self._num_changes = -1

    def pool(self, model: str, group: str) -> Pool:
        """With the slots that are open now."""
        if self._num_changes != self._workers.num_changes:
            self._num_changes = self._workers.num_changes
            self._pools.clear()
            self._reservations.forget_idle(self._workers)
        pool = self._pools.get((model, group))
        if pool is None:
            if len(self._pools) >= _MAX_POOLS:
                self._pools.clear()
            pool = self._pools[model, group] = self._make(model, group)
        if pool.slots.num_moves != self._reservations.num_moves:
            pool.slots.refresh()
        return pool

    def _make(self, model: str, group: str) -> Pool:
        hosts = self._workers.hosts_of(model, group)
        split: list[PrefillCandidate] = []
        local: list[PrefillCandidate] = []
        for host in hosts:
            decode = tuple(self._worker_state(host, record) for record in host.decode)
            decode_ids = frozenset(worker.worker_id for worker in decode)
            split += [
                PrefillCandidate(self._worker_state(host, record), decode, False, decode_ids) for record in host.prefill
            ]
            local += [
                PrefillCandidate(worker, (worker,), True, frozenset({worker.worker_id}))
                for worker in decode
                if worker.record.serves_locally
            ]
        candidates = (*split, *local)
        own_pages = {record.worker_id: record.num_own_pages for host in hosts for record in host.decode}
        decode_workers = {worker.worker_id: worker for one in candidates for worker in one.decode_workers}
        return Pool(
            candidates,
            OpenSlots(decode_workers, self._slot_overcommit, self._reservations),
            tuple({candidate.worker.arena.arena_id: None for candidate in candidates}),
            tuple((host.num_arena_pages, host.max_context_tokens) for host in hosts),
            sum(own_pages.values()) or sum(host.num_arena_pages for host in hosts),
            has_own_group=bool(group) and hosts is not self._workers.hosts_of(model),
        )

    def _worker_state(self, host: HostView, record: WorkerRecord) -> WorkerState:
        worker_id = record.worker_id
        prefill, decode = self._reservations.prefill_load(worker_id), self._reservations.decode_load(worker_id)
        if record.num_own_pages:
            arena = ArenaLoad(worker_id, record.num_own_pages, (decode,))
        else:
            loads = tuple(self._reservations.decode_load(other_id) for other_id in host.all_decode_ids)
            arena = ArenaLoad(host.host_id, host.num_arena_pages, loads)
        return WorkerState(record, prefill, decode, arena)
