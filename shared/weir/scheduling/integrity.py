"""Whether everything that the scheduler has in its books adds up."""

from collections import Counter
from collections.abc import Mapping

from weir.scheduling.request import ScheduledRequest
from weir.scheduling.request_table import RequestTable


def check_ledger(ledger: RequestTable) -> tuple[str, ...]:
    """What does not add up; empty when all is well."""
    errors = [*ledger.lanes.check_integrity(), *ledger.book.check_integrity()]
    requests = ledger.requests
    for request_id, request in requests.items():
        places = (request_id in ledger.lanes, request_id in ledger.book)
        if places != (request.placement is None, request.placement is not None):
            errors.append(f"request {request_id}: (queued, booked) is {places}, its placement {request.placement}")
        if not ledger.gateways.has_request(request.submit.gateway_id, request_id):
            errors.append(f"request {request_id} is not among those of gateway {request.submit.gateway_id}")
    if len(ledger.lanes) + len(ledger.book) != len(requests):
        errors.append(f"{len(ledger.lanes)} queued + {len(ledger.book)} granted are not {len(requests)}")
    if ledger.gateways.num_requests != len(requests):
        errors.append(f"gateways have {ledger.gateways.num_requests} requests, there are {len(requests)}")
    errors += [f"request {i} lives and is buried" for i in ledger.tombstones.ids() if i in requests]
    return (*errors, *_check_counts(ledger, requests))


def _check_counts(ledger: RequestTable, requests: Mapping[str, ScheduledRequest]) -> list[str]:
    errors = []
    queued = Counter(request.tenant for request in requests.values() if request.placement is None)
    in_flight = Counter(request.tenant for request in requests.values() if request.placement is not None)
    there = {tenant: (queued[tenant], in_flight[tenant]) for tenant in {**queued, **in_flight}}
    counted = ledger.tenants.counts()
    if counted != there:
        errors.append(f"tenants count {counted} (queued, in flight), there are {there}")
    running = dict(Counter(request.lane for request in requests.values() if request.placement is not None))
    if ledger.usage.counts() != running:
        errors.append(f"lanes count {ledger.usage.counts()} in flight, there are {running}")
    for (model, lane), counters in ledger.fairness.items():
        errors += [
            f"counter of {name} in lane {lane} of {model}: {value}"
            for name, value in counters.values.items()
            if not 0 <= value < float("inf")
        ]
    return errors
