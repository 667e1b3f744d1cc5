"""Decode slots: how many requests may be placed on a worker, and which of them over that number."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping, Sequence
from math import ceil, inf
from operator import itemgetter

from weir.scheduling.accounting.reservations import Reservations
from weir.scheduling.request import PriorityKey
from weir.scheduling.workers.worker_state import WorkerState

Bound = tuple[float, float]
"""A request whose `PriorityKey` is smaller gets a slot."""

ANYBODY: Bound = (inf, inf)
NOBODY: Bound = (-inf, -inf)
_BOUND = itemgetter(0)


def slot_bound(priorities: Sequence[PriorityKey], max_num_seqs: int, slot_overcommit: float) -> Bound:
    """Which requests get a slot on a worker that computes `max_num_seqs` sequences, beside the sorted `priorities`.

    When all slots are taken, a request that goes before one of them gets one, and the last of them is paused
    meanwhile; `slot_overcommit` bounds how many may be paused.
    """
    num_reserved = len(priorities)
    if num_reserved < max_num_seqs:
        return ANYBODY
    if num_reserved >= max_num_seqs + ceil(max_num_seqs * slot_overcommit):
        return NOBODY
    return priorities[max_num_seqs - 1]


class OpenSlots:
    """The slots of the workers of one pool; from one `refresh` to the next all but a few workers are as they were."""

    def __init__(self, workers: Mapping[str, WorkerState], slot_overcommit: float, reservations: Reservations) -> None:
        self._workers = workers
        self._slot_overcommit = slot_overcommit
        self._reservations = reservations
        self._bounds: dict[str, Bound] = {}
        self._ascending: list[tuple[Bound, str]] = []
        self.bound = NOBODY
        """The greatest of all workers'."""
        self.num_moves = reservations.num_moves
        """Of the reservations that it is up to date with."""
        self._update(workers)

    def refresh(self) -> None:
        """After slots were taken or became free."""
        moved = self._reservations.try_moved_since(self.num_moves)
        self.num_moves = self._reservations.num_moves
        self._update(self._workers if moved is None else moved)

    def is_open(self, worker_id: str, priority: PriorityKey) -> bool:
        return priority < self._bounds.get(worker_id, NOBODY)

    def open_to(self, priority: PriorityKey) -> Collection[str]:
        """Ids of the workers that have a slot for it."""
        first = bisect_right(self._ascending, priority, key=_BOUND)
        return {worker_id for _, worker_id in self._ascending[first:]}

    def _update(self, worker_ids: Collection[str]) -> None:
        for worker_id in worker_ids:
            worker = self._workers.get(worker_id)
            if worker is None:
                continue
            bound = slot_bound(worker.decode.priorities, worker.max_num_seqs, self._slot_overcommit)
            before = self._bounds.get(worker_id)
            if bound == before:
                continue
            if before is not None:
                del self._ascending[bisect_left(self._ascending, (before, worker_id))]
            self._bounds[worker_id] = bound
            insort(self._ascending, (bound, worker_id))
        if self._ascending:
            self.bound = self._ascending[-1][0]
