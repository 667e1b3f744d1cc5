"""The decisions of the transfer service: what becomes of leases, pages and sequences.

Pure: memory of the segment and an injected clock, no sockets and no processes. What has to be done outside is
returned: leases to fence from `tick`, sequences to announce from `attach` and `hand_off`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from weir.core.attempt import Attempt
from weir.core.clock import Clock
from weir.core.errors import Overloaded
from weir.kv.integrity import check_integrity
from weir.kv.lease import Lease, LeaseState, LeaseTable
from weir.kv.messages import Claims, HandedOff, HandOffReceipt
from weir.kv.ownership import Acquired, Move, NotOwned, OwnershipTable, PageIds, PageState, SlotState
from weir.kv.record import RecordSummary
from weir.kv.segment import Segment
from weir.mover.protocol import Mover
from weir_transfer.countdown import Countdowns
from weir_transfer.lease_keeper import LeaseKeeper, LeaseTimes, Registration
from weir_transfer.refusals import AttachRefused, RecordMismatch

_RETRY_AFTER_S = 0.1


@dataclass(frozen=True, slots=True)
class Attachment:
    """A lease in use by one stream; `handed_off` are the sequences that its worker does not know of yet."""

    lease_id: int
    number: int
    handed_off: tuple[HandedOff, ...]


@dataclass(frozen=True, slots=True)
class HandOffOrder:
    """What a worker asks for: its sequence `request_id`, under `attempt`, in `slot`, to another worker."""

    slot: int
    request_id: str
    attempt: Attempt
    to_worker_id: str


@dataclass(frozen=True, slots=True)
class Announcement:
    """To be told to the worker of `lease_id`."""

    lease_id: int
    sequence: HandedOff


@dataclass(frozen=True, slots=True)
class CommittedHandOff:
    """No announcement where an earlier call had committed the hand-off."""

    receipt: HandOffReceipt
    announcement: Announcement | None


@dataclass(slots=True)
class Counters:
    """Since the start of this process."""

    handoffs_total: int = 0
    handoffs_repeated_total: int = 0
    handoff_pages_total: int = 0
    handoff_bytes_copied_total: int = 0
    fenced_total: int = 0
    orphaned_total: int = 0
    reclaimed_pages_total: int = 0
    reclaimed_slots_total: int = 0


class ArenaCore:
    """Goes on with the segment as it is: a new one, or one that an earlier process left at any point."""

    def __init__(self, segment: Segment, mover: Mover, clock: Clock, times: LeaseTimes, tick_s: float) -> None:
        self._geometry = segment.geometry
        self._model_digest = segment.model_digest
        self._mover = mover
        self._table = OwnershipTable(segment.page_rows, segment.slot_rows)
        self._keeper = LeaseKeeper(LeaseTable(segment.lease_rows, segment.counters), Countdowns(clock, tick_s), times)
        self._records = [segment.record(slot) for slot in range(segment.geometry.num_slots)]
        self._counters = Counters()
        self._recover()

    def leases(self) -> list[Lease]:
        return self._keeper.all()

    def attach(self, registration: Registration) -> Attachment:
        """Gives a lease or gives it back, and brings the table into line with what the worker says it holds.

        The caller has made sure that the process is the one it says it is. Raises AttachRefused or Overloaded.
        """
        if registration.page_bytes != self._geometry.page_bytes:
            raise AttachRefused(f"page_bytes {registration.page_bytes}: this arena has {self._geometry.page_bytes}")
        if registration.model_digest != self._model_digest:
            raise AttachRefused(f"model_digest {registration.model_digest!r}: this arena has {self._model_digest!r}")
        lease_id = self._keeper.find_or_add(registration)
        handed_off = self._reconcile(lease_id, registration.claims)
        return Attachment(lease_id, self._keeper.attach(lease_id), handed_off)

    def hear(self, lease_id: int, attachment: int) -> None:
        """A heartbeat."""
        self._keeper.hear(lease_id, attachment)

    def break_stream(self, lease_id: int, attachment: int) -> None:
        """The stream of an attachment ended."""
        self._keeper.break_stream(lease_id, attachment)

    def detach(self, lease_id: int, attachment: int) -> None:
        """The worker gives its lease up and promises to write no more. Raises StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)
        self.end_lease(lease_id)

    def end_lease(self, lease_id: int) -> None:
        """Nobody can write under this lease any more: its process has exited, or gave it up. May be called twice."""
        if self._keeper.try_orphan(lease_id):
            self._counters.orphaned_total += self._table.orphan(lease_id, self._block_table_of)

    def tick(self) -> list[int]:
        """Runs the countdowns and frees orphans. Returns the leases whose processes must be killed now."""
        for lease in self._keeper.all():
            if lease.state == LeaseState.ORPHANED:
                self._free_orphans(lease.lease_id)
        to_fence = self._keeper.count_down()
        self._counters.fenced_total += len(to_fence)
        return to_fence

    def acquire(self, lease_id: int, attachment: int, num_pages: int, num_slots: int) -> Acquired:
        """All or nothing. Raises Overloaded or StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)
        acquired = self._table.try_acquire(lease_id, num_pages, num_slots)
        if acquired is None:
            raise Overloaded(
                f"asked for {num_pages} pages and {num_slots} slots, free are "
                f"{self._table.num_pages(PageState.FREE)} and {self._table.num_slots(SlotState.FREE)}",
                retry_after_s=_RETRY_AFTER_S,
            )
        return acquired

    def release(self, lease_id: int, attachment: int, page_ids: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """All or nothing. Raises NotOwned or StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)
        self._table.check_owned_pages(lease_id, page_ids)
        self._table.check_owned_slots(lease_id, slots)
        self._free(lease_id, page_ids, slots)

    def hand_off(self, lease_id: int, attachment: int, order: HandOffOrder) -> CommittedHandOff:
        """Passes a sequence with its pages to another worker; a repeated call finds it done.

        Raises NotOwned, RecordMismatch, ReceiverAway, ReceiverGone or StaleAttachment; then nothing has changed.
        """
        self._keeper.check_attached(lease_id, attachment)
        try:
            self._table.check_owned_slots(lease_id, [order.slot])
        except NotOwned:
            return self._find_committed(order)
        summary = self._require_record(order)
        to_lease_id = self._keeper.find_receiver(order.to_worker_id)
        self._table.check_owned_pages(lease_id, summary.page_ids)
        num_bytes_copied = self._mover.move(summary.page_ids)
        move = Move(order.request_id, order.attempt, from_lease_id=lease_id, to_lease_id=to_lease_id)
        self._table.hand_off(order.slot, summary.page_ids, move)
        self._counters.handoffs_total += 1
        self._counters.handoff_pages_total += len(summary.page_ids)
        self._counters.handoff_bytes_copied_total += num_bytes_copied
        receipt = HandOffReceipt(len(summary.page_ids), num_bytes_copied)
        return CommittedHandOff(receipt, Announcement(to_lease_id, self._handed_off(order.slot, summary)))

    def metrics(self) -> Mapping[str, float]:
        """Counters (`_total`) and gauges."""
        states = [lease.state for lease in self._keeper.all()]
        return {
            **{name: float(value) for name, value in asdict(self._counters).items()},
            "leases": float(len(states)),
            "suspect_leases": float(states.count(LeaseState.SUSPECT)),
            "fencing_leases": float(states.count(LeaseState.FENCING)),
            "total_pages": float(self._geometry.num_pages),
            "free_pages": float(self._table.num_pages(PageState.FREE)),
            "leased_pages": float(self._table.num_pages(PageState.LEASED)),
            "orphaned_pages": float(self._table.num_pages(PageState.ORPHANED)),
            "cached_pages": float(self._table.num_pages(PageState.CACHED)),
            "total_slots": float(self._geometry.num_slots),
            "free_slots": float(self._table.num_slots(SlotState.FREE)),
            "orphaned_slots": float(self._table.num_slots(SlotState.ORPHANED)),
        }

    def integrity_errors(self) -> tuple[str, ...]:
        return check_integrity(self._table, self._keeper.all(), self._block_table_of)

    def _recover(self) -> None:
        leases = self._keeper.all()
        self._table.rebuild((lease.lease_id for lease in leases), self._block_table_of)
        for lease in leases:
            if lease.state == LeaseState.ORPHANED:  # `orphan` may have been interrupted; it can be done again
                self._table.orphan(lease.lease_id, self._block_table_of)
        for slot in self._table.free_slots():
            self._records[slot].clear()
        self._keeper.recover()

    def _reconcile(self, lease_id: int, claims: Claims) -> tuple[HandedOff, ...]:
        """Takes back what the lease owns and its worker does not hold: answers that got lost on their way.

        slots   held | being handed off | handed off to it, not yet told | taken back
        pages   held | of the records of the two in the middle            | taken back
        """
        try:
            held_pages = self._table.check_owned_pages(lease_id, claims.page_ids)
            self._table.check_owned_slots(lease_id, claims.slots)
        except NotOwned as error:
            raise AttachRefused(f"the worker holds what is not its own: {error}") from error
        kept_pages, untold, surplus_slots = [held_pages], [], []
        for slot in self._table.slots_of(lease_id):
            if slot in claims.slots:
                continue
            summary = self._records[slot].summarize()
            is_handing_off = slot in claims.handing_off_slots
            if summary is None or not (is_handing_off or self._table.came_by_hand_off(slot)):
                surplus_slots.append(slot)
                continue
            kept_pages.append(summary.page_ids)
            if not is_handing_off:
                untold.append(self._handed_off(slot, summary))
        surplus_pages = np.setdiff1d(self._table.pages_of(lease_id), np.concatenate(kept_pages))
        self._free(lease_id, surplus_pages.tolist(), surplus_slots)
        self._counters.reclaimed_pages_total += len(surplus_pages)
        self._counters.reclaimed_slots_total += len(surplus_slots)
        return tuple(untold)

    def _free(self, lease_id: int, page_ids: tuple[int, ...] | list[int], slots: tuple[int, ...] | list[int]) -> None:
        for slot in slots:
            self._records[slot].clear()
        self._table.release(lease_id, page_ids, slots)

    def _free_orphans(self, lease_id: int) -> None:
        for slot in self._table.slots_of(lease_id):
            self._records[slot].clear()
        self._table.free_orphans(lease_id)
        self._keeper.remove(lease_id)

    def _require_record(self, order: HandOffOrder) -> RecordSummary:
        summary = self._records[order.slot].summarize()
        if summary is None:
            raise RecordMismatch(f"slot {order.slot} has no valid record")
        if (summary.request_id, summary.attempt) != (order.request_id, order.attempt):
            raise RecordMismatch(
                f"slot {order.slot} has the record of {summary.request_id} {summary.attempt}, "
                f"to be handed off is {order.request_id} {order.attempt}"
            )
        return summary

    def _find_committed(self, order: HandOffOrder) -> CommittedHandOff:
        num_pages = self._table.try_find_move(order.slot, order.request_id, order.attempt)
        if num_pages is None:
            raise NotOwned(f"slot {order.slot} is not the lease's, and {order.request_id} was not handed off from it")
        self._counters.handoffs_repeated_total += 1
        return CommittedHandOff(HandOffReceipt(num_pages, num_bytes_copied=0), announcement=None)

    def _handed_off(self, slot: int, summary: RecordSummary) -> HandedOff:
        return HandedOff(slot, self._table.slot_generation(slot), summary.request_id, summary.attempt)

    def _block_table_of(self, slot: int) -> PageIds | None:
        summary = self._records[slot].summarize()
        return None if summary is None else summary.page_ids
