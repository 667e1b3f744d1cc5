"""What gateways are told of the queues, so that they can refuse at once whoever would wait for too long."""

from heapq import nlargest
from operator import attrgetter

from weir.bus.messages import LaneReport, QueueReport, TenantQueue
from weir.scheduling.admission import Rates
from weir.scheduling.limits import CoreLimits
from weir.scheduling.request_table import RequestTable

_MAX_LANES = 256
"""Of all models together, the longest queues."""
_MAX_TENANTS = 1024
"""Of all lanes together, and as many of all tenants; those that have most waiting. The report stays below 200 kB."""


class LaneRates:
    """How fast requests of each model's lanes end while others of the same lane wait: each that ends lets one in.

    Ends, not grants: the first grants of a queue fill what was free, and say nothing of how long the next ones take.
    """

    def __init__(self, max_models: int) -> None:
        self._rates = Rates(max_models)

    def add(self, model: str, lane: str, now_s: float, *, is_backlogged: bool) -> None:
        self._rates.add(f"{lane} {model}", now_s, is_backlogged=is_backlogged)

    def s_per_request(self, model: str, lane: str, now_s: float) -> float:
        """0.0: too few have ended since somebody has been waiting all the time."""
        return self._rates.wait_s(f"{lane} {model}", 1, now_s)


def queue_report(epoch: int, requests: RequestTable, limits: CoreLimits, rates: LaneRates, now_s: float) -> QueueReport:
    """Of the lanes in which somebody waits."""
    lanes = requests.lanes
    queues = [(model, queue) for model in lanes.models() for queue in lanes.in_order(model, now_s)]
    num_left = _MAX_TENANTS
    reports = []
    for model, queue in nlargest(_MAX_LANES, queues, key=lambda pair: len(pair[1])):
        tenants = _largest([TenantQueue(name, num) for name, num in queue.num_by_tenant().items()], num_left)
        num_left -= len(tenants)
        lane = queue.limits
        reports.append(
            LaneReport(
                model=model,
                lane=lane.name,
                num_queued=len(queue),
                num_queued_of_all_models=lanes.num_queued(lane.name),
                max_queued=lane.max_queued,
                max_wait_s=float(lane.max_wait_s),
                s_per_request=rates.s_per_request(model, lane.name, now_s),
                tenants=tenants,
            )
        )
    bounded = [
        TenantQueue(name, num_queued, limits.tenant(name).max_queued)
        for name, (num_queued, _) in requests.tenants.counts().items()
        if num_queued and limits.tenant(name).max_queued
    ]
    has_peers = len(limits.tenants_by_name) > 1
    return QueueReport(epoch, tuple(reports), _largest(bounded, _MAX_TENANTS), has_peers)


def _largest(tenants: list[TenantQueue], num: int) -> tuple[TenantQueue, ...]:
    return tuple(nlargest(max(0, num), tenants, key=attrgetter("num_queued")))
