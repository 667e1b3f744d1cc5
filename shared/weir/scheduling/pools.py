"""The workers of one model and group as requests are placed on them, arranged anew when a worker comes or changes.

Of each: what is reserved on it and in its arena, how long a request would take there, and whether it has a decode slot
for it.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from operator import itemgetter

from weir.bus.messages import WorkerRecord
from weir.core.cost import StepCost
from weir.scheduling.request import PriorityKey
from weir.scheduling.reservations import DecodeLoad, PrefillLoad, Reservations
from weir.scheduling.workers import HostView, Workers

UNKNOWN_COST = StepCost(5.0, 0.5, 0.0, 0.05, 0.0001)
"""Of a worker that has not measured its own: it orders workers by load, and is trusted for nothing else."""
_UNKNOWN_STEP_TOKENS = 512
_MAX_POOLS = 1024
_MAX_LOOKED_UP = 4
"""Of more open workers it is no dearer to look at all candidates."""

Bound = tuple[float, float]
"""A request whose `PriorityKey` is smaller gets a slot."""

ANYBODY: Bound = (inf, inf)
NOBODY: Bound = (-inf, -inf)
_BOUND = itemgetter(0)


@dataclass(frozen=True, slots=True, eq=False)
class ArenaLoad:
    """Pages of one arena, and what decode workers have reserved in it."""

    arena_id: str
    """The host's, or the worker's if it has memory of its own."""
    num_pages: int
    loads: tuple[DecodeLoad, ...]
    prefill_loads: tuple[PrefillLoad, ...] = ()

    @property
    def num_leaving_pages(self) -> int:
        """Of prompts that are computed here for other hosts."""
        return sum(load.num_leaving_pages for load in self.prefill_loads)

    @property
    def num_arriving_pages(self) -> int:
        """Of prompts that other hosts compute; they are reserved by their requests already."""
        return sum(load.num_arriving_pages for load in self.loads)

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


class WorkerState:
    """A worker as placement sees it. The sums are those of `StepCost`, written out: a decision makes dozens of them."""

    __slots__ = (
        "_base_ms",
        "_context_ms",
        "_pair_ms",
        "_sequence_ms",
        "_token_ms",
        "arena",
        "decode",
        "is_measured",
        "max_context_tokens",
        "max_num_seqs",
        "prefill",
        "record",
        "step_tokens",
        "worker_id",
    )

    def __init__(self, record: WorkerRecord, prefill: PrefillLoad, decode: DecodeLoad, arena: ArenaLoad) -> None:
        self.record = record
        self.worker_id = record.worker_id
        self.step_tokens = record.max_num_batched_tokens or _UNKNOWN_STEP_TOKENS
        self.max_num_seqs = record.max_num_seqs
        self.max_context_tokens = record.max_context_tokens
        self.is_measured = record.cost is not None
        self.prefill = prefill
        self.decode = decode
        self.arena = arena
        cost = record.cost or UNKNOWN_COST
        self._base_ms = cost.base_ms
        self._token_ms = cost.prefill_token_ms
        self._pair_ms = cost.prefill_pair_ms
        self._sequence_ms = cost.decode_sequence_ms
        self._context_ms = cost.context_token_ms

    def itl_ms(self, num_prompt_tokens: int) -> float:
        """Between two tokens, with one more sequence of this prompt."""
        load = self.decode
        return (
            self._base_ms
            + self._sequence_ms * (len(load.priorities) + 1)
            + self._context_ms * (load.num_context_tokens + num_prompt_tokens)
        )

    @property
    def busy_itl_ms(self) -> float:
        """Of it, what is for the sequences that it has."""
        load = self.decode
        return self._sequence_ms * len(load.priorities) + self._context_ms * load.num_context_tokens

    def prefill_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt by itself on a worker that does nothing else."""
        num_steps = -(-num_uncached_tokens // self.step_tokens)
        pairs_ms = self._pair_ms * (num_cached_tokens + num_uncached_tokens / 2)
        return num_steps * self._base_ms + num_uncached_tokens * (self._token_ms + pairs_ms)

    def prefill_beside_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt on a worker that decodes its reservations meanwhile."""
        load = self.decode
        num_running = len(load.priorities)
        num_steps = -(-num_uncached_tokens // max(self.step_tokens - num_running, 1))
        step_ms = self._base_ms + self._sequence_ms * num_running + self._context_ms * load.num_context_tokens
        pairs_ms = self._pair_ms * (num_cached_tokens + num_uncached_tokens / 2)
        return num_steps * step_ms + num_uncached_tokens * (self._token_ms + pairs_ms)


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

    def num_open_to(self, priority: PriorityKey) -> int:
        """How many workers have a slot for it."""
        return len(self._ascending) - bisect_right(self._ascending, priority, key=_BOUND)

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


@dataclass(frozen=True, slots=True, eq=False)
class PrefillCandidate:
    """A worker that can prefill a request, and the workers that can decode it then."""

    worker: WorkerState
    decode_workers: tuple[WorkerState, ...]
    """Of its host; of a local candidate only itself."""
    is_local: bool
    """A decode worker that prefills beside what it decodes."""
    decode_ids: frozenset[str]
    is_last_resort: bool = False
    """It is not to prefill, and does where no other host can for it, or where hardly anything is left to compute."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Without candidates while no host can serve the model."""

    candidates: tuple[PrefillCandidate, ...]
    """Prefill workers first, local candidates last."""
    senders: tuple[PrefillCandidate, ...]
    """Prefill workers with the decode workers of all hosts that prompts can cross to; none where they do not."""
    receiver_places: Mapping[str, int]
    """Of the decode workers that prompts can cross to, among those."""
    slots: OpenSlots
    arena_ids: frozenset[str]
    """Of the candidates."""
    places: Mapping[str, Sequence[int]]
    """Of the candidates of each arena, among all."""
    decode_places: Mapping[str, Sequence[int]]
    """Of the candidates that each decode worker can decode for, among all."""
    pages_addresses: Mapping[str, str]
    """Where other hosts get the pages of an arena, by its id: also of arenas whose workers take no requests now."""
    exchanging: frozenset[str]
    """Their arenas."""
    host_sizes: tuple[tuple[int, int], ...]
    """(pages, tokens of context) that one request can have on a host if nothing else runs: each that there is, once."""
    num_pages: int
    """Of all arenas that its requests reserve in."""
    num_choices: int
    """Workers that are compared: for the prefill, or for decoding on one host, whichever are more."""
    has_own_group: bool
    """These are workers that other lanes do not get."""

    def has_slot(self, priority: PriorityKey) -> bool:
        """The quickest of all questions, and when workers are busy the answer is mostly no."""
        return priority < self.slots.bound

    def try_sampled_places(self, priority: PriorityKey, small_pool: int) -> Sequence[int] | None:
        """Of the candidates that a sample is taken of: all, or those whose requests one of a few open workers can
        decode. None: of these, or of all, there are so few that they are compared."""
        if self.num_choices <= small_pool:
            return None
        if self.slots.num_open_to(priority) > small_pool:
            return range(len(self.candidates))
        places = set[int]().union(*(self.decode_places[one] for one in self.slots.open_to(priority)))
        return sorted(places) if len(places) > small_pool else None

    def open_candidates(self, open_ids: Collection[str]) -> Sequence[PrefillCandidate]:
        """Those whose requests one of these workers can decode, in their order; others too, where these are many."""
        if len(open_ids) > _MAX_LOOKED_UP:
            return self.candidates
        places = {place for worker_id in open_ids for place in self.decode_places[worker_id]}
        return [self.candidates[place] for place in sorted(places)]

    def open_receivers(self, open_ids: Collection[str]) -> Sequence[WorkerState]:
        """Those of these that prompts can cross to, in the order of `senders`, of which there are some."""
        receivers, places = self.senders[0].decode_workers, self.receiver_places
        return [receivers[place] for place in sorted(places[one] for one in open_ids if one in places)]

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
        hosts, computing = self._workers.views_of(model, group)
        split: list[PrefillCandidate] = []
        local: list[PrefillCandidate] = []
        prefill: list[WorkerState] = []
        for host in hosts:
            decode = tuple(self._worker_state(host, record) for record in host.decode)
            decode_ids = frozenset(worker.worker_id for worker in decode)
            own = [self._worker_state(host, record) for record in host.prefill]
            prefill += own
            split += [PrefillCandidate(worker, decode, False, decode_ids) for worker in own]
            local += [
                PrefillCandidate(
                    worker, (worker,), True, frozenset({worker.worker_id}), not worker.record.serves_locally
                )
                for worker in decode
                if worker.record.serves_locally or not own
            ]
        prefill += [self._worker_state(host, record) for host in computing for record in host.prefill]
        candidates = (*split, *local)
        places = _places((one.worker.arena.arena_id,) for one in candidates)
        own_pages = {record.worker_id: record.num_own_pages for host in hosts for record in host.decode}
        decode_workers = {worker.worker_id: worker for one in candidates for worker in one.decode_workers}
        addresses = self._workers.pages_addresses(model)
        senders = self._senders(prefill, tuple(decode_workers.values()), addresses)
        receivers = senders[0].decode_workers if senders else ()
        return Pool(
            candidates,
            senders,
            {worker.worker_id: place for place, worker in enumerate(receivers)},
            OpenSlots(decode_workers, self._slot_overcommit, self._reservations),
            frozenset(places),
            places,
            _places(one.decode_ids for one in candidates),
            addresses,
            frozenset(addresses),
            tuple({(host.num_arena_pages, host.max_context_tokens): None for host in hosts}),
            sum(own_pages.values()) or sum(host.num_arena_pages for host in hosts),
            max(len(candidates), len(candidates[0].decode_workers)) if candidates else 0,
            has_own_group=bool(group) and hosts is not self._workers.hosts_of(model),
        )

    def _senders(
        self, prefill: Sequence[WorkerState], decode: Sequence[WorkerState], addresses: Mapping[str, str]
    ) -> tuple[PrefillCandidate, ...]:
        receivers = tuple(worker for worker in decode if worker.record.pages_address)
        ids = frozenset(worker.worker_id for worker in receivers)
        if len(addresses) < 2 or not self._workers.prompts_cross:
            return ()
        return tuple(PrefillCandidate(one, receivers, False, ids) for one in prefill if one.record.pages_address)

    def _worker_state(self, host: HostView, record: WorkerRecord) -> WorkerState:
        worker_id = record.worker_id
        prefill, decode = self._reservations.prefill_load(worker_id), self._reservations.decode_load(worker_id)
        if record.num_own_pages:
            arena = ArenaLoad(worker_id, record.num_own_pages, (decode,))
        else:
            arena = self._host_arena(host)
        return WorkerState(record, prefill, decode, arena)

    def _host_arena(self, host: HostView) -> ArenaLoad:
        loads = tuple(self._reservations.decode_load(worker_id) for worker_id in host.all_decode_ids)
        prefill_loads = tuple(self._reservations.prefill_load(worker_id) for worker_id in host.all_prefill_ids)
        return ArenaLoad(host.host_id, host.num_arena_pages, loads, prefill_loads)


def _places(keys: Iterable[Iterable[str]]) -> Mapping[str, Sequence[int]]:
    """key -> which of these have it, ascending."""
    places: dict[str, list[int]] = {}
    for place, own in enumerate(keys):
        for key in own:
            places.setdefault(key, []).append(place)
    return places
