"""Who goes on with sequences whose worker has ended, or is being emptied."""

from weir.kv.arena.lease import LeaseState, LeaseTable
from weir.kv.arena.ownership import OwnershipTable
from weir.kv.records.record import RecordSummary
from weir_transfer.messages import HandOffRequest

ADOPTING_ROLE = "decode"


class Adopters:
    """Which workers are being emptied is forgotten by a restart, until their next heartbeats."""

    def __init__(self, leases: LeaseTable, table: OwnershipTable) -> None:
        self._leases = leases
        self._table = table
        self._draining: set[int] = set()

    def set_draining(self, lease_id: int, *, is_draining: bool) -> None:
        if is_draining:
            self._draining.add(lease_id)
        else:
            self._draining.discard(lease_id)

    def try_choose(self, *, besides: int = 0) -> int | None:
        """The living lease of a decode worker that holds the fewest sequences. Not one that is silent: it may be about
        to be killed."""
        num_slots_of = {
            lease.lease_id: len(self._table.slots_of(lease.lease_id))
            for lease in self._leases.all()
            if lease.role == ADOPTING_ROLE
            and lease.state == LeaseState.ACTIVE
            and lease.lease_id != besides
            and lease.lease_id not in self._draining
        }
        return min(num_slots_of, key=num_slots_of.__getitem__) if num_slots_of else None


def is_raised(summary: RecordSummary, request: HandOffRequest) -> bool:
    """Whether an earlier call of the same request raised the adoption, and did not get to the change of owner."""
    is_same = (summary.request_id, summary.attempt.dispatch) == (request.request_id, request.attempt.dispatch)
    return not request.to_worker_id and is_same and summary.attempt.adoption > request.attempt.adoption
