"""Who is granted next: lanes in their order, inside a lane its next request, and a place for it."""

from dataclasses import dataclass

from weir.bus.messages import Placement, RefusalReason
from weir.scheduling.admission import WORKER_RETRY_MS, Refusal
from weir.scheduling.capacity import Capacity
from weir.scheduling.lane_queue import LaneQueue
from weir.scheduling.ledger import Ledger
from weir.scheduling.limits import CoreLimits
from weir.scheduling.placer import Placer
from weir.scheduling.request import Request
from weir.scheduling.workers import Workers

_Situation = tuple[int, ...]
"""The placer's: of two numbers where only slots matter, else of three, and one more where idle guarantees matter."""
_LOOK_AGAIN_S = 0.25
"""With time alone other lanes may come first."""


@dataclass(frozen=True, slots=True)
class Granted:
    """It can start there now."""

    request: Request
    placement: Placement


@dataclass(frozen=True, slots=True)
class Hopeless:
    """It can never start."""

    request: Request
    refusal: Refusal


class Granter:
    """Decides one request at a time, and changes nothing.

    Nobody overtakes inside a lane, and no lane one that is before it, or small requests would keep a large one waiting;
    with one exception: a lane that is inside its guaranteed share of the pages goes before those that are over theirs,
    and past any that wait. A lane with workers of its own waits for these alone.
    """

    def __init__(
        self, limits: CoreLimits, ledger: Ledger, workers: Workers, capacity: Capacity, placer: Placer
    ) -> None:
        self._limits = limits
        self._ledger = ledger
        self._workers = workers
        self._capacity = capacity
        self._placer = placer
        self._has_guarantees = any(lane.guaranteed_share for lane in limits.lanes)
        self._blocked: dict[tuple[str, str], tuple[str, _Situation]] = {}
        """(model, lane) -> the request that did not fit, and when: as long as nothing became free since, it still does
        not."""
        self._quiet: dict[str, tuple[int, int, _Situation]] = {}
        """model -> when nobody of it could start."""
        self._is_for_slots = True
        """Whether all that did not fit, of those that were tried for this decision, lacked a slot."""

    def try_decide(self, model: str, now_s: float) -> Granted | Hopeless | None:
        """None: nobody can start now."""
        situation, slots = self._placer.situation(now_s), self._placer.slot_situation()
        if self._has_guarantees:
            situation = (*situation, self._who_waits(model))
        heads = self._ledger.lanes.num_head_changes(model), int(now_s / _LOOK_AGAIN_S)
        if self._quiet.get(model) in ((*heads, situation), (*heads, slots)):
            return None
        self._is_for_slots = True
        queues = self._ledger.lanes.in_order(model, now_s)
        choose = self._try_with_guarantees if self._has_guarantees else self._try_in_order
        decision = choose(model, queues, situation, now_s)
        if decision is None:
            self._quiet[model] = (*heads, slots if self._is_for_slots else situation)
        else:
            self._quiet.pop(model, None)
        return decision

    def _try_in_order(
        self, model: str, queues: list[LaneQueue], situation: _Situation, now_s: float
    ) -> Granted | Hopeless | None:
        blocked_groups: set[str] = set()
        for queue in queues:
            if self._group(model, queue) in blocked_groups or self._is_at_most(queue):
                continue
            request = self._ledger.lanes.try_next(model, queue, now_s)
            if request is None:
                continue
            decision = self._try_start(queue, request, situation, now_s)
            if decision is not None:
                return decision
            blocked_groups.add(self._group(model, queue))
        return None

    def _try_with_guarantees(
        self, model: str, queues: list[LaneQueue], situation: _Situation, now_s: float
    ) -> Granted | Hopeless | None:
        """Those inside their guarantees first. One of these that does not fit holds up only who comes after it."""
        owed: set[str] = set()
        first_blocked: dict[str, int] = {}
        for place, queue in enumerate(queues):
            if not queue.limits.guaranteed_share or self._is_at_most(queue):
                continue
            request = self._ledger.lanes.try_next(model, queue, now_s)
            if request is None or not self._is_owed(model, queue, request):
                continue
            owed.add(queue.name)
            decision = self._try_start(queue, request, situation, now_s)
            if decision is not None:
                return decision
            first_blocked.setdefault(self._group(model, queue), place)
        for place, queue in enumerate(queues):
            group = self._group(model, queue)
            if queue.name in owed or place > first_blocked.get(group, place) or self._is_at_most(queue):
                continue
            request = self._ledger.lanes.try_next(model, queue, now_s)
            decision = self._try_start(queue, request, situation, now_s) if request else None
            if decision is not None:
                return decision
            if request is not None:
                first_blocked[group] = place
        return None

    def _try_start(
        self, queue: LaneQueue, request: Request, situation: _Situation, now_s: float
    ) -> Granted | Hopeless | None:
        key, slots = (request.submit.model, queue.name), self._placer.slot_situation()
        blocked = self._blocked.get(key)
        if blocked is not None and blocked[0] == request.request_id and blocked[1] in (situation, slots):
            self._is_for_slots &= len(blocked[1]) == len(slots)
            return None
        placement = self._placer.try_place(request, now_s)
        if placement is None:
            hopeless = self._try_give_up(request, queue.limits.worker_group)
            if hopeless is not None:
                return hopeless
            self._is_for_slots &= self._placer.lacks_slot
            self._blocked[key] = request.request_id, slots if self._placer.lacks_slot else situation
            return None
        self._blocked.pop(key, None)
        return Granted(request, placement)

    def _try_give_up(self, request: Request, group: str) -> Hopeless | None:
        model = request.submit.model
        if not self._workers.knows_model(model):
            refusal = Refusal(RefusalReason.UNKNOWN_MODEL, f"no worker ever served model {model!r}")
            return Hopeless(request, refusal)
        pool = self._capacity.of(model, group)
        if pool.hosts and not pool.can_ever_hold(request.num_tokens, request.num_pages):
            message = f"no worker that is left can hold its {request.num_pages} pages"
            return Hopeless(request, Refusal(RefusalReason.NO_WORKER, message, WORKER_RETRY_MS))
        return None

    def _who_waits(self, model: str) -> int:
        """A bit for each lane whose idle guarantee is kept, since it has requests of the model waiting."""
        lanes, has_queued = self._limits.lanes, self._ledger.has_queued
        return sum(has_queued(model, lane.name) << n for n, lane in enumerate(lanes) if lane.guaranteed_share)

    def _is_at_most(self, queue: LaneQueue) -> bool:
        """Whether the lane must have no more running."""
        return 0 < queue.limits.max_batch <= self._ledger.usage.num_running(queue.name)

    def _is_owed(self, model: str, queue: LaneQueue, request: Request) -> bool:
        """Whether the request is inside its lane's guarantee."""
        share = queue.limits.guaranteed_share
        if not share:
            return False
        num_used = self._ledger.usage.num_pages(model, queue.name)
        return num_used + request.num_pages <= share * self._capacity.of(model, queue.limits.worker_group).num_pages

    def _group(self, model: str, queue: LaneQueue) -> str:
        """Whose workers the lane waits for."""
        group = queue.limits.worker_group
        return group if group and self._capacity.of(model, group).has_own_group else ""
