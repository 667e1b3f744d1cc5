"""Whether everything that the scheduler has in its books adds up."""

from collections import Counter
from collections.abc import Mapping

from weir.scheduling.request import ScheduledRequest
from weir.scheduling.request_table import RequestTable


def check_requests(table: RequestTable) -> tuple[str, ...]:
    """What does not add up; empty when all is well."""
    errors = [*table.lanes.check_integrity(), *table.reservations.check_integrity()]
    requests = table.requests
    for request_id, request in requests.items():
        places = (request_id in table.lanes, request_id in table.reservations)
        if places != (request.placement is None, request.placement is not None):
            errors.append(f"request {request_id}: (queued, booked) is {places}, its placement {request.placement}")
        if not table.gateways.has_request(request.submit.gateway_id, request_id):
            errors.append(f"request {request_id} is not among those of gateway {request.submit.gateway_id}")
    if len(table.lanes) + len(table.reservations) != len(requests):
        errors.append(f"{len(table.lanes)} queued + {len(table.reservations)} granted are not {len(requests)}")
    if table.gateways.num_requests != len(requests):
        errors.append(f"gateways have {table.gateways.num_requests} requests, there are {len(requests)}")
    errors += [f"request {i} lives and is buried" for i in table.tombstones.ids() if i in requests]
    return (*errors, *_check_counts(table, requests))


def _check_counts(table: RequestTable, requests: Mapping[str, ScheduledRequest]) -> list[str]:
    errors = []
    queued = Counter(request.tenant for request in requests.values() if request.placement is None)
    in_flight = Counter(request.tenant for request in requests.values() if request.placement is not None)
    there = {tenant: (queued[tenant], in_flight[tenant]) for tenant in {**queued, **in_flight}}
    counted = table.tenants.counts()
    if counted != there:
        errors.append(f"tenants count {counted} (queued, in flight), there are {there}")
    running = dict(Counter(request.lane for request in requests.values() if request.placement is not None))
    if table.usage.counts() != running:
        errors.append(f"lanes count {table.usage.counts()} in flight, there are {running}")
    for (model, lane), counters in table.fairness.items():
        errors += [
            f"counter of {name} in lane {lane} of {model}: {value}"
            for name, value in counters.values.items()
            if not 0 <= value < float("inf")
        ]
    return errors
