"""All requests in the scheduler's care: each is in a queue or in the book, never in both, until it is removed."""

from weir.bus.messages import Placement, Submit, SubmitReply
from weir.scheduling.book import Book
from weir.scheduling.gateways import Gateways
from weir.scheduling.lanes import Lanes
from weir.scheduling.limits import CoreLimits
from weir.scheduling.request import Request
from weir.scheduling.tombstones import Tombstones


class Ledger:
    """The index of requests, and the few steps that change several collections at once."""

    def __init__(self, limits: CoreLimits) -> None:
        self.lanes = Lanes(limits.lanes)
        self.book = Book()
        self.gateways = Gateways(limits.gateway_ttl_s)
        self.tombstones = Tombstones(limits.max_tombstones, limits.tombstone_ttl_s)
        self._limits = limits
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def try_get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def enqueue(self, submit: Submit, now_s: float, *, is_ahead: bool = False) -> Request:
        """`is_ahead`: it was queued before everything that is submitted now. The lane must exist."""
        request = self._new_request(submit, now_s, is_ahead=is_ahead)
        self.lanes.add(request)
        return request

    def adopt(self, submit: Submit, placement: Placement, now_s: float) -> Request:
        """Books a request that an earlier scheduler granted, even over what is free: it is there already."""
        request = self._new_request(submit, now_s, is_ahead=True)
        request.placement = placement
        self.book.add(request, now_s)
        return request

    def place(self, request: Request, placement: Placement, now_s: float) -> None:
        """From its queue, or from an older booking, into the book."""
        if request.placement is None:
            self.lanes.remove(request)
        else:
            self.book.remove(request, now_s)
        request.placement = placement
        self.book.add(request, now_s)

    def remove(self, request: Request, reply: SubmitReply | None, now_s: float) -> None:
        """Out of everything. `reply` is what a late Submit will be told; None: the request may come back."""
        del self._requests[request.request_id]
        self.gateways.remove_request(request.submit.gateway_id, request.request_id)
        if request.placement is None:
            self.lanes.remove(request)
        else:
            self.book.remove(request, now_s)
        if reply is not None:
            self.tombstones.put(request.request_id, reply, now_s)

    def metrics(self) -> dict[str, float]:
        gauges = {
            "queued": len(self.lanes),
            "granted": len(self.book),
            "booked_pages": self.book.num_pages,
            "prefills_in_flight": self.book.num_prefills,
            "gateways": len(self.gateways),
            "tombstones": len(self.tombstones),
        } | {f"queued_{lane.name}": self.lanes.num_queued(lane.name) for lane in self._limits.lanes}
        return {name: float(value) for name, value in gauges.items()}

    def check_integrity(self) -> tuple[str, ...]:
        """What does not add up; empty when all is well."""
        errors = [*self.lanes.check_integrity(), *self.book.check_integrity()]
        for request_id, request in self._requests.items():
            places = (request_id in self.lanes, request_id in self.book)
            if places != (request.placement is None, request.placement is not None):
                errors.append(f"request {request_id}: (queued, booked) is {places}, its placement {request.placement}")
            if not self.gateways.has_request(request.submit.gateway_id, request_id):
                errors.append(f"request {request_id} is not among those of gateway {request.submit.gateway_id}")
        if len(self.lanes) + len(self.book) != len(self._requests):
            errors.append(f"{len(self.lanes)} queued + {len(self.book)} granted are not {len(self._requests)}")
        if self.gateways.num_requests != len(self._requests):
            errors.append(f"gateways have {self.gateways.num_requests} requests, there are {len(self._requests)}")
        errors += [f"request {i} lives and is buried" for i in self.tombstones.ids() if i in self._requests]
        return tuple(errors)

    def _new_request(self, submit: Submit, now_s: float, *, is_ahead: bool) -> Request:
        name = submit.lane or self._limits.default_lane
        # An adopted grant may name a lane that is configured no more; it waits in none.
        lane = self._limits.lanes_by_name.get(name)
        max_wait_s = lane.max_wait_s if lane else 0.0
        wait_s = min(max_wait_s, submit.deadline_ms / 1000) if submit.deadline_ms else max_wait_s
        self._num_arrivals += 1
        request = Request(submit, name, (0 if is_ahead else 1, self._num_arrivals), now_s, now_s + wait_s)
        self._requests[request.request_id] = request
        self.gateways.add_request(submit.gateway_id, request.request_id, now_s)
        return request
