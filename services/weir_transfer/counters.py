"""What the transfer service has done, and what its tables hold now, as metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.kv.arena.lease import Lease, LeaseState
from weir.kv.arena.ownership import OwnershipTable
from weir.kv.layout import PageState, SlotState
from weir.telemetry.internals import PageMap, PageRange


@dataclass(slots=True)
class TransferCounters:
    """Since the start of this process."""

    handoffs_total: int = 0
    handoffs_repeated_total: int = 0
    handoff_pages_total: int = 0
    handoff_bytes_copied_total: int = 0
    fenced_total: int = 0
    orphaned_total: int = 0
    adopted_total: int = 0
    handed_over_total: int = 0
    reclaimed_pages_total: int = 0
    reclaimed_slots_total: int = 0
    prefix_hit_pages_total: int = 0
    prefix_missed_pages_total: int = 0
    prefix_waits_total: int = 0


def gauges(table: OwnershipTable, leases: Sequence[Lease]) -> Mapping[str, float]:
    """Leases, pages and slots by state, and the evictions since the start of this process."""
    states = [lease.state for lease in leases]
    metrics = {
        "leases": len(states),
        "suspect_leases": states.count(LeaseState.SUSPECT),
        "fencing_leases": states.count(LeaseState.FENCING),
        "total_pages": len(table.page_rows),
        "total_slots": len(table.slot_rows),
        "free_slots": table.num_slots(SlotState.FREE),
        "orphaned_slots": table.num_slots(SlotState.ORPHANED),
        "prefix_evicted_pages_total": table.prefixes.num_evicted,
        **{f"{state.name.lower()}_pages": table.num_pages(state) for state in PageState},
    }
    return {name: float(value) for name, value in metrics.items()}


def page_map(states: NDArray[Any], max_ranges: int) -> PageMap:
    """`states`: PageState of each page. The ranges are as short as their number allows."""
    num_pages = len(states)
    pages_per_range = max(1, -(-num_pages // max_ranges))
    num_ranges = -(-num_pages // pages_per_range)
    # range r and state s are number r * len(PageState) + s
    numbers = np.arange(num_pages) // pages_per_range * len(PageState) + states
    counts = np.bincount(numbers, minlength=num_ranges * len(PageState)).reshape(num_ranges, len(PageState))
    ranges = tuple(
        PageRange(
            num_free=int(row[PageState.FREE]),
            num_leased=int(row[PageState.LEASED]),
            num_orphaned=int(row[PageState.ORPHANED]),
            num_cached=int(row[PageState.CACHED]),
            num_shared=int(row[PageState.SHARED]),
        )
        for row in counts
    )
    return PageMap(num_pages, pages_per_range, ranges)
