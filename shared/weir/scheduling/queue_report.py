"""What gateways are told of the queues, so that they can refuse at once whoever would wait for too long."""

from collections.abc import Mapping
from heapq import nlargest
from operator import attrgetter

from weir.bus.queue_report import LaneReport, QueueReport, TenantQueue
from weir.scheduling.lane_rates import LanePace, LaneRates
from weir.scheduling.limits import CoreLimits
from weir.scheduling.request_table import RequestTable

_MAX_LANES = 256
"""Of all models together, the longest queues."""
_MAX_TENANTS = 1024
"""Of all lanes together, and as many of all tenants; those that have most waiting. The report stays below 200 kB."""
_UNKNOWN = LanePace(0.0, 0)


def queue_report(epoch: int, requests: RequestTable, limits: CoreLimits, rates: LaneRates, now_s: float) -> QueueReport:
    """Of the lanes in which somebody waits, or of which it is known how fast they go."""
    bounded = [
        TenantQueue(name, num_queued, limits.tenant(name).max_queued)
        for name, (num_queued, _) in requests.tenants.counts().items()
        if num_queued and limits.tenant(name).max_queued
    ]
    lanes = _lane_reports(requests, limits, rates.paces(now_s), now_s)
    return QueueReport(epoch, lanes, _largest(bounded, _MAX_TENANTS))


def _lane_reports(
    requests: RequestTable, limits: CoreLimits, paces: Mapping[tuple[str, str], LanePace], now_s: float
) -> tuple[LaneReport, ...]:
    lanes = requests.lanes
    queues = {(model, queue.name): queue for model in lanes.models() for queue in lanes.in_order(model, now_s)}
    known = [key for key in paces if key not in queues and key[1] in limits.lanes_by_name]
    num_left = _MAX_TENANTS
    reports = []
    for model, name in [*nlargest(_MAX_LANES, queues, key=lambda key: len(queues[key])), *known][:_MAX_LANES]:
        queue, lane = queues.get((model, name)), limits.lanes_by_name[name]
        by_tenant = queue.num_by_tenant() if queue is not None else {}
        tenants = _largest([TenantQueue(tenant, num) for tenant, num in by_tenant.items()], num_left)
        num_left -= len(tenants)
        pace = paces.get((model, name), _UNKNOWN)
        num_free = 0 if queue is not None else max(0, pace.num_running - requests.reservations.num_running(name))
        reports.append(
            LaneReport(
                model=model,
                lane=name,
                num_queued=len(queue) if queue is not None else 0,
                num_queued_of_all_models=lanes.num_queued(name),
                max_queued=lane.max_queued,
                max_wait_s=float(lane.max_wait_s),
                s_per_request=pace.s_per_request,
                num_free=num_free,
                tenants=tenants,
            )
        )
    return tuple(reports)


def _largest(tenants: list[TenantQueue], num: int) -> tuple[TenantQueue, ...]:
    return tuple(nlargest(max(0, num), tenants, key=attrgetter("num_queued")))
