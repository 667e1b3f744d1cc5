"""Decode slots: how many requests may be booked on a worker, and who may be booked over that number."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Sequence
from math import ceil, inf
from operator import itemgetter

from weir.scheduling.accounting.reservations import Reservations
from weir.scheduling.workers.estimates import WorkerState
from weir.scheduling.workers.pools import WorkerPools
from weir.scheduling.workers.workers import Workers

PriorityKey = tuple[int, float]
"""(minus the lane's priority, rank inside the lane): who comes first among those on a worker."""
Bound = tuple[float, float]
"""Whoever's seat is before it gets a slot."""

ANYBODY: Bound = (inf, inf)
NOBODY: Bound = (-inf, -inf)
_MAX_POOLS = 1024
_BOUND = itemgetter(0)


def slot_bound(priorities: Sequence[PriorityKey], max_num_seqs: int, slot_overcommit: float) -> Bound:
    """Who gets a slot on a worker that computes `max_num_seqs` sequences, beside the sorted `priorities`.

    When all slots are booked, it takes one that outranks somebody there, who rests then; the number of those who may
    rest is bounded.
    """
    num_reserved = len(priorities)
    if num_reserved < max_num_seqs:
        return ANYBODY
    if num_reserved >= max_num_seqs + ceil(max_num_seqs * slot_overcommit):
        return NOBODY
    return priorities[max_num_seqs - 1]


class OpenSlots:
    """Of the workers of one pool."""

    def __init__(self, worker_states: Iterable[WorkerState], slot_overcommit: float, num_moves: int) -> None:
        """`num_moves`: of the book, now."""
        self._worker_states = {worker.worker_id: worker for worker in worker_states}
        self._slot_overcommit = slot_overcommit
        self._bounds: dict[str, Bound] = {}
        self._ascending: list[tuple[Bound, str]] = []
        self.num_moves = num_moves
        self.bound = NOBODY
        """The last of all: who is not before it has no slot anywhere."""
        for worker_id in self._worker_states:
            self.look_again(worker_id)

    def look_again(self, worker_id: str) -> None:
        """A slot of the worker was taken, or became free."""
        worker = self._worker_states.get(worker_id)
        if worker is None:
            return
        bound = slot_bound(worker.decode.ranks, worker.max_num_seqs, self._slot_overcommit)
        before = self._bounds.get(worker_id)
        if bound == before:
            return
        if before is not None:
            del self._ascending[bisect_left(self._ascending, (before, worker_id))]
        self._bounds[worker_id] = bound
        insort(self._ascending, (bound, worker_id))
        self.bound = self._ascending[-1][0]

    def is_open(self, worker_id: str, priority: PriorityKey) -> bool:
        return priority < self._bounds.get(worker_id, NOBODY)

    def open_to(self, priority: PriorityKey) -> Collection[str]:
        """The workers that have a slot for it."""
        first = bisect_right(self._ascending, priority, key=_BOUND)
        return {worker_id for _, worker_id in self._ascending[first:]}


class Vacancies:
    """The open slots of each model and group: kept from one question to the next, since all but a few workers are as
    they were."""

    def __init__(
        self, pools: WorkerPools, workers: Workers, reservations: Reservations, slot_overcommit: float
    ) -> None:
        self._pools = pools
        self._workers = workers
        self._reservations = reservations
        self._slot_overcommit = slot_overcommit
        self._slots: dict[tuple[str, str], OpenSlots] = {}
        self._num_changes = -1

    def of(self, model: str, group: str) -> OpenSlots:
        if self._num_changes != self._workers.num_changes:
            self._num_changes = self._workers.num_changes
            self._slots.clear()
        slots = self._slots.get((model, group))
        if slots is None:
            return self._make(model, group)
        if slots.num_moves == self._reservations.num_moves:
            return slots
        moved = self._reservations.try_moved_since(slots.num_moves)
        if moved is None:
            return self._make(model, group)
        for worker_id in moved:
            slots.look_again(worker_id)
        slots.num_moves = self._reservations.num_moves
        return slots

    def _make(self, model: str, group: str) -> OpenSlots:
        if len(self._slots) >= _MAX_POOLS:
            self._slots.clear()
        slots = OpenSlots(self._pools.decode_workers(model, group), self._slot_overcommit, self._reservations.num_moves)
        self._slots[model, group] = slots
        return slots
