"""Running requests that go on at another host: those of workers that are being emptied, where nobody of their memory
takes them, and those that `weir.scheduling.rebalancing` chooses.

    planned: room reserved there ─> its gateway has begun ─> it runs there, as its list of held requests says
                 └─ refused, given up, ended, or too late ─> the room is free again, and it may be planned later

A few at a time for each host: each costs the one that it goes to some tokens of prefill, and both of them bandwidth.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weir.bus.messages import HeldRequest, Placement, WorkerRecord
from weir.bus.migration import Migrate
from weir.scheduling.commands import CommandQueue, SendMigrate
from weir.scheduling.limits import CoreLimits
from weir.scheduling.pools import ArenaLoad, PrefillCandidate, WorkerPools, WorkerState
from weir.scheduling.request import PlacementPlan, ScheduledRequest
from weir.scheduling.request_table import RequestTable
from weir.scheduling.workers import DECODE, Workers

MAX_AT_A_TIME = 2
"""Out of an arena, and into one."""
_LONGEST_S = 15.0
_HEARD_AFTER_S = 0.5
"""A list of held requests that is made so long after its gateway's answer knows of the migration."""
_REST_S = 1.0
_LONGEST_REST_S = 8.0
"""Until what came to nothing is tried again: twice as long each time, up to this: some times in a grace period."""
_FORGOTTEN_S = 60.0
"""After its last rest a request begins anew with the first one."""


@dataclass(slots=True)
class _Move:
    request: ScheduledRequest
    source: Placement
    plan: PlacementPlan
    from_arena_id: str
    to_arena_id: str
    began_at_s: float
    answered_at_s: float | None = None


class _Rest(NamedTuple):
    until_s: float
    length_s: float


_Target = tuple[PrefillCandidate, WorkerState]


class Migrations:
    """Plans them, and keeps the room for each until it is there or is not coming."""

    def __init__(self, requests: RequestTable, workers: Workers, commands: CommandQueue) -> None:
        self._requests = requests
        self._workers = workers
        self._commands = commands
        self._moves: dict[str, _Move] = {}
        """By request."""
        self._rests: dict[str, _Rest] = {}
        """By request, and for a while after the rest: so that the next one is longer."""
        self._draining: tuple[WorkerRecord, ...] = ()
        self._num_changes = -1
        self._groups: Mapping[str, str] = {}

    def set_limits(self, limits: CoreLimits, pools: WorkerPools) -> None:
        self._groups = {lane.name: lane.worker_group for lane in limits.lanes}
        self._pools = pools
        self._may_begin = limits.placing.crossing != "nothing"

    def plan(self, now_s: float) -> None:
        """Begins as many as there is room for."""
        if self._moves or self._rests:
            self._drop_settled(now_s)
        for record in self._to_be_emptied() if self._may_begin else ():
            for request in self._decoding_on(record, now_s):
                if self._num_out_of(record.host_id) >= MAX_AT_A_TIME:
                    break
                self._begin(request, record, now_s)

    def try_begin(
        self,
        request: ScheduledRequest,
        receiver_id: str,
        reason: str,
        has_room: Callable[[ArenaLoad], bool],
        now_s: float,
    ) -> bool:
        """Has it go on at this decode worker, if that may be now."""
        source = None if request.placement is None else self._workers.find(request.placement.decode_worker_id)
        if source is None or not self._may_begin or self.is_pinned(request, now_s):
            return False
        if not source[0].pages_address or self._num_out_of(source[0].host_id) >= MAX_AT_A_TIME:
            return False
        targets = self._targets(request, source[0], has_room)
        return self._try_begin(
            request, source[0], [one for one in targets if one[1].worker_id == receiver_id], reason, now_s
        )

    def is_pinned(self, request: ScheduledRequest, now_s: float) -> bool:
        """It stays for now: its prompt is being read, it is on its way, or has tried that in vain."""
        placement = request.placement
        if placement is None or request.request_id in self._moves or self._is_resting(request.request_id, now_s):
            return True
        return request.request_id in self._requests.reservations.prefill_load(placement.reading_worker_id).prompts

    def busy_arenas(self) -> set[str]:
        """That something leaves or comes to."""
        return {arena_id for move in self._moves.values() for arena_id in (move.from_arena_id, move.to_arena_id)}

    def answered(self, request_id: str, placement: Placement, *, accepted: bool, now_s: float) -> None:
        """Its gateway's answer; one that does not begin says so."""
        move = self._moves.get(request_id)
        if move is None or move.plan.placement != placement:
            return
        move.answered_at_s = now_s
        if not accepted:
            self._end(move, "refused", now_s)

    def heard(self, held: Iterable[HeldRequest], now_s: float) -> None:
        """Lists of held requests, before they change anything else."""
        for entry in held if self._moves else ():
            move = self._moves.get(entry.submit.request_id)
            if move is None or entry.is_migrating or entry.placement != move.source or move.answered_at_s is None:
                continue
            if now_s - move.answered_at_s > _HEARD_AFTER_S:
                self._end(move, "abandoned", now_s)

    def is_planned(self, request_id: str, placement: Placement) -> bool:
        """Whether its gateway has yet to answer."""
        move = self._moves.get(request_id)
        return move is not None and move.plan.placement == placement and move.answered_at_s is None

    def _drop_settled(self, now_s: float) -> None:
        for move in list(self._moves.values()):
            request = self._requests.try_get(move.request.request_id)
            placement = None if request is None else request.placement
            if request is not move.request or placement is None:
                self._end(move, "ended", now_s)
            elif placement != move.source:
                is_there = placement.decode_worker_id == move.plan.placement.decode_worker_id
                self._end(move, "moved" if is_there else "ended", now_s)
            elif now_s - move.began_at_s > _LONGEST_S:
                self._end(move, "late", now_s)
        for request_id in [i for i, rest in self._rests.items() if rest.until_s + _FORGOTTEN_S <= now_s]:
            del self._rests[request_id]

    def _end(self, move: _Move, outcome: str, now_s: float) -> None:
        request_id = move.request.request_id
        del self._moves[request_id]
        self._requests.reservations.expect_no_more(request_id)
        self._commands.counts[f"migrations_{outcome}"] += 1
        if outcome == "moved":
            self._rests.pop(request_id, None)
        else:
            self._rest(request_id, now_s)

    def _rest(self, request_id: str, now_s: float) -> None:
        before = self._rests.get(request_id)
        length_s = _REST_S if before is None else min(2 * before.length_s, _LONGEST_REST_S)
        self._rests[request_id] = _Rest(now_s + length_s, length_s)

    def _is_resting(self, request_id: str, now_s: float) -> bool:
        rest = self._rests.get(request_id)
        return rest is not None and now_s < rest.until_s

    def _to_be_emptied(self) -> tuple[WorkerRecord, ...]:
        """Decode workers of which no other one of their memory takes over what they run."""
        if self._num_changes != self._workers.num_changes:
            self._num_changes = self._workers.num_changes
            decode = [record for record in self._workers.records() if record.role == DECODE]
            taking = {(record.host_id, record.model) for record in decode if not record.is_draining}
            self._draining = tuple(
                record
                for record in decode
                if record.is_draining and record.pages_address and (record.host_id, record.model) not in taking
            )
        return self._draining

    def _decoding_on(self, record: WorkerRecord, now_s: float) -> list[ScheduledRequest]:
        """Those with the least to bring first."""
        reservations, found = self._requests.reservations, []
        for request in reservations.requests_on(record.worker_id):
            placement = request.placement
            if placement is None or placement.decode_worker_id != record.worker_id:
                continue
            if not self.is_pinned(request, now_s):
                found.append(request)
        return sorted(found, key=lambda request: request.submit.num_prompt_tokens + request.num_output_tokens)

    def _begin(self, request: ScheduledRequest, source: WorkerRecord, now_s: float) -> None:
        """If somebody takes it."""
        targets = self._targets(request, source, lambda arena: _has_room(arena, request.num_pages))
        if not targets:
            self._rest(request.request_id, now_s)
        self._try_begin(request, source, targets, f"{source.worker_id} is being emptied", now_s)

    def _try_begin(
        self, request: ScheduledRequest, source: WorkerRecord, targets: Sequence[_Target], reason: str, now_s: float
    ) -> bool:
        # Where as many are on their way as may be, it is soon this one's turn: it does not rest.
        before, free = request.plan, [one for one in targets if self._num_into(one[1].arena.arena_id) < MAX_AT_A_TIME]
        if before is None or not free:
            return False
        candidate, worker = free[0]
        prefill, decode = candidate.worker.record, worker.record
        placement = Placement(
            dispatch=0,
            prefill_worker_id=prefill.worker_id,
            prefill_address=prefill.address,
            decode_worker_id=decode.worker_id,
            decode_address=decode.address,
            num_reserved_pages=request.num_pages,
            scheduling=before.placement.scheduling,
            reason=f"migration: {reason}",
        )
        plan = before._replace(placement=placement)
        self._requests.reservations.expect(request, plan, now_s)
        arena_id = worker.arena.arena_id
        self._moves[request.request_id] = _Move(request, before.placement, plan, source.host_id, arena_id, now_s)
        self._commands.counts["migrations_planned"] += 1
        migrate = Migrate(self._commands.epoch, request.request_id, placement, source.pages_address)
        self._commands.add(SendMigrate(request.submit.gateway_id, migrate))
        return True

    def _targets(
        self, request: ScheduledRequest, source: WorkerRecord, has_room: Callable[[ArenaLoad], bool]
    ) -> list[_Target]:
        """Decode workers of other memories with room for all that the request may come to, the quickest first; those
        that compute the rest themselves before those that another worker hands it to."""
        pool = self._pools.pool(request.submit.model, self._groups.get(request.lane, ""))
        num_tokens = request.submit.num_prompt_tokens + request.num_output_tokens
        options = [
            (not candidate.is_local, worker.itl_ms(num_tokens), worker.worker_id, candidate, worker)
            for candidate in pool.candidates
            for worker in candidate.decode_workers
            if worker.arena.arena_id != source.host_id
            and worker.record.page_bytes == source.page_bytes
            and request.num_tokens <= worker.max_context_tokens
            and pool.slots.is_open(worker.worker_id, request.priority)
            and has_room(worker.arena)
        ]
        return [option[3:] for option in sorted(options, key=lambda option: option[:3])]

    def _num_out_of(self, arena_id: str) -> int:
        return sum(move.from_arena_id == arena_id for move in self._moves.values())

    def _num_into(self, arena_id: str) -> int:
        return sum(move.to_arena_id == arena_id for move in self._moves.values())

    def metrics(self) -> dict[str, float]:
        return {"migrations_under_way": float(len(self._moves))}


def _has_room(arena: ArenaLoad, num_pages: int) -> bool:
    return arena.num_reserved_pages + arena.num_leaving_pages + num_pages <= arena.num_pages
