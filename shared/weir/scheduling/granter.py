"""Who is granted next: lanes in their order, inside a lane its next request, and a place for it."""

from collections.abc import Sequence
from typing import NamedTuple

from weir.bus.messages import RefusalReason
from weir.scheduling.commands import WORKER_RETRY_MS, Refusal
from weir.scheduling.lane_queue import LaneQueue
from weir.scheduling.limits import CoreLimits
from weir.scheduling.placer import Placer
from weir.scheduling.pools import Pool
from weir.scheduling.request import PlacementPlan, ScheduledRequest
from weir.scheduling.request_table import RequestTable
from weir.scheduling.workers import Workers

_Situation = tuple[object, ...]
"""As long as it stays the same, what did not fit does not fit."""
_LOOK_AGAIN_S = 0.25
"""With time alone other lanes may come first."""


Decision = tuple[ScheduledRequest, PlacementPlan | Refusal]
"""The request can start now as planned, or it can never start."""


class _Quiet(NamedTuple):
    """When nobody of a model could start."""

    as_of: tuple[int, ...]
    situation: _Situation | None
    """None: all lacked a slot, so that only slots matter."""


class Granter:
    """Decides one request at a time, and changes nothing.

    Nobody overtakes inside a lane, and no lane one that is before it, or small requests would keep a large one waiting;
    with one exception: a lane that is inside its guaranteed share, of the pages or of the steps of prefill, goes before
    those that are over theirs, and past any that wait. A lane with workers of its own waits for these alone.
    """

    def __init__(self, limits: CoreLimits, requests: RequestTable, workers: Workers, placer: Placer) -> None:
        self._requests = requests
        self._workers = workers
        self._placer = placer
        self._has_guarantees = any(lane.guaranteed_share or lane.guaranteed_step_share for lane in limits.lanes)
        self._max_prefill_tokens = limits.max_prefill_tokens
        self._blocked: dict[tuple[str, str], tuple[str, _Situation]] = {}
        """(model, lane) -> the request that had a slot and did not fit, and when."""
        self._schedulable: dict[tuple[str, str], tuple[str, int]] = {}
        """(model, lane) -> the request that can start some day, as of which change of the workers."""
        self._quiet: dict[str, _Quiet] = {}
        """By model."""
        self._is_for_slots = True
        """Whether all that were tried for this decision lacked a slot."""

    def try_decide(self, model: str, now_s: float) -> Decision | None:
        """None: nobody can start now."""
        num_head_changes = self._requests.lanes.num_head_changes(model)
        as_of = (num_head_changes, int(now_s / _LOOK_AGAIN_S), *self._placer.slot_situation())
        quiet = self._quiet.get(model)
        if quiet is not None and quiet.as_of == as_of and quiet.situation is None:
            return None
        situation = self._situation(model, now_s)
        if quiet is not None and quiet.as_of == as_of and quiet.situation == situation:
            return None
        self._is_for_slots = True
        queues = self._requests.lanes.in_order(model, now_s)
        choose = self._try_with_guarantees if self._has_guarantees else self._try_in_order
        decision = choose(model, queues, situation, now_s)
        if decision is None:
            self._quiet[model] = _Quiet(as_of, None if self._is_for_slots else situation)
        else:
            self._quiet.pop(model, None)
        return decision

    def _try_in_order(
        self, model: str, queues: Sequence[LaneQueue], situation: _Situation, now_s: float
    ) -> Decision | None:
        blocked_groups: set[str] = set()
        for queue in queues:
            group = self._group(model, queue)
            if group in blocked_groups or self._is_at_most(queue):
                continue
            request = self._requests.lanes.try_next(model, queue, now_s)
            if request is None:
                continue
            pool = self._placer.pools.pool(model, queue.limits.worker_group)
            decision = self._try_start(queue, request, pool, situation, now_s)
            if decision is not None:
                return decision
            blocked_groups.add(group)
        return None

    def _try_with_guarantees(
        self, model: str, queues: Sequence[LaneQueue], situation: _Situation, now_s: float
    ) -> Decision | None:
        """Those inside their guarantees first. One of these that does not fit holds up only who comes after it."""
        tried: set[str] = set()
        first_blocked: dict[str, int] = {}
        heads: dict[str, ScheduledRequest | None] = {}
        for place, queue in enumerate(queues):
            has_guarantee = queue.limits.guaranteed_share or queue.limits.guaranteed_step_share
            if not has_guarantee or (queue.limits.max_batch and self._is_at_most(queue)):
                continue
            request = heads[queue.name] = self._requests.lanes.try_next(model, queue, now_s)
            if request is None:
                continue
            pool = self._placer.pools.pool(model, queue.limits.worker_group)
            lacks_slot = not pool.has_slot(request.priority) and self._is_schedulable(queue, request)
            if not lacks_slot and not self._is_owed(model, queue, request, pool):
                continue
            tried.add(queue.name)
            decision = None if lacks_slot else self._try_start(queue, request, pool, situation, now_s)
            if decision is not None:
                return decision
            first_blocked.setdefault(self._group(model, queue), place)
        for place, queue in enumerate(queues):
            name = queue.name
            if name in tried or (queue.limits.max_batch and self._is_at_most(queue)):
                continue
            group = self._group(model, queue) if queue.limits.worker_group else ""
            if place > first_blocked.get(group, place):
                continue
            request = heads[name] if name in heads else self._requests.lanes.try_next(model, queue, now_s)
            if request is None:
                continue
            pool = self._placer.pools.pool(model, queue.limits.worker_group)
            decision = self._try_start(queue, request, pool, situation, now_s)
            if decision is not None:
                return decision
            first_blocked[group] = place
        return None

    def _try_start(
        self, queue: LaneQueue, request: ScheduledRequest, pool: Pool, situation: _Situation, now_s: float
    ) -> Decision | None:
        key, has_slot = (request.submit.model, queue.name), pool.has_slot(request.priority)
        if has_slot:
            if self._blocked.get(key) == (request.request_id, situation):
                self._is_for_slots = False
                return None
            plan = self._placer.try_place(request, pool, now_s)
            if plan is not None:
                self._blocked.pop(key, None)
                return request, plan
        if not self._is_schedulable(queue, request):
            refusal = self._try_give_up(request, pool, now_s)
            if refusal is not None:
                return request, refusal
            self._schedulable[key] = request.request_id, self._workers.num_changes
        if has_slot:
            self._is_for_slots = False
            self._blocked[key] = request.request_id, situation
        return None

    def _is_schedulable(self, queue: LaneQueue, request: ScheduledRequest) -> bool:
        """Whether it is known that it can start some day."""
        schedulable = self._schedulable.get((request.submit.model, queue.name))
        return schedulable == (request.request_id, self._workers.num_changes)

    def _try_give_up(self, request: ScheduledRequest, pool: Pool, now_s: float) -> Refusal | None:
        """Why the request can never start; None: it can, some day."""
        if not pool.host_sizes:
            return None
        if not pool.can_ever_hold(request.num_tokens, request.num_pages):
            message = f"no worker that is left can hold its {request.num_pages} pages"
            return Refusal(RefusalReason.NO_WORKER, message, WORKER_RETRY_MS)
        if self._placer.is_kept_out(request, {num_pages for num_pages, _ in pool.host_sizes}, now_s):
            message = (
                f"{request.num_pages} pages: lane {request.lane} never gets as many, for guarantees of other lanes "
                f"are lent no further than lent_share; ask for fewer tokens"
            )
            return Refusal(RefusalReason.TOO_LARGE, message)
        return None

    def _situation(self, model: str, now_s: float) -> _Situation:
        """Idle guarantees are kept for lanes that wait, so who waits is part of it."""
        situation = self._placer.situation(now_s)
        return (*situation, self._requests.lanes.wanting(model)) if self._has_guarantees else situation

    def _is_at_most(self, queue: LaneQueue) -> bool:
        """Whether the lane must have no more running."""
        return 0 < queue.limits.max_batch <= self._requests.reservations.num_running(queue.name)

    def _is_owed(self, model: str, queue: LaneQueue, request: ScheduledRequest, pool: Pool) -> bool:
        """Whether the request is inside its lane's guarantee, by pages as they are charged, or by prompts that are not
        prefilled yet: of these one may always be."""
        step_share = queue.limits.guaranteed_step_share
        if step_share:
            num_tokens = self._requests.reservations.num_prefill_tokens(model, queue.name)
            most = step_share * self._max_prefill_tokens * len(pool.candidates)
            if not num_tokens or num_tokens + request.submit.num_prompt_tokens <= most:
                return True
        share = queue.limits.guaranteed_share
        if not share:
            return False
        num_charged = self._requests.reservations.num_charged_pages(model, queue.name)
        num_charged += self._placer.charged_pages(request)
        return num_charged <= share * pool.num_pages

    def _group(self, model: str, queue: LaneQueue) -> str:
        """Whose workers the lane waits for."""
        group = queue.limits.worker_group
        return group if group and self._placer.pools.pool(model, group).has_own_group else ""
