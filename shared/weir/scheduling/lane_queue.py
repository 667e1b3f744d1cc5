"""The requests of one model that wait in one lane: tenants by their counters, inside a tenant the policy's order."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from weir.policy.seams import Order, OrderQueue
from weir.scheduling.fairness import VirtualCounters
from weir.scheduling.limits import LaneLimits
from weir.scheduling.request import ScheduledRequest


class _TenantQueue:
    """One tenant's: in the policy's order, but whoever waited `ageing_s` goes first, oldest first."""

    def __init__(self, queue: OrderQueue) -> None:
        self.queue = queue
        self.by_age: OrderedDict[str, ScheduledRequest] = OrderedDict()

    def try_next(self, ageing_s: float, now_s: float) -> ScheduledRequest | None:
        if ageing_s and self.by_age:
            oldest = next(iter(self.by_age.values()))
            if now_s - oldest.queued_at_s >= ageing_s:
                return oldest
        request_id = self.queue.try_peek(now_s)
        return None if request_id is None else self.by_age[request_id]


class LaneQueue:
    """Nobody is passed over: while the next one does not fit, its tenant waits, and so do the others of the lane."""

    def __init__(self, limits: LaneLimits, priority: int, order: Order, counters: VirtualCounters) -> None:
        self.limits = limits
        self.name = limits.name
        self.priority = priority
        self._order = order
        self._counters = counters
        self._tenants: dict[str, _TenantQueue] = {}
        """Those that have requests here."""
        self._at_bound: set[str] = set()
        """Of these, those that have as many in flight as they may: passed over until `reopen`."""
        self._heap: list[tuple[float, str]] = []
        """(counter, tenant). A counter that has risen since is put right when it comes to the top; so is a tenant that
        is gone or at its bound."""
        self._in_heap: set[str] = set()
        self._by_age: OrderedDict[str, ScheduledRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def num_before(self, key: str, *, is_queued: bool) -> int:
        """How many of the lane are served before a new request of the tenant `key`, if all take turns; `is_queued`:
        before its latest one, which waits already."""
        tenant = self._tenants.get(key)
        num_own = len(tenant.by_age) if tenant else 0
        num_tenants = len(self._tenants) + (tenant is None)
        return min((num_own - is_queued + 1) * num_tenants - 1, len(self) - is_queued)

    def num_by_tenant(self) -> dict[str, int]:
        """How many of each wait."""
        return {key: len(tenant.by_age) for key, tenant in self._tenants.items()}

    def requests(self) -> Iterator[ScheduledRequest]:
        """By age, oldest first."""
        yield from self._by_age.values()

    def oldest(self) -> ScheduledRequest:
        return next(iter(self._by_age.values()))

    def oldest_since_s(self, is_over: Callable[[str], bool]) -> float:
        """When the oldest one came of tenants that may have more in flight; of all, if none may."""
        oldest = (next(iter(tenant.by_age.values())) for key, tenant in self._tenants.items() if not is_over(key))
        return min((request.queued_at_s for request in oldest), default=self.oldest().queued_at_s)

    def newest(self) -> ScheduledRequest:
        return next(reversed(self._by_age.values()))

    def add(self, request: ScheduledRequest, key: str, *, lifts: bool) -> bool:
        """`key`: whose queue it waits in. `lifts`: its coming may lift the tenant's counter. Whether it may be the next
        one now."""
        tenant = self._tenants.get(key)
        is_new = tenant is None
        if tenant is None:
            if lifts:
                self._counters.lift(key, self._least_counter())
            tenant = self._tenants[key] = _TenantQueue(self._order.new_queue())
            self._push(key)
        tenant.queue.add(request.waiting)
        tenant.by_age[request.request_id] = self._by_age[request.request_id] = request
        return is_new or tenant.queue.try_peek(request.queued_at_s) == request.request_id

    def remove(self, request: ScheduledRequest, key: str, taken_at_s: float | None = None) -> None:
        """`taken_at_s`: when it was granted; None: it leaves unserved."""
        tenant, request_id = self._tenants[key], request.request_id
        del self._by_age[request_id], tenant.by_age[request_id]
        if taken_at_s is not None and tenant.queue.try_peek(taken_at_s) == request_id:
            tenant.queue.take(request_id, taken_at_s)
        else:
            tenant.queue.discard(request_id)
        if not tenant.by_age:
            del self._tenants[key]
            self._at_bound.discard(key)
            self._counters.leave(key)

    def queues_by(self, order: Order) -> dict[str, OrderQueue]:
        """What its tenants' queues are in another order; to be handed to `set_order`."""
        made = {}
        for key, tenant in self._tenants.items():
            queue = made[key] = order.new_queue()
            for request in tenant.by_age.values():
                queue.add(request.waiting)
        return made

    def set_order(self, order: Order, queues: Mapping[str, OrderQueue]) -> None:
        """`queues`: of all tenants that wait, as `queues_by` made them."""
        self._order = order
        for key, queue in queues.items():
            self._tenants[key].queue = queue

    def try_least(self) -> str | None:
        """Of the tenants that may be served, the one with the least counter; ties by name."""
        heap, counters = self._heap, self._counters.values
        while heap:
            counter, key = heap[0]
            current = counters.get(key, 0.0)
            if key not in self._tenants or key in self._at_bound:
                heapq.heappop(heap)
                self._in_heap.discard(key)
            elif counter < current:
                heapq.heapreplace(heap, (current, key))
            else:
                return key
        return None

    def next_of(self, key: str, now_s: float) -> ScheduledRequest | None:
        """Who of the tenant is next."""
        return self._tenants[key].try_next(self.limits.ageing_s, now_s)

    def set_at_bound(self, key: str) -> None:
        """The tenant has as many in flight as it may: it is passed over until `reopen`."""
        self._at_bound.add(key)

    def reopen(self, key: str) -> None:
        """The tenant may have more in flight again. While it could not, it saved up nothing."""
        if key in self._at_bound:
            self._at_bound.discard(key)
            self._counters.lift(key, self._least_counter())
            self._push(key)

    def check_integrity(self) -> list[str]:
        """What does not add up."""
        errors = []
        by_tenant = [request_id for tenant in self._tenants.values() for request_id in tenant.by_age]
        if sorted(by_tenant) != sorted(self._by_age):
            errors.append(f"lane {self.name}: tenants hold {len(by_tenant)} requests, the lane {len(self._by_age)}")
        for key, tenant in self._tenants.items():
            if sorted(tenant.queue.ids()) != sorted(tenant.by_age) or not tenant.by_age:
                errors.append(f"lane {self.name}: the order of {key!r} holds {len(tenant.queue)}, {len(tenant.by_age)}")
            if (key in self._at_bound) == (key in self._in_heap and key not in self._at_bound):
                errors.append(f"lane {self.name}: tenant {key!r} is neither at its bound nor in the heap")
        if sorted(key for _, key in self._heap) != sorted(self._in_heap):
            errors.append(f"lane {self.name}: the heap holds {len(self._heap)}, its index {len(self._in_heap)}")
        return errors

    def _push(self, key: str) -> None:
        if key not in self._in_heap:
            self._in_heap.add(key)
            heapq.heappush(self._heap, (self._counters[key], key))

    def _least_counter(self) -> float | None:
        key = self.try_least()
        return None if key is None else self._counters[key]
