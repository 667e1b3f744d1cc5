"""Plans the moves of one round, from what each worker has now. Pure.

    a large request waits that fits nowhere, and all that is free together would hold it:
        one arena is emptied as far as it needs, the others take what is there
    else the worker with the least freeness gives to the one with the most, then the next two; where no room can be
        made, the arena that lacks least is left alone

It comes to rest: a pair's order never turns by a move, so that the largest load shrinks with each, and what was made
free for a request is not filled by balancing. What moves is of the least urgent lane that has somebody to move: the
pause falls on who minds it least, and where sequences have no slot these are the ones that wait.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from weir.scheduling.migrations import MAX_AT_A_TIME
from weir.scheduling.rebalancing.freeness import Loads, QueuedRequest, RunningSequence, SequenceMove, WorkerLoad
from weir.scheduling.routing.links import LinkCost

SequencesOf = Callable[[str], Sequence[RunningSequence]]
"""Of a worker. Asked for few workers: there may be thousands of sequences."""
LinkOf = Callable[[WorkerLoad, WorkerLoad], LinkCost | None]
"""From the one to the other; None: nothing passes."""


@dataclass(frozen=True, slots=True)
class RebalancingRules:
    """`gap`: a pair is uneven where one's load is so many times the other's, before a move is looked for. `gain`: what
    it saves is so many times what it costs. `least_steps`: what is about to end stays. Out of an arena, and
    into one, at most `max_moves` go in a round."""

    gap: float = 1.25
    gain: float = 2.0
    least_steps: float = 32.0
    max_pairs: int = 4
    max_moves: int = MAX_AT_A_TIME
    max_room_moves: int = MAX_AT_A_TIME
    max_arenas_tried: int = 4
    max_way_ms: float = 4000.0
    """Staging ends after eight seconds."""


DEFAULT_RULES = RebalancingRules()


def plan_moves(
    workers: Sequence[WorkerLoad],
    sequences_of: SequencesOf,
    link_of: LinkOf,
    queued: QueuedRequest | None = None,
    *,
    arrivals_a_s: float = 0.0,
    rules: RebalancingRules = DEFAULT_RULES,
) -> tuple[SequenceMove, ...]:
    """`workers` are of one pool: any may serve what another one has. `arrivals_a_s`: new ones that are placed there."""
    planner = _Planner(Loads(workers, arrivals_a_s), sequences_of, link_of, queued, rules)
    if queued is not None and not planner.holds_queued() and planner.could_hold_queued():
        return planner.make_room(queued) or planner.balance(kept_arena_id=planner.freest_for_queued())
    return planner.balance()


class _Planner:
    def __init__(
        self,
        loads: Loads,
        sequences_of: SequencesOf,
        link_of: LinkOf,
        queued: QueuedRequest | None,
        rules: RebalancingRules,
    ) -> None:
        self._workers = tuple(loads.workers.values())
        self._sequences_of = sequences_of
        self._link_of = link_of
        self._num_queued_pages = 0 if queued is None else queued.num_pages
        self._rules = rules
        self._loads = loads
        self._moves: list[SequenceMove] = []
        self._num_out_of, self._num_into = Counter[str](), Counter[str]()
        """Arenas, of moves between them that balance."""

    def holds_queued(self) -> bool:
        """Whether one arena has room for the request that waits."""
        return any(self._loads.free_pages(arena_id) >= self._num_queued_pages for arena_id in self._loads.pages)

    def could_hold_queued(self) -> bool:
        free = sum(max(0, self._loads.free_pages(arena_id)) for arena_id in self._loads.pages)
        largest = max(self._loads.pages.values(), default=0)
        return self._num_queued_pages <= min(free, largest)

    def freest_for_queued(self) -> str:
        """Of the arenas that are large enough for the request that waits, the one that lacks least."""
        free, needed = self._loads.free_pages, self._num_queued_pages
        fitting = (arena_id for arena_id, num_pages in self._loads.pages.items() if num_pages >= needed)
        return min(fitting, key=lambda arena_id: (-free(arena_id), arena_id))

    def balance(self, kept_arena_id: str = "") -> tuple[SequenceMove, ...]:
        """The most crowded and the least crowded worker, then the next two, as far as pairs are uneven.
        `kept_arena_id`: there a large request waits for what ends by itself."""
        loads = self._loads
        workers = [worker for worker in self._workers if worker.arena_id != kept_arena_id]
        ascending = sorted(workers, key=lambda worker: (loads.load(worker), worker.worker_id))
        first, last, num_pairs = 0, len(ascending) - 1, 0
        while first < last and num_pairs < self._rules.max_pairs:
            receiver, source = ascending[first], ascending[last]
            if loads.load(source) < self._rules.gap * loads.load(receiver) or not loads.num_seqs(source):
                break
            sequences = list(self._sequences_of(source.worker_id))
            for _ in range(self._rules.max_moves):
                if not self._try_balance(source, receiver, sequences):
                    break
            first, last, num_pairs = first + 1, last - 1, num_pairs + 1
        return tuple(self._moves)

    def _try_balance(self, source: WorkerLoad, receiver: WorkerLoad, sequences: list[RunningSequence]) -> bool:
        """Whether one more goes from the one to the other. It is taken out of `sequences` then."""
        loads, link = self._loads, self._link_of(source, receiver)
        num_begun = max(self._num_out_of[source.arena_id], self._num_into[receiver.arena_id])
        if num_begun >= self._rules.max_moves:
            return False
        if link is None or loads.load(source) < self._rules.gap * loads.load(receiver):
            return False
        best: tuple[int, float] | None = None
        chosen: RunningSequence | None = None
        for sequence in sequences:
            if best is not None and sequence.lane_priority > best[0]:
                continue
            if not self._may_even_out(sequence, source, receiver):
                continue
            won_ms = self._won_ms(sequence, source, receiver, link)
            key = sequence.lane_priority, -won_ms
            if won_ms > 0 and (best is None or key < best):
                best, chosen = key, sequence
        if chosen is None:
            return False
        if source.arena_id != receiver.arena_id:
            self._num_out_of[source.arena_id] += 1
            self._num_into[receiver.arena_id] += 1
        sequences.remove(chosen)
        self._move(chosen, source, receiver, "it is crowded")
        return True

    def _may_even_out(self, sequence: RunningSequence, source: WorkerLoad, receiver: WorkerLoad) -> bool:
        """It may go there, the receiver keeps the greater freeness, and whoever waits keeps a place."""
        loads, num_pages = self._loads, sequence.num_used_pages
        if sequence.is_pinned or sequence.num_steps_left < self._rules.least_steps:
            return False
        if not loads.has_room(sequence, receiver):
            return False
        is_near = source.arena_id == receiver.arena_id
        leaving, coming = (0, 0) if is_near else (-num_pages, num_pages)
        if loads.load(receiver, seqs=1, pages=coming) > loads.load(source, seqs=-1, pages=leaving):
            return False
        return is_near or self._keeps_place(sequence, source.arena_id, receiver.arena_id)

    def _keeps_place(self, sequence: RunningSequence, source_id: str, receiver_id: str) -> bool:
        needed = self._num_queued_pages
        if not needed or not self.holds_queued():
            return True
        changes = {source_id: sequence.num_used_pages, receiver_id: -sequence.num_used_pages}
        free = self._loads.free_pages
        return any(free(arena_id) + changes.get(arena_id, 0) >= needed for arena_id in self._loads.pages)

    def _won_ms(self, sequence: RunningSequence, source: WorkerLoad, receiver: WorkerLoad, link: LinkCost) -> float:
        """Over what it has to bring at least; not over 0: it stays."""
        price_ms = self._try_price_ms(sequence, source, receiver, link)
        if price_ms is None:
            return -inf
        return self._loads.saved_ms(sequence, source, receiver) - self._rules.gain * price_ms

    def _try_price_ms(
        self, sequence: RunningSequence, source: WorkerLoad, receiver: WorkerLoad, link: LinkCost
    ) -> float | None:
        price_ms = self._loads.price_ms(sequence, source, receiver, link)
        return None if price_ms > self._rules.max_way_ms else price_ms

    def make_room(self, queued: QueuedRequest) -> tuple[SequenceMove, ...]:
        """In the arena that lacks least; all of it, or nothing."""
        needed, before = queued.num_pages, self._loads
        arenas = [arena_id for arena_id, num_pages in self._loads.pages.items() if num_pages >= needed]
        arenas.sort(key=lambda arena_id: (-self._loads.free_pages(arena_id), arena_id))
        for arena_id in arenas[: self._rules.max_arenas_tried]:
            self._loads, self._moves = Loads(self._workers), []
            price_ms = self._try_empty(arena_id, queued)
            wait_ms = self._wait_ms(arena_id, needed, before)
            if price_ms is not None and wait_ms * queued.num_waiting > self._rules.gain * price_ms:
                return tuple(self._moves)
        self._loads, self._moves = before, []
        return ()

    def _try_empty(self, arena_id: str, queued: QueuedRequest) -> float | None:
        """What it costs until there is room. None: that cannot be. The fewest moves, of the least urgent first, and of
        nobody who is more urgent than who waits."""
        price_ms = 0.0
        found = [
            (sequence, worker)
            for worker in self._workers
            if worker.arena_id == arena_id
            for sequence in self._sequences_of(worker.worker_id)
            if not sequence.is_pinned and sequence.lane_priority <= queued.lane_priority
        ]
        for _ in range(self._rules.max_room_moves):
            missing = queued.num_pages - self._loads.free_pages(arena_id)
            if missing <= 0:
                break
            found.sort(key=lambda one: _emptying_key(one[0], missing))
            step_ms = self._try_send_away(found)
            if step_ms is None:
                return None
            price_ms += step_ms
        return price_ms if self._loads.free_pages(arena_id) >= queued.num_pages else None

    def _try_send_away(self, found: list[tuple[RunningSequence, WorkerLoad]]) -> float | None:
        """The first that somebody takes, and what that costs; it is taken out of `found`."""
        loads = self._loads
        for sequence, source in found:
            others = [worker for worker in self._workers if worker.arena_id != source.arena_id]
            others.sort(key=lambda worker: (loads.load(worker), worker.worker_id))
            for receiver in others:
                link = self._link_of(source, receiver)
                if link is None or not loads.has_room(sequence, receiver):
                    continue
                price_ms = self._try_price_ms(sequence, source, receiver, link)
                if price_ms is not None:
                    found.remove((sequence, source))
                    self._move(sequence, source, receiver, "a large request waits for its place")
                    return price_ms
        return None

    def _wait_ms(self, arena_id: str, needed: int, loads: Loads) -> float:
        """Until what runs there has ended as far as is needed, by what is expected."""
        missing, ending = needed - loads.free_pages(arena_id), list[tuple[float, int]]()
        for worker in self._workers:
            if worker.arena_id == arena_id:
                step_ms = loads.itl_ms(worker, loads.cost(worker))
                sequences = self._sequences_of(worker.worker_id)
                ending += [(step_ms * one.num_steps_left, one.num_used_pages) for one in sequences]
        for wait_ms, num_pages in sorted(ending):
            missing -= num_pages
            if missing <= 0:
                return wait_ms
        return inf

    def _move(self, sequence: RunningSequence, source: WorkerLoad, receiver: WorkerLoad, reason: str) -> None:
        self._loads.move(sequence, source, receiver)
        self._moves.append(SequenceMove(sequence.request_id, source.worker_id, receiver.worker_id, reason))


def _emptying_key(sequence: RunningSequence, missing: int) -> tuple[int, bool, int, str]:
    """The smallest that is enough, else the largest."""
    num_pages = sequence.num_used_pages
    is_short = num_pages < missing
    return sequence.lane_priority, is_short, -num_pages if is_short else num_pages, sequence.request_id
