"""The life of leases (`weir.kv.arena.lease.LeaseState`): who is attached, silent, to be killed."""

from dataclasses import dataclass, field

from weir.core.errors import Overloaded
from weir.core.process import ProcessIdentity
from weir.kv.arena.lease import Lease, LeaseState, LeaseTable
from weir.kv.messages import Claims
from weir_transfer.countdown import Countdowns
from weir_transfer.refusals import AttachRefused, ReceiverAway, ReceiverGone, StaleAttachment

_MISSED_HEARTBEATS = 3
"""After so many a lease is suspect."""
_FULL_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """A heartbeat is expected every `heartbeat_interval_ms`; after `lease_ttl_ms` of silence a process is killed."""

    heartbeat_interval_ms: int
    lease_ttl_ms: int

    @property
    def suspect_after_s(self) -> float:
        return min(_MISSED_HEARTBEATS * self.heartbeat_interval_ms, self.lease_ttl_ms) / 1000

    @property
    def lease_ttl_s(self) -> float:
        return self.lease_ttl_ms / 1000


@dataclass(frozen=True, slots=True)
class LeaseRegistration:
    """A worker that wants a lease, or its lease (`lease_id` not 0) back."""

    worker_id: str
    role: str
    process: ProcessIdentity
    page_bytes: int
    model_digest: str
    lease_id: int = 0
    claims: Claims = field(default_factory=Claims)


class LeaseKeeper:
    """The lease table, and what a restart forgets: the attachments and the silence of each lease."""

    def __init__(self, table: LeaseTable, countdowns: Countdowns, times: LeaseTimes) -> None:
        self._table = table
        self._countdowns = countdowns
        self._times = times
        self._attachments: dict[int, int] = {}
        self._told_to_fence: set[int] = set()

    def recover(self) -> None:
        """After a restart nobody is attached, and every lease gets a whole countdown to attach again."""
        for lease in self._table.all():
            if lease.state in (LeaseState.ACTIVE, LeaseState.SUSPECT):
                self._table.set_state(lease.lease_id, LeaseState.SUSPECT)
                self._countdowns.hear(lease.lease_id)

    def all(self) -> list[Lease]:
        return self._table.all()

    def find_or_add(self, registration: LeaseRegistration) -> int:
        """The lease that a worker asks for: an old one if it has one. Raises AttachRefused or Overloaded."""
        lease = self._table.of_worker(registration.worker_id)
        if registration.lease_id and (lease is None or lease.lease_id != registration.lease_id):
            raise AttachRefused(f"lease {registration.lease_id} of worker {registration.worker_id} does not exist")
        if lease is None:
            return self._add(registration)
        if lease.process != registration.process:
            raise AttachRefused(f"lease {lease.lease_id} belongs to {lease.process}, not to {registration.process}")
        if lease.state not in (LeaseState.ACTIVE, LeaseState.SUSPECT):
            raise AttachRefused(f"lease {lease.lease_id} has ended, it is {lease.state.name}")
        return lease.lease_id

    def attach(self, lease_id: int) -> int:
        """Begins an attachment, which ends the one before; returns its number."""
        attachment = self._table.new_attachment()
        self._attachments[lease_id] = attachment
        self.hear(lease_id, attachment)
        return attachment

    def check_attached(self, lease_id: int, attachment: int) -> None:
        """Raises StaleAttachment unless this is the lease's present attachment."""
        if not self._is_attached(lease_id, attachment):
            raise StaleAttachment(f"attachment {attachment} of lease {lease_id} has ended")

    def hear(self, lease_id: int, attachment: int) -> None:
        """A sign of life. One of an attachment that has ended changes nothing."""
        if self._is_attached(lease_id, attachment):
            self._countdowns.hear(lease_id)
            self._table.set_state(lease_id, LeaseState.ACTIVE)

    def break_stream(self, lease_id: int, attachment: int) -> None:
        """The stream of an attachment ended: the countdown begins, unless a newer one has taken its place."""
        if self._is_attached(lease_id, attachment):
            del self._attachments[lease_id]
            self._countdowns.hear(lease_id)
            self._table.set_state(lease_id, LeaseState.SUSPECT)

    def try_orphan(self, lease_id: int) -> bool:
        """Nobody can write under this lease any more. False if that was known already."""
        lease = self._table.get(lease_id)
        if lease is None or lease.state == LeaseState.ORPHANED:
            return False
        self._attachments.pop(lease_id, None)
        self._told_to_fence.discard(lease_id)
        self._countdowns.forget(lease_id)
        self._table.set_state(lease_id, LeaseState.ORPHANED)
        return True

    def remove(self, lease_id: int) -> None:
        """The lease owns nothing any more."""
        self._table.remove(lease_id)

    def count_down(self) -> list[int]:
        """Call it at every tick. Returns the leases whose processes must be killed now, each once."""
        self._countdowns.tick()
        for lease in self._table.all():
            if lease.state == LeaseState.ACTIVE and self._is_silent(lease, self._times.suspect_after_s):
                self._table.set_state(lease.lease_id, LeaseState.SUSPECT)
            elif lease.state == LeaseState.SUSPECT and self._is_silent(lease, self._times.lease_ttl_s):
                self._table.set_state(lease.lease_id, LeaseState.FENCING)
                self._attachments.pop(lease.lease_id, None)
                self._countdowns.forget(lease.lease_id)
        # Also those that an earlier process was about to kill when it died.
        to_fence = [
            lease.lease_id
            for lease in self._table.all()
            if lease.state == LeaseState.FENCING and lease.lease_id not in self._told_to_fence
        ]
        self._told_to_fence.update(to_fence)
        return to_fence

    def find_receiver(self, worker_id: str) -> int:
        """The lease of a worker that is there now. Raises ReceiverAway or ReceiverGone."""
        lease = self._table.of_worker(worker_id)
        if lease is None or lease.state in (LeaseState.FENCING, LeaseState.ORPHANED):
            raise ReceiverGone(f"worker {worker_id} has no lease here")
        if lease.state == LeaseState.SUSPECT:
            raise ReceiverAway(f"worker {worker_id} is silent or reconnects")
        return lease.lease_id

    def _add(self, registration: LeaseRegistration) -> int:
        try:
            lease_id = self._table.try_add(registration.worker_id, registration.role, registration.process)
        except ValueError as error:
            raise AttachRefused(str(error)) from error
        if lease_id is None:
            raise Overloaded("the lease table is full", retry_after_s=_FULL_RETRY_AFTER_S)
        return lease_id

    def _is_attached(self, lease_id: int, attachment: int) -> bool:
        return self._attachments.get(lease_id) == attachment

    def _is_silent(self, lease: Lease, limit_s: float) -> bool:
        return self._countdowns.silence_s(lease.lease_id) >= limit_s
