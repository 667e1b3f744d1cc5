"""All requests in the scheduler's care: each is in a queue or has a reservation, never both, until it is removed."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping

from weir.bus.messages import Placement, Submit, SubmitReply
from weir.policy.seams import Policy
from weir.scheduling.fairness import DECODE_PRICE, PREFILL_PRICE, Fairness, GroupKey
from weir.scheduling.gateways import EndedRequests, Gateways
from weir.scheduling.lanes import Lanes
from weir.scheduling.limits import CoreLimits
from weir.scheduling.request import PlacementPlan, RequestFactory, ScheduledRequest
from weir.scheduling.reservations import Reservations
from weir.scheduling.tenants import Tenants

_AHEAD_S = 1.0
_MAX_AHEAD = 999_999


class RequestTable:
    """The index of requests, and the few steps that change several collections at once."""

    def __init__(self, limits: CoreLimits, policy: Policy, now_s: float) -> None:
        self.reservations = Reservations()
        self.gateways = Gateways(limits.gateway_ttl_s)
        self.tombstones = EndedRequests(limits.max_tombstones, limits.tombstone_ttl_s)
        self.fairness = Fairness(self._needs_counters)
        self.tenants = Tenants(limits)
        self.lanes = Lanes(limits, policy.order, self.fairness, self.tenants.is_over_in_flight)
        self._factory = RequestFactory(limits, policy)
        self._limits = limits
        self._started_at_s = now_s
        self._requests: dict[str, ScheduledRequest] = {}
        self._num_ahead = 0
        self._given_back: OrderedDict[str, float] = OrderedDict()
        """Tokens of requests that may come back, by id; as many as tombstones at most."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Mapping[str, ScheduledRequest]:
        """All of them, by id."""
        return self._requests

    def try_get(self, request_id: str) -> ScheduledRequest | None:
        return self._requests.get(request_id)

    def lane_of(self, submit: Submit) -> str:
        return submit.lane or self._limits.default_lane

    def has_lane_of(self, submit: Submit) -> bool:
        """Whether its lane is configured."""
        return self.lane_of(submit) in self._limits.lanes_by_name

    def wanting(self, model: str) -> Collection[str]:
        """Lanes with a guaranteed share that have requests of the model waiting."""
        return self.lanes.wanting(model)

    def enqueue(self, submit: Submit, now_s: float, num_uncached_tokens: int) -> ScheduledRequest:
        """A new request, which its caller charges. The lane must exist."""
        request = self._factory.request(submit, self.lane_of(submit), now_s, now_s, num_uncached_tokens)
        self._enqueue(request, now_s, lifts=True)
        self._index(request, now_s, pays=True)
        return request

    def enqueue_ahead(self, submit: Submit, now_s: float, arrived_at_s: float | None = None) -> None:
        """A request that was queued before; None: by an earlier scheduler, so that it comes before whatever is
        submitted to this one. The lane must exist."""
        if arrived_at_s is None:
            self._num_ahead += 1
            arrived_at_s = self._started_at_s - _AHEAD_S * (1 - min(self._num_ahead, _MAX_AHEAD) / (_MAX_AHEAD + 1))
        lane = self.lane_of(submit)
        request = self._factory.request(submit, lane, now_s, arrived_at_s, submit.num_prompt_tokens)
        # Whoever waited before the scheduler changed keeps the counter that was restored.
        self._enqueue(request, now_s, lifts=request.tenant not in self.fairness.group(submit.model, lane))
        self._index(request, now_s, pays=False)

    def adopt(self, submit: Submit, placement: Placement, num_output_tokens: int, now_s: float) -> None:
        """Reserves for a request that an earlier scheduler granted, even over what is free: it is there already."""
        request = self._factory.request(submit, self.lane_of(submit), now_s, now_s, submit.num_prompt_tokens)
        request.plan = PlacementPlan(placement, placement.num_reserved_pages)
        request.num_output_tokens = num_output_tokens
        self._index(request, now_s, pays=False)
        self._reserve(request, now_s)

    def place(self, request: ScheduledRequest, plan: PlacementPlan, now_s: float) -> None:
        """Out of its queue, with a reservation. What it takes to prefill it is charged."""
        self._take_out(request, now_s, taken_at_s=now_s)
        request.plan = plan
        self._reserve(request, now_s)
        num_computed = max(1, request.submit.num_prompt_tokens - plan.num_cached_tokens)
        self._charge_prompt(request, num_computed, now_s)

    def follow(self, request: ScheduledRequest, placement: Placement, now_s: float) -> None:
        """Its gateway runs it under a grant that another scheduler made, or has moved it, whatever this one has
        reserved for it. As far as is known here nothing of its prompt crosses then."""
        was_queued = request.plan is None
        self._take_out(request, now_s, taken_at_s=now_s)
        plan = request.plan or PlacementPlan(placement, placement.num_reserved_pages)
        request.plan = plan._replace(placement=placement, num_crossing_pages=0)
        self._reserve(request, now_s)
        if was_queued:
            self._charge_prompt(request, request.submit.num_prompt_tokens, now_s)

    def rebind(self, request: ScheduledRequest, submit: Submit, now_s: float) -> None:
        """A granted request is another gateway's from now on, which goes on with what runs."""
        if request.submit.gateway_id == submit.gateway_id:
            return
        self.gateways.remove_request(request.submit.gateway_id, request.request_id)
        self.gateways.add_request(submit.gateway_id, request.request_id, now_s)
        request.submit = submit

    def queue_again(self, request: ScheduledRequest, submit: Submit, now_s: float) -> None:
        """Under a newer dispatch, by when it came first, with the tokens that it has; what it has reserved is free. The
        lane must exist."""
        self.remove(request, None, now_s)
        self.enqueue_ahead(submit, now_s, request.waiting.arrived_at_s)
        self._requests[request.request_id].num_output_tokens = request.num_output_tokens

    def progressed(self, request: ScheduledRequest, num_output_tokens: int, now_s: float) -> None:
        """So many tokens of a granted request are delivered; what is new of it is charged."""
        num_new = num_output_tokens - request.num_output_tokens
        if request.plan is None or num_new <= 0:
            return
        request.num_output_tokens = num_output_tokens
        self._charge(request, DECODE_PRICE * num_new, now_s)
        self.reservations.progressed(request.request_id, num_output_tokens, now_s)

    def remove(
        self, request: ScheduledRequest, reply: SubmitReply | None, now_s: float, *, up_to_dispatch: int | None = None
    ) -> None:
        """Out of everything. `reply` answers a late Submit; None: the request may come back.

        `up_to_dispatch`: the newest one that is over; None: its gateway ended it.
        """
        del self._requests[request.request_id]
        self.gateways.remove_request(request.submit.gateway_id, request.request_id)
        self._take_out(request, now_s)
        num_given_back = self.tenants.give_back(request, now_s)
        if reply is not None:
            self.tombstones.put(request.request_id, reply, now_s, dispatch=up_to_dispatch)
        elif num_given_back > 0:
            self._given_back[request.request_id] = num_given_back
            if len(self._given_back) > self._limits.max_tombstones:
                self._given_back.popitem(last=False)

    def set_policy(self, policy: Policy) -> None:
        """Everything that waits stays where it is, in another order. If anything raises, nothing has changed."""
        factory = RequestFactory(self._limits, policy)
        ranks = [(request, factory.rank(request.waiting)) for request in self.lanes.requests()]
        self.lanes.set_order(policy.order)
        for request, rank in ranks:
            request.set_rank(rank)
        self._factory = factory

    def set_limits(self, limits: CoreLimits, policy: Policy, now_s: float) -> None:
        """Everything that waits waits on under them, in the order in which it came. If anything raises, nothing has
        changed."""
        tenants = Tenants(limits)
        factory = RequestFactory(limits, policy)
        if _queues_alike(limits) == _queues_alike(self._limits):
            self.lanes.set_limits(limits, tenants.is_over_in_flight)
        else:
            self._queue_anew(limits, policy, factory, tenants)
        tenants.carry_over(self.tenants, now_s)
        self._limits, self.tenants, self._factory = limits, tenants, factory
        queued, in_flight = Counter[str](), Counter[str]()
        for request in self._requests.values():
            if request.placement is None:
                queued[request.tenant] += 1
            else:
                request.tenant = limits.tenant(request.submit.tenant).name
                in_flight[request.tenant] += 1
        for tenant in queued | in_flight:
            tenants.count_queued(tenant, queued[tenant], now_s)
            tenants.count_in_flight(tenant, in_flight[tenant], now_s)
        self.fairness.keep_only(limits.lanes_by_name, limits.tenants_by_name)

    def _queue_anew(self, limits: CoreLimits, policy: Policy, factory: RequestFactory, tenants: Tenants) -> None:
        lanes = Lanes(limits, policy.order, self.fairness, tenants.is_over_in_flight)
        queued = [factory.again(request) for request in self.lanes.requests()]
        for request in queued:
            lanes.add(request, lifts=request.tenant not in self.fairness.group(request.submit.model, request.lane))
        self._requests |= {request.request_id: request for request in queued}
        self.lanes = lanes

    def lane_metrics(self, counts: Mapping[str, int], now_s: float) -> dict[str, dict[str, float]]:
        """lane -> metric -> value. `counts`: of the commands."""
        return {
            lane.name: {
                "queued": float(self.lanes.num_queued(lane.name)),
                "in_flight": float(self.reservations.num_running(lane.name)),
                "granted_total": float(counts.get(f"granted_{lane.name}", 0)),
                "oldest_wait_s": self.lanes.oldest_wait_s(lane.name, now_s),
                "priority": float(self._limits.lane_priority(lane.name)),
            }
            for lane in self._limits.lanes
        }

    def metrics(self) -> dict[str, float]:
        gauges = {
            "queued": len(self.lanes),
            "granted": len(self.reservations),
            "reserved_pages": self.reservations.num_pages,
            "prefills_in_flight": self.reservations.num_prefills,
            "gateways": len(self.gateways),
            "tombstones": len(self.tombstones),
            "tenant_counters": len(self.fairness),
        } | {f"queued_{lane.name}": self.lanes.num_queued(lane.name) for lane in self._limits.lanes}
        return {name: float(value) for name, value in gauges.items()}

    def _needs_counters(self, group: GroupKey) -> bool:
        return self.lanes.has_queued(group[0]) or self.reservations.num_charged_pages(*group) > 0

    def _index(self, request: ScheduledRequest, now_s: float, *, pays: bool) -> None:
        """`pays`: its caller charges it as a new one; else it has paid already, but for what it was given back."""
        num_given_back = self._given_back.pop(request.request_id, 0.0)
        if not pays:
            self.tenants.take_again(request.tenant, num_given_back, now_s)
        self.tombstones.remove(request.request_id)
        self._requests[request.request_id] = request
        self.gateways.add_request(request.submit.gateway_id, request.request_id, now_s)

    def _enqueue(self, request: ScheduledRequest, now_s: float, *, lifts: bool) -> None:
        self.lanes.add(request, lifts=lifts)
        self.tenants.count_queued(request.tenant, 1, now_s)

    def _reserve(self, request: ScheduledRequest, now_s: float) -> None:
        self.reservations.add(request, now_s)
        self.tenants.count_in_flight(request.tenant, 1, now_s)

    def _take_out(self, request: ScheduledRequest, now_s: float, taken_at_s: float | None = None) -> None:
        """Of its queue or of the reservations."""
        if request.plan is None:
            self.lanes.remove(request, taken_at_s)
            self.tenants.count_queued(request.tenant, -1, now_s)
        else:
            self.reservations.remove(request, now_s)
            self.tenants.count_in_flight(request.tenant, -1, now_s)
            self.lanes.reopen(request.tenant)

    def _charge_prompt(self, request: ScheduledRequest, num_tokens: int, now_s: float) -> None:
        """Once: a newer dispatch follows one that was charged, and whose workers could not go on."""
        if request.dispatch == 1:
            self._charge(request, PREFILL_PRICE * num_tokens, now_s)

    def _charge(self, request: ScheduledRequest, service: float, now_s: float) -> None:
        if request.lane not in self._limits.lanes_by_name:
            return
        self.lanes.served(request, service)
        self.tenants.count_service(request.tenant, service, now_s)
        counters = self.fairness.group(request.submit.model, request.lane)
        counters.charge(request.tenant, service / self._limits.tenant(request.tenant).weight)


def _queues_alike(limits: CoreLimits) -> tuple[object, ...]:
    """What queues and the records in them are made by: where it is the same, they stay as they are."""
    targets = {name: (tenant.ttft_slo_ms, tenant.itl_slo_ms) for name, tenant in limits.tenants_by_name.items()}
    orders = limits.lane_order, limits.tenant_order
    return limits.lanes, limits.default_lane, limits.default_tenant.name, orders, targets


def check_requests(table: RequestTable) -> tuple[str, ...]:
    """What does not add up; empty when all is well."""
    errors = [*table.lanes.check_integrity(), *table.reservations.check_integrity()]
    requests = table.requests
    for request_id, request in requests.items():
        is_in = (request_id in table.lanes, request_id in table.reservations)
        if is_in != (request.placement is None, request.placement is not None):
            errors.append(f"request {request_id}: (queued, reserved) is {is_in}, its placement {request.placement}")
        if not table.gateways.has_request(request.submit.gateway_id, request_id):
            errors.append(f"request {request_id} is not among those of gateway {request.submit.gateway_id}")
    if len(table.lanes) + len(table.reservations) != len(requests):
        errors.append(f"{len(table.lanes)} queued + {len(table.reservations)} granted are not {len(requests)}")
    if table.gateways.num_requests != len(requests):
        errors.append(f"gateways have {table.gateways.num_requests} requests, there are {len(requests)}")
    errors += [f"request {i} lives and has a tombstone" for i in table.tombstones.ids() if i in requests]
    return (*errors, *_check_counts(table, requests))


def _check_counts(table: RequestTable, requests: Mapping[str, ScheduledRequest]) -> list[str]:
    errors = []
    queued = Counter(request.tenant for request in requests.values() if request.placement is None)
    in_flight = Counter(request.tenant for request in requests.values() if request.placement is not None)
    there = {tenant: (queued[tenant], in_flight[tenant]) for tenant in {**queued, **in_flight}}
    counted = table.tenants.counts()
    if counted != there:
        errors.append(f"tenants count {counted} (queued, in flight), there are {there}")
    for (model, lane), counters in table.fairness.items():
        errors += [
            f"counter of {name} in lane {lane} of {model}: {value}"
            for name, value in counters.values.items()
            if not 0 <= value < float("inf")
        ]
    return errors
