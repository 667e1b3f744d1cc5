"""The decisions of the transfer service: what becomes of leases, pages and sequences.

Pure: memory of the segment and an injected clock, no sockets and no processes. What has to be done outside is
returned: leases to fence from `tick`, sequences to announce from `attach`, `hand_off` and `adopt_orphans`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from weir.core.errors import Overloaded
from weir.kv.arena.integrity import check_integrity
from weir.kv.arena.lease import Lease, LeaseState, LeaseTable
from weir.kv.arena.ownership import Move, NotOwned, OwnershipTable
from weir.kv.arena.segment import Segment
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.layout import PageState, SlotState
from weir.kv.messages import Acquired, Claims, HandedOff, HandOffReceipt, PageChain, PrefixMatch
from weir.kv.movers.mover import Mover
from weir.kv.prefixes import PageIds, PrefixIndex
from weir.kv.records.record import RecordSummary
from weir.telemetry.internals import PageMap
from weir_transfer.adopters import ADOPTING_ROLE, Adopters, is_raised
from weir_transfer.counters import TransferCounters, gauges, page_map
from weir_transfer.exchange.running_sequences import RunningSequences
from weir_transfer.lease_keeper import Countdowns, LeaseKeeper
from weir_transfer.messages import (
    AdoptionOff,
    Announcement,
    ArenaSettings,
    Attachment,
    AttachRefused,
    CommittedHandOff,
    HandOffRequest,
    LeaseRegistration,
    MatchRequest,
    ReceiverGone,
    RecordMismatch,
)
from weir_transfer.pending_prefixes import PendingPrefixes
from weir_transfer.remote_prefixes import RemotePrefixes

_RETRY_AFTER_S = 0.1
_ONE_OF_ALL = "the workers of a host run one model, on one device, in one precision, all exact or none"


class ArenaCore:
    """Goes on with the segment as it is: a new one, or one that an earlier process left at any point."""

    def __init__(
        self,
        segment: Segment,
        mover: Mover,
        countdowns: Countdowns,
        settings: ArenaSettings,
        on_settled: Callable[[], None],
        on_lease_end: Callable[[], None],
    ) -> None:
        """`on_settled` is called when a `match` that had to wait may find more now, `on_lease_end` when there is
        something for `adopt_orphans` and `tick` to do."""
        self._page_bytes = segment.geometry.page_bytes
        self._model_digest = segment.model_digest
        self._mover = mover
        self._table = OwnershipTable(segment.page_rows, segment.slot_rows)
        self._leases = LeaseTable(segment.lease_rows, segment.counters)
        self._keeper = LeaseKeeper(self._leases, countdowns, settings)
        self._records = [segment.record(slot) for slot in range(segment.geometry.num_slots)]
        self.prefixes: PrefixIndex = self._table.prefixes
        self._counters = TransferCounters()
        self._keeps_prefixes = settings.keeps_prefixes
        self._settings = settings
        self._adopters = Adopters(self._leases, self._table)
        self._are_orphans_wanted = True
        self._pending = PendingPrefixes(on_settled)
        self.remote = RemotePrefixes(self._table, self._pending, may_evict=lambda: not self._unclaimed_lease_ids)
        self.running = RunningSequences(
            self._table, self._records, self._pending, keeps_prefixes=settings.keeps_prefixes
        )
        self._on_lease_end = on_lease_end
        self._unclaimed_lease_ids: set[int] = set()
        """Leases of before a restart that have not claimed yet what they hold: until then nothing is evicted."""
        self._recover()

    def leases(self) -> list[Lease]:
        return self._leases.all()

    def attach(self, registration: LeaseRegistration) -> Attachment:
        """Gives a lease or gives it back, and brings the table into line with what the worker claims.

        The caller has checked the identity of the process. Raises AttachRefused or Overloaded.
        """
        for name, own in (("page_bytes", self._page_bytes), ("model_digest", self._model_digest)):
            if getattr(registration, name) != own:
                raise AttachRefused(f"{name} {getattr(registration, name)!r}: this arena has {own!r}; {_ONE_OF_ALL}")
        lease_id = self._keeper.find_or_add(registration)
        self._pending.give_up_all(lease_id)  # the answer to a match may have been lost
        handed_off = self._reconcile(lease_id, registration.claims)
        self._unclaimed_lease_ids.discard(lease_id)
        return Attachment(lease_id, self._keeper.attach(lease_id), handed_off)

    def check_attached(self, lease_id: int, attachment: int) -> None:
        """Raises StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)

    def heartbeat(self, lease_id: int, attachment: int, *, is_draining: bool = False) -> None:
        """One of an attachment that has ended changes nothing. `is_draining`: it gets nothing that others leave."""
        if self._keeper.heartbeat(lease_id, attachment):
            self._adopters.set_draining(lease_id, is_draining=is_draining)

    def break_stream(self, lease_id: int, attachment: int) -> None:
        """The stream of an attachment ended."""
        self._keeper.break_stream(lease_id, attachment)

    def detach(self, lease_id: int, attachment: int) -> None:
        """The worker gives its lease up and promises to write no more. Raises StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)
        self.end_lease(lease_id)

    def end_lease(self, lease_id: int) -> None:
        """Nobody can write under this lease any more: its process has exited, or gave it up. May be called twice."""
        self._unclaimed_lease_ids.discard(lease_id)
        self._adopters.set_draining(lease_id, is_draining=False)
        if self._keeper.try_orphan(lease_id):
            self._pending.give_up_all(lease_id)
            self._counters.orphaned_total += self._table.orphan(lease_id, self._block_table_of)
            self._on_lease_end()

    def adopt_orphans(self) -> list[Announcement]:
        """Passes what workers that have ended left to living ones of their role, each sequence to the one that holds
        the fewest."""
        announcements = []
        for slot in self._adoptable_slots():
            adopter = self._adopters.try_choose()
            if adopter is None:
                break
            announcements.append(self._adopt(slot, adopter))
        return announcements

    def give_up_orphans(self) -> None:
        """No worker will come any more: from here on nothing waits for one."""
        self._are_orphans_wanted = False

    def tick(self) -> list[int]:
        """Runs the countdowns and frees orphans that wait for nobody. Returns the leases whose processes must be killed
        now."""
        waiting_for = {self._table.owner_of(slot) for slot in self._adoptable_slots()}
        for lease in self._leases.all():
            is_waiting = lease.lease_id in waiting_for and not self._keeper.has_waited(lease)
            if lease.state == LeaseState.ORPHANED and not is_waiting:
                self._free_orphans(lease.lease_id)
        to_fence = self._keeper.count_down()
        self._counters.fenced_total += len(to_fence)
        return to_fence

    def plan_next_tick(self, shortest_s: float) -> float:
        """Seconds after this tick at which the next one is to come, from here on expected then; what ends a lease
        before cannot wait for it."""
        return self._keeper.plan_next_tick(shortest_s)

    def acquire(self, lease_id: int, attachment: int, num_pages: int, num_slots: int) -> Acquired:
        """All or nothing. Raises Overloaded or StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)
        acquired = self._try_acquire(lease_id, num_pages, num_slots)
        if acquired is None:
            num_free, num_cached = self._table.num_pages(PageState.FREE), self._table.num_pages(PageState.CACHED)
            kept = f"; {num_cached} cached pages are kept until every worker has attached again"
            raise Overloaded(
                f"asked for {num_pages} pages and {num_slots} slots, free are "
                f"{num_free if self._unclaimed_lease_ids else num_free + num_cached} and "
                f"{self._table.num_slots(SlotState.FREE)}{kept if self._unclaimed_lease_ids else ''}",
                retry_after_s=_RETRY_AFTER_S,
            )
        return acquired

    def match(
        self, lease_id: int, attachment: int, request: MatchRequest, *, wait_from_pages: int | None
    ) -> PrefixMatch | None:
        """Pins the longest cached prefix, and acquires what else the prompt needs, if that is free now.

        The rest of the prefix is pending from here on: the lease will seal it, or give the match up. None: other
        matches are about to seal the next `wait_from_pages` pages or more; nothing was done. Raises StaleAttachment.
        """
        self._keeper.check_attached(lease_id, attachment)
        hashes = request.hashes if self._keeps_prefixes else ()
        pages = self._table.prefixes.find_prefix(hashes[: request.num_matchable])
        num_pending = self._pending.num_leading(hashes[len(pages) : request.num_matchable])
        if wait_from_pages is not None and num_pending >= wait_from_pages:
            self._counters.prefix_waits_total += 1
            return None
        self._table.prefixes.pin(lease_id, np.array(pages, np.int64))
        acquired = self._try_acquire(lease_id, request.num_pages_behind(len(pages)), request.num_slots)
        self._counters.prefix_hit_pages_total += len(pages)
        self._counters.prefix_missed_pages_total += request.num_matchable - len(pages)
        match_id = self._pending.declare(lease_id, hashes[len(pages) :])
        return PrefixMatch(match_id, tuple(pages), acquired or Acquired((), ()))

    def seal(self, lease_id: int, attachment: int, chain: PageChain) -> None:
        """Lets others use pages that the lease has computed and still uses. Raises NotOwned or StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)
        if self._keeps_prefixes:
            self._table.seal(lease_id, chain)
            self._pending.settle(chain.hashes)

    def release(
        self,
        lease_id: int,
        attachment: int,
        chains: Sequence[PageChain],
        slots: Sequence[int],
        match_ids: Sequence[int] = (),
    ) -> None:
        """All or nothing; pages with a hash stay as reusable prefixes. Raises NotOwned or StaleAttachment."""
        self._keeper.check_attached(lease_id, attachment)
        if not self._keeps_prefixes:
            chains = [PageChain(chain.page_ids) for chain in chains]
        self._table.check_held_pages(lease_id, [page_id for chain in chains for page_id in chain.page_ids])
        self._table.check_owned_slots(lease_id, slots)
        for slot in slots:
            self._records[slot].clear()
        self._table.release(lease_id, chains, slots)
        for chain in chains:
            self._pending.settle(chain.hashes)
        self._pending.give_up(lease_id, match_ids)

    def hand_off(self, lease_id: int, attachment: int, request: HandOffRequest) -> CommittedHandOff:
        """Passes a sequence with its pages to another worker; a repeated call finds it done. One that names nobody
        passes it to an adopter, as if its worker had ended.

        Raises NotOwned, RecordMismatch, ReceiverSilent, ReceiverGone, AdoptionOff or StaleAttachment; then nothing has
        changed.
        """
        self._keeper.check_attached(lease_id, attachment)
        try:
            self._table.check_owned_slots(lease_id, [request.slot])
            summary = self._require_record(request)
        except (NotOwned, RecordMismatch) as error:  # of a repeated call the slot may be the lease's again by now
            return self._find_committed(request, error)
        to_lease_id = self._find_receiver(lease_id, request)
        self._table.check_held_pages(lease_id, summary.page_ids)
        if not request.to_worker_id:
            summary = self._raise_adoption(request.slot)
            self._counters.handed_over_total += 1
        hashes = request.hashes[: summary.num_computed_tokens // PAGE_TOKENS] if self._keeps_prefixes else ()
        num_bytes_copied = self._mover.move(summary.page_ids)
        move = Move(request.request_id, summary.attempt, from_lease_id=lease_id, to_lease_id=to_lease_id)
        held, given_back = hashes[summary.first_page :], hashes[: summary.first_page]
        self._table.hand_off(request.slot, summary.page_ids, move, held, given_back)
        self._pending.settle(hashes)
        self._counters.handoffs_total += 1
        self._counters.handoff_pages_total += len(summary.page_ids)
        self._counters.handoff_bytes_copied_total += num_bytes_copied
        receipt = HandOffReceipt(len(summary.page_ids), num_bytes_copied)
        return CommittedHandOff(receipt, Announcement(to_lease_id, self._handed_off(request.slot, summary)))

    def metrics(self) -> Mapping[str, float]:
        """Counters (`_total`) and gauges."""
        return {
            **{name: float(value) for name, value in asdict(self._counters).items()},
            **gauges(self._table, self._leases.all()),
            "prefix_pending": float(len(self._pending)),
            **self.remote.metrics(),
        }

    def map_pages(self, max_ranges: int) -> PageMap:
        return page_map(self._table.page_rows["state"], max_ranges)

    def integrity_errors(self) -> tuple[str, ...]:
        return check_integrity(self._table, self._leases.all(), self._block_table_of)

    def _recover(self) -> None:
        leases = self._leases.all()
        self._table.rebuild((lease.lease_id for lease in leases), self._block_table_of)
        for lease in leases:
            if lease.state == LeaseState.ORPHANED:  # `orphan` may have been interrupted; it can be done again
                self._table.orphan(lease.lease_id, self._block_table_of)
        for slot in self._table.free_slots():
            self._records[slot].clear()
        self._keeper.recover()
        self._unclaimed_lease_ids = {lease.lease_id for lease in leases if lease.state != LeaseState.ORPHANED}

    def _reconcile(self, lease_id: int, claims: Claims) -> tuple[HandedOff, ...]:
        """Takes back what the lease owns and its worker does not hold: answers that got lost on their way.

        slots   held | being handed off | handed off, not yet announced | taken back
        pages   held | of the records of the two in the middle          | taken back
        """
        try:
            self._table.check_held_pages(lease_id, claims.page_ids, is_claim=True)
            self._table.check_owned_slots(lease_id, claims.slots)
        except NotOwned as error:
            raise AttachRefused(f"the worker holds what is not its own: {error}") from error
        kept_pages: list[PageIds] = [np.array(claims.page_ids, np.int64)]
        unannounced, surplus_slots = [], []
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
                unannounced.append(self._handed_off(slot, summary))
        for slot in surplus_slots:
            self._records[slot].clear()
        self._table.release(lease_id, [], surplus_slots)
        self._counters.reclaimed_pages_total += self._table.reconcile(lease_id, np.concatenate(kept_pages))
        self._counters.reclaimed_slots_total += len(surplus_slots)
        return tuple(unannounced)

    def _try_acquire(self, lease_id: int, num_pages: int, num_slots: int) -> Acquired | None:
        return self._table.try_acquire(lease_id, num_pages, num_slots, may_evict=not self._unclaimed_lease_ids)

    def _adoptable_slots(self) -> list[int]:
        """Orphaned sequences that somebody can go on with. Not a prompt half read: with its full pages as a prefix any
        prefill worker can do that. Nor one that may have killed several workers by now."""
        roles = {lease.lease_id: lease.role for lease in self._leases.all() if lease.state == LeaseState.ORPHANED}
        if not (roles and self._are_orphans_wanted and self._settings.adoption_wait_ms):  # at nearly every tick
            return []
        return [
            slot
            for slot in self._table.orphaned_slots()
            if roles.get(self._table.owner_of(slot)) == ADOPTING_ROLE
            and (summary := self._records[slot].summarize()) is not None
            and summary.num_output_tokens > 0
            and summary.attempt.adoption < self._settings.max_adoptions
        ]

    def _adopt(self, slot: int, to_lease_id: int) -> Announcement:
        """The record comes first: what is announced is newer than all that the one who died may have sent. Should this
        process die before the owner changes, the next one raises it once more."""
        summary = self._raise_adoption(slot)
        move = Move(summary.request_id, summary.attempt, self._table.owner_of(slot), to_lease_id)
        self._table.adopt(slot, summary.page_ids, move)
        self._counters.adopted_total += 1
        return Announcement(to_lease_id, self._handed_off(slot, summary))

    def _raise_adoption(self, slot: int) -> RecordSummary:
        record = self._records[slot]
        record.raise_adoption()
        summary = record.summarize()
        assert summary is not None, "nobody else writes the record of a worker that has ended, or gives it away"
        return summary

    def _find_receiver(self, lease_id: int, request: HandOffRequest) -> int:
        if request.to_worker_id:
            return self._keeper.find_receiver(request.to_worker_id)
        if not (self._are_orphans_wanted and self._settings.adoption_wait_ms):
            raise AdoptionOff("no worker adopts what another one leaves: adoption_wait_ms is 0, or the service ends")
        adopter = self._adopters.try_choose(besides=lease_id)
        if adopter is None:
            raise ReceiverGone("no other decode worker of this arena takes sequences now")
        return adopter

    def _free_orphans(self, lease_id: int) -> None:
        """What they had computed stays as reusable prefixes: whoever goes on with their requests finds it."""
        slots = self._table.slots_of(lease_id)
        chains = [self.running.chain_of(slot) for slot in slots]
        for slot in slots:
            self._records[slot].clear()
        self._table.free_orphans(lease_id, chains)
        self._keeper.remove(lease_id)

    def _require_record(self, request: HandOffRequest) -> RecordSummary:
        summary = self._records[request.slot].summarize()
        if summary is None:
            raise RecordMismatch(f"slot {request.slot} has no valid record")
        is_same = (summary.request_id, summary.attempt) == (request.request_id, request.attempt)
        if not is_same and not is_raised(summary, request):
            raise RecordMismatch(
                f"slot {request.slot} has the record of {summary.request_id} {summary.attempt}, "
                f"to be handed off is {request.request_id} {request.attempt}"
            )
        return summary

    def _find_committed(self, request: HandOffRequest, error: NotOwned | RecordMismatch) -> CommittedHandOff:
        """Raises `error` if it was not handed off."""
        num_pages = self._table.try_find_move(request.slot, request.request_id, request.attempt)
        if num_pages is None:
            raise error
        self._counters.handoffs_repeated_total += 1
        return CommittedHandOff(HandOffReceipt(num_pages, num_bytes_copied=0), announcement=None)

    def _handed_off(self, slot: int, summary: RecordSummary) -> HandedOff:
        return HandedOff(slot, self._table.slot_generation(slot), summary.request_id, summary.attempt)

    def _block_table_of(self, slot: int) -> PageIds | None:
        summary = self._records[slot].summarize()
        return None if summary is None else summary.page_ids
