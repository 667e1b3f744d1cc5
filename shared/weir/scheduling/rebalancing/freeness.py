"""How much more each decode worker could take, and what it brings and costs that a sequence goes on at another one.

    freeness = what is free / what is used, of pages or of slots, whichever is less: by what part the batch could grow

That is the freeness of Llumnix (Sun et al., OSDI 2024, arXiv 2406.03243) for workers of different sizes: there it is
free blocks over the batch. Pure, of one moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from weir.core.cost import StepCost
from weir.kv.geometry import PAGE_TOKENS
from weir.scheduling.pools import UNKNOWN_COST
from weir.scheduling.routing.links import LinkCost

RECOMPUTED_TOKENS = 16
"""That a sequence has behind its last full page, and that are computed again where it goes on; at most."""
TIGHT = 0.9
"""So much of its pages in use, an arena that promises more than it has is about to preempt somebody."""
_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One decode worker that takes requests, with the arena that it shares with others or has alone."""

    worker_id: str
    arena_id: str
    num_pages: int
    """Of the arena, that may be used: less what its memory fit keeps free."""
    num_used_pages: int
    """Of the arena, as its memory fit counts: reserved for the worst case, or held now; with what is leaving it."""
    num_seqs: int
    max_num_seqs: int
    num_context_tokens: int
    max_context_tokens: int
    cost: StepCost | None
    """None: not measured yet."""
    page_bytes: int
    preempts: bool = False
    """Whether more can come to use pages than there are."""


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """One on a decode worker. `num_steps_left`: that it is expected to run on. `num_room_pages`: what has to be free
    where it goes. `is_pinned`: it stays, whatever for: its prompt is being read, it is on its way, it came lately."""

    request_id: str
    lane_priority: int
    num_tokens: int
    num_steps_left: float
    num_used_pages: int
    num_room_pages: int
    max_tokens: int
    """Of prompt and output."""
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """The next one of the queue. `num_waiting`: it and those that wait behind it, which do not overtake."""

    num_pages: int
    lane_priority: int
    num_waiting: int = 1


class SequenceMove(NamedTuple):
    request_id: str
    source_id: str
    receiver_id: str
    reason: str


class Loads:
    """Of all workers, as they are after the moves so far. Room is what is free before they have left."""

    def __init__(self, workers: Sequence[WorkerLoad], arrivals_a_s: float = 0.0) -> None:
        """`arrivals_a_s`: requests that are placed on them."""
        self._arrivals_a_s = arrivals_a_s
        self._free_slots = {worker.worker_id: worker.max_num_seqs - worker.num_seqs for worker in workers}
        self._room_pages = {worker.arena_id: worker.num_pages - worker.num_used_pages for worker in workers}
        self.workers = {worker.worker_id: worker for worker in workers}
        self.used_pages = {worker.arena_id: worker.num_used_pages for worker in workers}
        self.pages = {worker.arena_id: worker.num_pages for worker in workers}
        self._num_seqs = {worker.worker_id: worker.num_seqs for worker in workers}
        self._context = {worker.worker_id: worker.num_context_tokens for worker in workers}

    def num_seqs(self, worker: WorkerLoad) -> int:
        return self._num_seqs[worker.worker_id]

    def free_pages(self, arena_id: str) -> int:
        return self.pages[arena_id] - self.used_pages[arena_id]

    def load(self, worker: WorkerLoad, *, seqs: int = 0, pages: int = 0) -> float:
        """What is used of what there is, with so many more. The smaller, the more freeness: 1 / load - 1."""
        num_pages, num_used = self.pages[worker.arena_id], self.used_pages[worker.arena_id] + pages
        return max(num_used / max(1, num_pages), (self._num_seqs[worker.worker_id] + seqs) / worker.max_num_seqs)

    def freeness(self, worker: WorkerLoad) -> float:
        load = self.load(worker)
        return inf if load <= 0 else 1 / load - 1

    def cost(self, worker: WorkerLoad, other: WorkerLoad | None = None) -> StepCost:
        """As measured; else it is taken to be as quick as the other one of a pair; else as nobody has measured."""
        return worker.cost or (other and other.cost) or UNKNOWN_COST

    def itl_ms(self, worker: WorkerLoad, cost: StepCost) -> float:
        return cost.step_ms((), self._num_seqs[worker.worker_id], self._context[worker.worker_id])

    def is_tight(self, worker: WorkerLoad) -> bool:
        return worker.preempts and self.used_pages[worker.arena_id] >= TIGHT * self.pages[worker.arena_id]

    def has_room(self, sequence: RunningSequence, receiver: WorkerLoad) -> bool:
        """For all that it may come to, in a slot that is free; beside what it has, where that is in the same arena."""
        return (
            sequence.max_tokens <= receiver.max_context_tokens
            and self._free_slots[receiver.worker_id] > 0
            and sequence.num_room_pages <= self._room_pages[receiver.arena_id]
        )

    def move(self, sequence: RunningSequence, source: WorkerLoad, receiver: WorkerLoad) -> None:
        self._free_slots[receiver.worker_id] -= 1
        self._room_pages[receiver.arena_id] -= sequence.num_room_pages
        for worker, sign in ((source, -1), (receiver, 1)):
            self._num_seqs[worker.worker_id] += sign
            self._context[worker.worker_id] += sign * sequence.num_tokens
            self.used_pages[worker.arena_id] += sign * sequence.num_used_pages

    def saved_ms(self, sequence: RunningSequence, source: WorkerLoad, receiver: WorkerLoad) -> float:
        """Summed over all sequences of both workers: quicker steps, as long as this one runs, or until new requests,
        which go to the freer worker, have evened them out by themselves; the wait of those that have no slot; and what
        would be computed again of a sequence that is preempted."""
        cost, receiver_cost = self.cost(source, receiver), self.cost(receiver, source)
        num_source, num_receiver = self._num_seqs[source.worker_id], self._num_seqs[receiver.worker_id]
        eased_ms = cost.decode_sequence_ms + cost.context_token_ms * sequence.num_tokens
        added_ms = receiver_cost.decode_sequence_ms + receiver_cost.context_token_ms * sequence.num_tokens
        own_ms = self.itl_ms(source, cost) - self.itl_ms(receiver, receiver_cost) - added_ms
        step_ms, num_steps = self.itl_ms(source, cost), sequence.num_steps_left
        if self._arrivals_a_s > 0 and step_ms > 0:
            evened_out_ms = 1000 * max(1, num_source - num_receiver) / self._arrivals_a_s
            num_steps = min(num_steps, evened_out_ms / step_ms)
        saved_ms = ((num_source - 1) * eased_ms - num_receiver * added_ms + own_ms) * num_steps
        if num_source > source.max_num_seqs:
            saved_ms += step_ms * num_steps
        if self.is_tight(source):
            saved_ms += cost.prefill_ms(sequence.num_tokens, 0, _CHUNK_TOKENS)
        return saved_ms

    def price_ms(self, sequence: RunningSequence, source: WorkerLoad, receiver: WorkerLoad, link: LinkCost) -> float:
        """Summed likewise: its pause, a chunk of prefill that the receiver's sequences wait for; and its way, as though
        one sequence waited for that: it takes cores and a link from others."""
        receiver_cost = self.cost(receiver, source)
        chunk_ms = receiver_cost.prefill_token_ms * RECOMPUTED_TOKENS
        pause_ms = link.round_trip_ms + self.itl_ms(receiver, receiver_cost) + chunk_ms
        way_ms = 0.0
        if source.arena_id != receiver.arena_id:
            way_ms = link.transfer_ms(source.page_bytes / PAGE_TOKENS * sequence.num_tokens)
        return pause_ms + chunk_ms * self._num_seqs[receiver.worker_id] + way_ms
