"""The queues: by model, then by lane. Decides which lane goes next; its queue decides which request."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from weir.core.heaps import LazyHeap
from weir.policy.seams import Order
from weir.scheduling.fairness import Fairness, VirtualCounters
from weir.scheduling.lane_queue import LaneQueue
from weir.scheduling.limits import CoreLimits
from weir.scheduling.request import ScheduledRequest

_EVERYBODY = ""
"""Key of the one queue of a lane whose tenants go by arrival alone."""


class _ModelQueues:
    """Queues of one model, its lanes from the most urgent on."""

    def __init__(self, model: str, limits: CoreLimits, order: Order, fairness: Fairness) -> None:
        self.lanes = {
            lane.name: LaneQueue(lane, limits.lane_priority(lane.name), order, fairness.group(model, lane.name))
            for lane in limits.lanes
        }
        self.service = VirtualCounters()
        """Of lanes, where they share by weight."""
        self.num_head_changes = 0
        self.waiting: list[LaneQueue] = []
        """The lanes that have requests, the most urgent first."""
        self.wanting: tuple[str, ...] = ()
        """Of these, those that are guaranteed a share."""

    def look_again(self) -> None:
        """A lane has got its first request, or lost its last."""
        self.waiting = [queue for queue in self.lanes.values() if queue]
        self.wanting = tuple(queue.name for queue in self.waiting if queue.limits.guaranteed_share)

    def least_service(self) -> float | None:
        return min((self.service[queue.name] for queue in self.waiting), default=None)


class Lanes:
    """Requests that wait. A model has queues of its own, so that one whose workers are full holds up no other."""

    def __init__(self, limits: CoreLimits, order: Order, fairness: Fairness, is_over: Callable[[str], bool]) -> None:
        """`is_over`: whether a tenant must have no more in flight."""
        self._limits = limits
        self._order = order
        self._fairness = fairness
        self._is_over = is_over
        self._models: dict[str, _ModelQueues] = {}
        """A model without requests has no entry."""
        self._requests: dict[str, ScheduledRequest] = {}
        self._lane_counts: Counter[str] = Counter()
        self._expiry: LazyHeap[tuple[float]] = LazyHeap()
        self._at_bound: dict[str, dict[LaneQueue, str]] = {}
        """tenant -> where it is passed over, with the model."""
        self._num_head_changes = 0
        """Of all models, so that one whose queues are made anew never comes to a number that it had."""
        self._ages = any(lane.ageing_s for lane in limits.lanes)
        self._is_fair = limits.tenant_order == "fair"
        self._is_weighted = limits.lane_order == "weighted"

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def requests(self) -> Iterator[ScheduledRequest]:
        """In the order in which they came."""
        yield from self._requests.values()

    def num_queued(self, lane: str) -> int:
        return self._lane_counts[lane]

    def has_queued(self, model: str) -> bool:
        return model in self._models

    def wanting(self, model: str) -> Sequence[str]:
        """The lanes with a guaranteed share that have requests of the model."""
        queues = self._models.get(model)
        return queues.wanting if queues else ()

    def num_ahead(self, model: str, lane: str, tenant: str | None = None, *, is_queued: bool = False) -> int:
        """How many of the model a new request of the lane would wait for: of lanes at least as urgent that want the
        same workers. `tenant`: whose it is, for tenants take turns; `is_queued`: its latest, which waits already."""
        queues = self._models.get(model)
        if queues is None:
            return 0
        own = queues.lanes[lane]
        total = 0
        for queue in queues.waiting:
            if queue.priority <= own.priority:
                break
            if queue.limits.worker_group == own.limits.worker_group:
                total += len(queue)
        if tenant is None:
            return total + len(own)
        return total + own.num_before(tenant if self._is_fair else _EVERYBODY, is_queued=is_queued)

    def num_tenants(self, model: str, lane: str) -> int:
        """How many of the lane wait for the model."""
        queues = self._models.get(model)
        return queues.lanes[lane].num_tenants if queues else 0

    def is_full(self, lane: str) -> bool:
        return self._lane_counts[lane] >= self._limits.lanes_by_name[lane].max_queued

    def models(self) -> list[str]:
        return list(self._models)

    def add(self, request: ScheduledRequest, *, lifts: bool = True) -> None:
        """`lifts`: False where its tenant waited before already."""
        model = request.submit.model
        queues = self._models.get(model)
        if queues is None:
            queues = self._models[model] = _ModelQueues(model, self._limits, self._order, self._fairness)
        queue = queues.lanes[request.lane]
        if not queue:
            queues.service.lift(request.lane, queues.least_service())
        if queue.add(request, request.tenant if self._is_fair else _EVERYBODY, lifts=lifts):
            self._mark_changed(queues)
        if len(queue) == 1:
            queues.look_again()
        self._expiry.push(request.request_id, (request.expires_at_s,))
        self._requests[request.request_id] = request
        self._lane_counts[request.lane] += 1

    def remove(self, request: ScheduledRequest, taken_at_s: float | None = None) -> None:
        """`taken_at_s`: when it was granted; None: it leaves unserved."""
        model, lane = request.submit.model, request.lane
        del self._requests[request.request_id]
        self._expiry.discard(request.request_id)
        queues = self._models[model]
        queue = queues.lanes[lane]
        queue.remove(request, request.tenant if self._is_fair else _EVERYBODY, taken_at_s)
        self._mark_changed(queues)
        self._lane_counts[lane] -= 1
        if not queue:
            queues.service.leave(lane)
            queues.look_again()
            if not queues.waiting:
                del self._models[model]

    def set_order(self, order: Order) -> None:
        """From now on, also for what waits. If anything raises, nothing has changed."""
        lanes = [queue for queues in self._models.values() for queue in queues.lanes.values()]
        made = [queue.queues_by(order) for queue in lanes]
        self._order = order
        for queue, by_tenant in zip(lanes, made, strict=True):
            queue.set_order(order, by_tenant)
        for queues in self._models.values():
            self._mark_changed(queues)

    def set_limits(self, limits: CoreLimits, is_over: Callable[[str], bool]) -> None:
        """Others of tenants, the same lanes. Who is passed over is looked at again."""
        self._limits, self._is_over = limits, is_over
        for tenant in list(self._at_bound):
            self.reopen(tenant)

    def num_head_changes(self, model: str) -> int:
        """As long as it stays the same, the same requests are next in the lanes of the model, but for ageing."""
        queues = self._models.get(model)
        return queues.num_head_changes if queues else 0

    def in_order(self, model: str, now_s: float) -> Sequence[LaneQueue]:
        """The lanes that have requests of the model, the next to be served first."""
        queues = self._models.get(model)
        if queues is None:
            return []
        if self._is_weighted:
            return sorted(queues.waiting, key=lambda queue: queues.service[queue.name])
        if self._ages and len(queues.waiting) > 1:
            return sorted(queues.waiting, key=lambda queue: self._urgency(queue, now_s))
        return queues.waiting

    def try_next(self, model: str, queue: LaneQueue, now_s: float) -> ScheduledRequest | None:
        """Who of the lane is next; None: all its tenants have as much in flight as they may."""
        while (key := queue.try_least()) is not None:
            if not self._is_over(key):
                return queue.next_of(key, now_s)
            queue.set_at_bound(key)
            self._at_bound.setdefault(key, {})[queue] = model
        return None

    def served(self, request: ScheduledRequest, service: float) -> None:
        """Its lane was given `service`, tokens by their price: that counts where lanes share by weight."""
        if not self._is_weighted:
            return
        queues = self._models.get(request.submit.model)
        lane = self._limits.lanes_by_name.get(request.lane)
        if queues is not None and lane is not None:
            queues.service.charge(lane.name, service / lane.weight)

    def reopen(self, tenant: str) -> None:
        """The tenant may have more in flight again."""
        for queue, model in self._at_bound.pop(tenant, {}).items():
            queue.reopen(tenant)
            if model in self._models:
                self._mark_changed(self._models[model])

    def oldest_wait_s(self, lane: str, now_s: float) -> float:
        """How long the one that came first has waited, of any model; 0.0: nobody waits."""
        since = [queues.lanes[lane].oldest().queued_at_s for queues in self._models.values() if queues.lanes[lane]]
        return now_s - min(since) if since else 0.0

    def newest_of(self, lane: str, model: str | None = None) -> ScheduledRequest | None:
        """The one that came last; of any model, if none is named."""
        models = self._models.values() if model is None else [self._models[model]] if model in self._models else []
        newest = [queues.lanes[lane].newest() for queues in models if queues.lanes[lane]]
        return max(newest, key=lambda request: (request.queued_at_s, request.request_id), default=None)

    def expired(self, now_s: float) -> Iterator[ScheduledRequest]:
        """Those whose time is over, earliest first; the caller removes each before it takes the next."""
        while (top := self._expiry.try_peek()) is not None and top[0][0] <= now_s:
            yield self._requests[top[1]]

    def check_integrity(self) -> list[str]:
        """What does not add up."""
        errors = [
            error
            for queues in self._models.values()
            for queue in queues.lanes.values()
            for error in queue.check_integrity()
        ]
        queued = [
            request.request_id
            for queues in self._models.values()
            for queue in queues.lanes.values()
            for request in queue.requests()
        ]
        if sorted(queued) != sorted(self._requests):
            errors.append(f"queues hold {len(queued)} requests, their index {len(self._requests)}")
        if sorted(self._expiry.ids()) != sorted(self._requests):
            errors.append(f"the expiry heap holds {len(self._expiry)} requests, the index {len(self._requests)}")
        counted = Counter(request.lane for request in self._requests.values())
        if counted != +self._lane_counts:
            errors.append(f"lanes count {dict(self._lane_counts)}, there are {dict(counted)}")
        for model, queues in self._models.items():
            if queues.waiting != [queue for queue in queues.lanes.values() if queue] or not queues.waiting:
                errors.append(f"model {model}: {[queue.name for queue in queues.waiting]} have requests, as it seems")
        return errors

    def _mark_changed(self, queues: _ModelQueues) -> None:
        self._num_head_changes += 1
        queues.num_head_changes = self._num_head_changes

    def _urgency(self, queue: LaneQueue, now_s: float) -> tuple[int, float, int]:
        """Smallest first: its oldest request that may start counts as one lane up for each `ageing_s` that it waited,
        at most as the most urgent lane; among equals whoever was as urgent first."""
        oldest, ageing_s = queue.oldest(), queue.limits.ageing_s
        since_s = oldest.queued_at_s
        if self._is_fair and self._is_over(oldest.tenant):
            since_s = queue.oldest_since_s(self._is_over)
        num_up = 0
        if ageing_s:
            num_up = min(int((now_s - since_s) / ageing_s), len(self._limits.lanes) - 1 - queue.priority)
        return -(queue.priority + num_up), since_s + num_up * ageing_s, -queue.priority
