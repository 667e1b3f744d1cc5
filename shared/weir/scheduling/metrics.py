"""Figures of lanes, for whoever looks at a scheduler."""

from collections.abc import Mapping

from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.request_table import RequestTable


def lane_metrics(
    requests: RequestTable, limits: CoreLimits, counts: Mapping[str, int], now_s: float
) -> dict[str, dict[str, float]]:
    """lane -> figure -> value."""
    return {
        lane.name: {
            "queued": float(requests.lanes.num_queued(lane.name)),
            "in_flight": float(requests.usage.num_running(lane.name)),
            "granted_total": float(counts.get(f"granted_{lane.name}", 0)),
            "oldest_wait_s": requests.lanes.oldest_wait_s(lane.name, now_s),
            "priority": float(limits.lane_priority(lane.name)),
        }
        for lane in limits.lanes
    }
