"""Rebalances decode workers: looks at all of them each second, plans a round, and has `Migrations` do it.

Room is booked where a sequence goes before its gateway is asked, by the same test that a new request has to pass; so
nothing is promised twice, and lanes keep what is guaranteed to them. Tenants are not concerned: what moves is in flight
already.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from weir.bus.messages import Submit
from weir.kv.geometry import num_pages_for
from weir.scheduling.commands import CommandQueue
from weir.scheduling.limits import CoreLimits
from weir.scheduling.migrations import Migrations
from weir.scheduling.placer import Placer
from weir.scheduling.pools import ArenaLoad, Pool, WorkerState
from weir.scheduling.rebalancing.freeness import Loads, QueuedRequest, RunningSequence, SequenceMove, WorkerLoad
from weir.scheduling.rebalancing.plan import plan_moves
from weir.scheduling.request import ScheduledRequest
from weir.scheduling.request_table import RequestTable
from weir.scheduling.routing.links import LinkCost
from weir.scheduling.workers import Workers

PERIOD_S = 1.0
_STAYS_S = 30.0
"""Whoever was moved, or was to be, stays for so long."""
_RATE_HALF_LIFE_S = 3.0
_MAX_WAITING = 16
"""Of those behind a large request, that count."""
_SHOWN_S = 3.0
"""After a round."""
_MOST_FREENESS = 1000.0
"""Shown of a worker that has nothing to do."""


class Rebalancer:
    """Plans for one pool after the other. What it chooses is on its way or there before it is looked at again."""

    def __init__(
        self, requests: RequestTable, workers: Workers, migrations: Migrations, commands: CommandQueue
    ) -> None:
        self._requests = requests
        self._workers = workers
        self._migrations = migrations
        self._counts = commands.counts
        self._next_at_s = 0.0
        self._staying: dict[str, float] = {}
        """By request, until when. As many as were begun in that time."""
        self._arrivals_a_s, self._num_granted, self._looked_at_s = 0.0, 0, -inf
        """Grants of late, of all pools."""
        self._freeness: tuple[float, float] | None = None
        """Of the most and of the least crowded worker, as of `_looked_at_s`."""

    def set_limits(self, limits: CoreLimits, placer: Placer) -> None:
        self._is_on = limits.rebalances and limits.placing.crossing != "nothing"
        self._groups = {lane.worker_group for lane in limits.lanes} | {""}
        self._granted_names = tuple(f"granted_{lane.name}" for lane in limits.lanes)
        self._placer = placer

    def plan(self, now_s: float) -> None:
        """Begins a round, if it is time."""
        if now_s < self._next_at_s or not self._is_on:
            return
        self._next_at_s = now_s + PERIOD_S
        self._count_arrivals(now_s)
        self._staying = {request_id: until_s for request_id, until_s in self._staying.items() if until_s > now_s}
        freeness = list[float]()
        for pool, group in self._pools():
            busy = self._migrations.busy_arenas()
            workers = {worker.worker_id: worker for one in pool.candidates for worker in one.decode_workers}
            arenas = {worker.arena.arena_id: worker.arena for worker in workers.values()}
            used = {arena_id: self._placer.memory_fit.used_pages(arena, now_s) for arena_id, arena in arenas.items()}
            loads = {worker_id: self._load(one, used[one.arena.arena_id]) for worker_id, one in workers.items()}
            seen = Loads(tuple(loads.values()))
            freeness += [min(_MOST_FREENESS, seen.freeness(load)) for load in loads.values()]
            free = [load for load in loads.values() if load.arena_id not in busy]
            self._round(pool, group, workers, free, now_s)
        self._freeness = (min(freeness), max(freeness)) if freeness else None

    def metrics(self, now_s: float) -> dict[str, float]:
        """None of workers that nobody has looked at of late."""
        if not self._is_on or self._freeness is None or now_s - self._looked_at_s > _SHOWN_S:
            return {}
        return {"freeness_min": self._freeness[0], "freeness_max": self._freeness[1]}

    def _count_arrivals(self, now_s: float) -> None:
        num_granted, before_s = sum(self._counts[name] for name in self._granted_names), self._looked_at_s
        if before_s > -inf:
            part = 0.5 ** ((now_s - before_s) / _RATE_HALF_LIFE_S)
            rate_a_s = max(0, num_granted - self._num_granted) / (now_s - before_s)
            self._arrivals_a_s = part * self._arrivals_a_s + (1 - part) * rate_a_s
        self._num_granted, self._looked_at_s = num_granted, now_s

    def _pools(self) -> Iterator[tuple[Pool, str]]:
        """Those with workers; what runs where there is one alone has nowhere to go, and is shown."""
        models = sorted({record.model for record in self._workers.records()})
        for model in models:
            for group in sorted(self._groups):
                pool = self._placer.pools.pool(model, group)
                if (pool.has_own_group or not group) and pool.candidates:
                    yield pool, group

    def _round(
        self, pool: Pool, group: str, workers: dict[str, WorkerState], loads: Sequence[WorkerLoad], now_s: float
    ) -> None:
        if len(loads) < 2:
            return
        model = next(iter(workers.values())).record.model
        # A round that makes room is waited for: another one would make the same room elsewhere.
        is_alone = len(loads) == len(workers)
        queued = self._try_queued(model, group, now_s) if is_alone else None

        def sequences_of(worker_id: str) -> list[RunningSequence]:
            found = self._requests.reservations.requests_on(worker_id)
            own = (one for one in found if one.placement and one.placement.decode_worker_id == worker_id)
            return [self._sequence(one, now_s) for one in own]

        def link_of(source: WorkerLoad, receiver: WorkerLoad) -> LinkCost | None:
            return self._try_link(workers[source.worker_id], workers[receiver.worker_id], now_s)

        for move in plan_moves(loads, sequences_of, link_of, queued, arrivals_a_s=self._arrivals_a_s):
            self._begin(move, workers[move.receiver_id], now_s)

    def _begin(self, move: SequenceMove, receiver: WorkerState, now_s: float) -> None:
        request = self._requests.try_get(move.request_id)
        if request is None:
            return
        as_prompt = _as_prompt(request)

        def has_room(arena: ArenaLoad) -> bool:
            return self._placer.has_memory(request.lane, as_prompt, arena, now_s)

        reason = f"from {move.source_id}, {move.reason}"
        if self._migrations.try_begin(request, receiver.worker_id, reason, has_room, now_s):
            self._staying[request.request_id] = now_s + _STAYS_S
            self._counts["rebalanced"] += 1

    def _load(self, worker: WorkerState, num_used_pages: int) -> WorkerLoad:
        fit, arena, record = self._placer.memory_fit, worker.arena, worker.record
        return WorkerLoad(
            worker_id=worker.worker_id,
            arena_id=arena.arena_id,
            num_pages=int(arena.num_pages * (1 - fit.kept_share)),
            num_used_pages=num_used_pages + arena.num_leaving_pages,
            num_seqs=len(worker.decode.priorities),
            max_num_seqs=worker.max_num_seqs,
            num_context_tokens=worker.decode.num_context_tokens,
            max_context_tokens=worker.max_context_tokens,
            cost=record.cost,
            page_bytes=record.page_bytes,
            preempts=fit.preempts,
        )

    def _sequence(self, request: ScheduledRequest, now_s: float) -> RunningSequence:
        submit, num_output = request.submit, request.num_output_tokens
        num_left, num_tokens = _num_left(submit, num_output), submit.num_prompt_tokens + num_output
        num_used = num_room = request.num_pages
        if not self._placer.memory_fit.counts_worst_case:
            num_used, num_room = num_pages_for(num_tokens), num_pages_for(num_tokens + int(num_left))
        is_pinned = request.request_id in self._staying or self._migrations.is_pinned(request, now_s)
        return RunningSequence(
            request.request_id,
            request.scheduling.lane_priority,
            num_tokens,
            num_left,
            num_used,
            num_room,
            request.num_tokens,
            is_pinned,
        )

    def _try_link(self, source: WorkerState, receiver: WorkerState, now_s: float) -> LinkCost | None:
        """None: they exchange no pages."""
        one, other = source.record, receiver.record
        if not (one.pages_address and other.pages_address and one.page_bytes == other.page_bytes):
            return None
        if source.arena.arena_id == receiver.arena.arena_id:
            return None
        return self._placer.links.cost(one.pages_address, receiver.arena.arena_id, now_s)

    def _try_queued(self, model: str, group: str, now_s: float) -> QueuedRequest | None:
        """The next of the pool's lanes. None: nobody waits."""
        lanes, fit = self._requests.lanes, self._placer.memory_fit
        for queue in lanes.in_order(model, now_s):
            request = lanes.try_next(model, queue, now_s) if queue.limits.worker_group == group else None
            if request is not None:
                worst_case, prompt = request.num_pages, num_pages_for(request.submit.num_prompt_tokens + 1)
                num_pages = worst_case if fit.counts_worst_case else prompt
                return QueuedRequest(num_pages, request.scheduling.lane_priority, min(len(queue), _MAX_WAITING))
        return None


def _num_left(submit: Submit, num_output: int) -> float:
    """Tokens that a sequence is expected to have yet: as predicted, else as many as it has had."""
    predicted = submit.predicted_output_tokens or submit.expected_output_tokens
    left = predicted - num_output if predicted > num_output else num_output
    return min(float(left), max(0.0, float(submit.max_tokens - num_output)))


def _as_prompt(request: ScheduledRequest) -> Submit:
    """What a running request asks for, as though all that it has were its prompt."""
    submit, num_output = request.submit, request.num_output_tokens
    return replace(
        submit,
        num_prompt_tokens=submit.num_prompt_tokens + num_output,
        max_tokens=max(1, submit.max_tokens - num_output),
        predicted_output_tokens=max(0.0, submit.predicted_output_tokens - num_output),
    )
