"""The gauges of an arena."""

from collections.abc import Mapping, Sequence

from weir.kv.arena.lease import Lease, LeaseState
from weir.kv.arena.ownership import OwnershipTable
from weir.kv.states import PageState, SlotState


def metrics_of(table: OwnershipTable, leases: Sequence[Lease]) -> Mapping[str, float]:
    """How many leases, pages and slots there are in which state; evictions are since the start of this process."""
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
