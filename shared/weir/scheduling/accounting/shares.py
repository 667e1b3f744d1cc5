"""Guaranteed shares of pages: what of them lies idle is lent, and comes back when its owner wants it.

The rule is the reserved-capacity one of TensorRT-LLM's guaranteed-no-evict scheduler, with lending added.
"""

from collections.abc import Collection, Mapping

from weir.scheduling.limits.core_limits import CoreLimits


def guaranteed_pages(lane: str, num_pages: int, limits: CoreLimits) -> int:
    """Of one arena of `num_pages`."""
    lane_limits = limits.lanes_by_name.get(lane)
    return int(lane_limits.guaranteed_share * num_pages) if lane_limits else 0


def pages_open_to(
    lane: str, used_by_lane: Mapping[str, int], num_pages: int, limits: CoreLimits, wanting: Collection[str] = ()
) -> int:
    """Pages of one arena that a request of the lane may reserve now; at least 0.

    Inside its guarantee a lane may reserve what less urgent lanes have borrowed, even though it is not free yet:
    decode workers preempt the least urgent first. What more urgent lanes have borrowed comes back as their requests
    end. Over its guarantee it may reserve what is free, less what is kept of others' idle guarantees: all of it for
    those that are `wanting`, who have requests waiting; else the part that is not lent.
    """
    num_free = num_pages - sum(used_by_lane.values())
    num_kept = num_lendable = num_borrowed = 0
    priority = limits.lane_priorities.get(lane, -1)
    for other in {*used_by_lane, *limits.lanes_by_name} - {lane}:
        idle = guaranteed_pages(other, num_pages, limits) - used_by_lane.get(other, 0)
        if idle > 0:
            num_kept += idle if other in wanting else 0
            num_lendable += idle if other not in wanting else 0
        elif limits.lane_priorities.get(other, -1) < priority:
            num_borrowed -= idle
    num_owed = guaranteed_pages(lane, num_pages, limits) - used_by_lane.get(lane, 0)
    in_guarantee = min(num_owed, num_free + num_borrowed)
    # Whole pages are added up, for the lanes come in any order and a sum of parts of pages would depend on it.
    borrowable = num_free - num_kept - int(num_lendable * (1 - limits.lent_share))
    return max(in_guarantee, borrowable, 0)


def can_take_back(
    lane: str, num_wanted: int, used_by_lane: Mapping[str, int], num_pages: int, limits: CoreLimits
) -> bool:
    """Whether the lane may take so many pages, whatever a memory fit expects of those that run: they are inside its
    guarantee, and less urgent lanes have borrowed as many, so that these are preempted for it."""
    if num_wanted > guaranteed_pages(lane, num_pages, limits) - used_by_lane.get(lane, 0):
        return False
    priority = limits.lane_priorities.get(lane, -1)
    num_borrowed = 0
    for other, num_used in used_by_lane.items():
        if limits.lane_priorities.get(other, -1) < priority:
            num_borrowed += max(0, num_used - guaranteed_pages(other, num_pages, limits))
    return num_wanted <= num_borrowed
