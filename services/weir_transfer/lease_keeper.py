"""The life of leases (`weir.kv.arena.lease.LeaseState`): who is attached, silent, to be killed."""

from weir.core.clock import Clock
from weir.core.errors import Overloaded
from weir.kv.arena.lease import Lease, LeaseState, LeaseTable
from weir.kv.messages import Claims
from weir_transfer.messages import (
    ArenaSettings,
    AttachRefused,
    LeaseRegistration,
    ReceiverGone,
    ReceiverSilent,
    StaleAttachment,
)

_FULL_RETRY_AFTER_S = 1.0
_MAX_PAUSE_S = 0.2
"""Between ticks: other things wait for them than leases, as memory that nobody uses any more."""


class Countdowns:
    """How long each lease has been silent.

    Silence counts only while the service itself listens: time in which it did not run is nobody's fault. So what a tick
    comes later than it was expected is taken off every silence.
    """

    def __init__(self, clock: Clock, tick_s: float) -> None:
        """`tick_s`: from one tick to the next, unless `expect_tick` says otherwise; and how late one may be."""
        self._clock = clock
        self._tick_s = tick_s
        self._last_tick_s = clock.now_s()
        self._pause_s = tick_s
        self._heard_at_s: dict[int, float] = {}

    def restart(self, lease_id: int) -> None:
        """At a sign of life, and where the silence of a lease begins to count."""
        self._heard_at_s[lease_id] = self._clock.now_s()

    def forget(self, lease_id: int) -> None:
        self._heard_at_s.pop(lease_id, None)

    def silence_s(self, lease_id: int) -> float:
        """Raises KeyError for a lease that was never heard."""
        return self._clock.now_s() - self._heard_at_s[lease_id]

    def tick(self) -> None:
        now_s = self._clock.now_s()
        late_s = max(0.0, now_s - self._last_tick_s - self._pause_s - self._tick_s)
        self._last_tick_s = now_s
        for lease_id, heard_at_s in self._heard_at_s.items():
            self._heard_at_s[lease_id] = min(now_s, heard_at_s + late_s)

    def expect_tick(self, within_s: float) -> None:
        """The next one comes so long after the last one, and so do those after it until this is called again."""
        self._pause_s = within_s


class LeaseKeeper:
    """The lease table, and what a restart forgets: the attachments and the silence of each lease."""

    def __init__(self, table: LeaseTable, countdowns: Countdowns, settings: ArenaSettings) -> None:
        self._table = table
        self._countdowns = countdowns
        self._settings = settings
        self._attachments: dict[int, int] = {}
        self._asked_to_fence: set[int] = set()

    def recover(self) -> None:
        """After a restart nobody is attached, and every lease gets a whole countdown to attach again, or to be adopted
        from."""
        for lease in self._table.all():
            if lease.state in (LeaseState.ACTIVE, LeaseState.SUSPECT):
                self._table.set_state(lease.lease_id, LeaseState.SUSPECT)
            if lease.state != LeaseState.FENCING:
                self._countdowns.restart(lease.lease_id)

    def find_or_add(self, registration: LeaseRegistration) -> int:
        """The lease that a worker asks for: an old one if it has one. Raises AttachRefused or Overloaded."""
        lease = self._table.of_worker(registration.worker_id)
        if registration.lease_id and (lease is None or lease.lease_id != registration.lease_id):
            raise AttachRefused(f"lease {registration.lease_id} of worker {registration.worker_id} does not exist")
        if lease is None and registration.claims != Claims():
            raise AttachRefused(f"worker {registration.worker_id} claims pages or slots but has no lease")
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
        self.heartbeat(lease_id, attachment)
        return attachment

    def check_attached(self, lease_id: int, attachment: int) -> None:
        """Raises StaleAttachment unless this is the lease's present attachment."""
        if not self._is_attached(lease_id, attachment):
            raise StaleAttachment(f"attachment {attachment} of lease {lease_id} has ended")

    def heartbeat(self, lease_id: int, attachment: int) -> bool:
        """A sign of life. False: it is of an attachment that has ended, and changes nothing."""
        is_attached = self._is_attached(lease_id, attachment)
        if is_attached:
            self._countdowns.restart(lease_id)
            self._table.set_state(lease_id, LeaseState.ACTIVE)
        return is_attached

    def break_stream(self, lease_id: int, attachment: int) -> None:
        """The stream of an attachment ended: the countdown begins, unless a newer one has taken its place."""
        if self._is_attached(lease_id, attachment):
            del self._attachments[lease_id]
            self._countdowns.restart(lease_id)
            self._table.set_state(lease_id, LeaseState.SUSPECT)

    def try_orphan(self, lease_id: int) -> bool:
        """Nobody can write under this lease any more. False if that was known already."""
        lease = self._table.get(lease_id)
        if lease is None or lease.state == LeaseState.ORPHANED:
            return False
        self._attachments.pop(lease_id, None)
        self._asked_to_fence.discard(lease_id)
        self._countdowns.restart(lease_id)
        self._table.set_state(lease_id, LeaseState.ORPHANED)
        return True

    def has_waited(self, orphaned: Lease) -> bool:
        """Whether nobody adopted what it left for as long as that may wait."""
        return self._countdowns.silence_s(orphaned.lease_id) >= self._settings.adoption_wait_s

    def remove(self, lease_id: int) -> None:
        """An orphaned lease, which owns nothing any more."""
        self._countdowns.forget(lease_id)
        self._table.remove(lease_id)

    def count_down(self) -> list[int]:
        """Call it at every tick. Returns the leases whose processes must be killed now, each once."""
        self._countdowns.tick()
        for lease in self._table.all():
            if lease.state == LeaseState.ACTIVE and self._is_silent(lease, self._settings.suspect_after_s):
                self._table.set_state(lease.lease_id, LeaseState.SUSPECT)
            elif lease.state == LeaseState.SUSPECT and self._is_silent(lease, self._settings.lease_ttl_s):
                self._table.set_state(lease.lease_id, LeaseState.FENCING)
                self._attachments.pop(lease.lease_id, None)
                self._countdowns.forget(lease.lease_id)
        # Also those that an earlier process was about to kill when it died.
        to_fence = [
            lease.lease_id
            for lease in self._table.all()
            if lease.state == LeaseState.FENCING and lease.lease_id not in self._asked_to_fence
        ]
        self._asked_to_fence.update(to_fence)
        return to_fence

    def plan_next_tick(self, shortest_s: float) -> float:
        """Seconds from the last tick to the next: `shortest_s` while a lease is about to end or has ended, longer while
        all are well. One that falls silent is suspected that much late, and then ticks come so often that it is killed
        as if they always did."""
        settings = self._settings
        are_well = all(lease.state == LeaseState.ACTIVE for lease in self._table.all())
        left_s = settings.lease_ttl_s - settings.suspect_after_s - shortest_s
        longest_s = max(shortest_s, min(_MAX_PAUSE_S, settings.suspect_after_s / 3, left_s))
        pause_s = longest_s if are_well else shortest_s
        self._countdowns.expect_tick(pause_s)
        return pause_s

    def find_receiver(self, worker_id: str) -> int:
        """The lease of a worker that is there now. Raises ReceiverSilent or ReceiverGone."""
        lease = self._table.of_worker(worker_id)
        if lease is None or lease.state in (LeaseState.FENCING, LeaseState.ORPHANED):
            raise ReceiverGone(f"worker {worker_id} has no lease here")
        if lease.state == LeaseState.SUSPECT:
            raise ReceiverSilent(f"worker {worker_id} is silent or reconnects")
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
