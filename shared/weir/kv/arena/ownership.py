"""The ownership table: which lease owns which page and which slot. The transfer service alone writes it.

`weir.kv.layout` has the states, `weir.kv.prefixes` the pages that nobody owns because all may read them. What a
lease holds is its own or is pinned by it. A worker need not know which: it gives back what it holds.

A page's or slot's generation rises when it is leased and when fencing takes it from a dead owner: what was held under
an older one is not held any more.

All operations are vectorised over views of the segment. One writer, whose death may fall between any two writes:
a slot's owner is the truth about its sequence, and `rebuild` brings everything else into line with it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.core.life import Attempt
from weir.kv.layout import NO_LEASE, PageState, SlotState
from weir.kv.messages import Acquired, PageChain
from weir.kv.prefixes import PageIds, PinCounts, PrefixIndex

BlockTableOf = Callable[[int], PageIds | None]
"""The published pages of a slot's sequence; None if the slot has no valid record."""


class NotOwned(Exception):
    """A lease named pages or slots that it does not own. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Move:
    """A hand-off. The slot's row remembers it, so that a repeated call is known and an interrupted one completed."""

    request_id: str
    attempt: Attempt
    from_lease_id: int
    to_lease_id: int


class OwnershipTable:
    """`page_rows`: PAGE_DTYPE [num_pages]; `slot_rows`: SLOT_DTYPE [num_slots]."""

    def __init__(self, page_rows: NDArray[Any], slot_rows: NDArray[Any]) -> None:
        self.page_rows = page_rows
        self.slot_rows = slot_rows
        self.prefixes = PrefixIndex(page_rows)

    def num_slots(self, state: SlotState) -> int:
        return int(np.count_nonzero(self.slot_rows["state"] == state))

    def num_pages(self, state: PageState) -> int:
        return int(np.count_nonzero(self.page_rows["state"] == state))

    def pages_of(self, lease_id: int) -> PageIds:
        return np.flatnonzero(self.page_rows["owner"] == lease_id)

    def slots_of(self, lease_id: int) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.slot_rows["owner"] == lease_id)]

    def free_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.slot_rows["state"] == SlotState.FREE)]

    def orphaned_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.slot_rows["state"] == SlotState.ORPHANED)]

    def owner_of(self, slot: int) -> int:
        return int(self.slot_rows["owner"][slot])

    def slot_generation(self, slot: int) -> int:
        return int(self.slot_rows["generation"][slot])

    def came_by_hand_off(self, slot: int) -> bool:
        """Whether its owner got it from another lease and did not acquire it."""
        return bool(self.slot_rows["owner"][slot] != self.slot_rows["acquirer"][slot])

    def try_acquire(self, lease_id: int, num_pages: int, num_slots: int, *, may_evict: bool = True) -> Acquired | None:
        """Gives the lease all of what it asks for, or nothing: None. Evicts cached pages where too few are free."""
        page_ids = np.flatnonzero(self.page_rows["state"] == PageState.FREE)[:num_pages]
        slots = np.flatnonzero(self.slot_rows["state"] == SlotState.FREE)[:num_slots]
        if len(slots) < num_slots or (len(page_ids) < num_pages and not may_evict):
            return None
        if len(page_ids) < num_pages:
            evicted = self.prefixes.try_evict(num_pages - len(page_ids))
            if evicted is None:
                return None
            self._free_pages(evicted)
            page_ids = np.concatenate([page_ids, evicted])
        self.page_rows["generation"][page_ids] += 1
        self.page_rows["refcount"][page_ids] = 1
        self.page_rows["owner"][page_ids] = lease_id
        self.page_rows["state"][page_ids] = PageState.LEASED
        self.slot_rows["generation"][slots] += 1
        self.slot_rows["acquirer"][slots] = lease_id
        self.slot_rows["owner"][slots] = lease_id
        self.slot_rows["state"][slots] = SlotState.LEASED
        return Acquired(tuple(page_ids.tolist()), tuple(slots.tolist()))

    def release(self, lease_id: int, chains: Sequence[PageChain], slots: Collection[int]) -> None:
        """Takes all of them back, or raises NotOwned. The slots' records must have been cleared before.

        What has a hash is kept as a reusable prefix, unless there is a page with that hash already.
        """
        pages = [_as_ids(chain.page_ids) for chain in chains]
        self.check_held_pages(lease_id, np.concatenate(pages) if pages else _as_ids(()))
        self._free_slots(self.check_owned_slots(lease_id, slots))
        for chain, chain_pages in zip(chains, pages, strict=True):
            is_pinned = self.prefixes.is_sealed(chain_pages)
            self.prefixes.unpin(lease_id, chain_pages[is_pinned])
            self._keep(NO_LEASE, chain_pages, chain.hashes, chain.earlier_hashes, ~is_pinned)
            self._free_pages(chain_pages[~is_pinned & ~self.prefixes.is_sealed(chain_pages)])

    def seal(self, lease_id: int, chain: PageChain) -> None:
        """Lets others use what the lease has computed and still uses; it pins these pages. Raises NotOwned.

        Nothing is done where a page before them is not kept.
        """
        pages = _as_ids(chain.page_ids)
        self.check_held_pages(lease_id, pages)
        self._keep(lease_id, pages, chain.hashes, chain.earlier_hashes, ~self.prefixes.is_sealed(pages))

    def check_held_pages(self, lease_id: int, page_ids: Collection[int] | PageIds, *, is_claim: bool = False) -> None:
        """Raises NotOwned: an id that is not there, neither the lease's nor pinned by it, or named too often.

        A worker that claims sealed pages pins them by that.
        """
        ids = _valid_ids("page", page_ids, len(self.page_rows))
        rows = self.page_rows
        are_own = bool(((rows["owner"][ids] == lease_id) & (rows["state"][ids] == PageState.LEASED)).all())
        if are_own and _are_different(ids):
            return  # as mostly; what follows takes three times as long
        different, counts = np.unique(ids, return_counts=True)
        is_own = (rows["owner"][different] == lease_id) & (rows["state"][different] == PageState.LEASED)
        is_sealed = self.prefixes.is_sealed(different)
        allowed = np.where(is_own, 1, self.prefixes.pins_of(lease_id)[different])
        is_fine = (is_sealed & is_claim) | (counts <= allowed)
        foreign = different[~is_fine & ~is_own]
        if foreign.size:
            raise NotOwned(f"lease {lease_id} does not own {foreign.size} of the pages, the first is {foreign[0]}")
        if not is_fine.all():
            raise NotOwned(f"page ids must be different, {np.count_nonzero(~is_fine)} are repeated")

    def check_owned_slots(self, lease_id: int, slots: Collection[int]) -> PageIds:
        """The ids as an array, or NotOwned: an id that is not there, not the lease's, or named twice."""
        ids = _valid_ids("slot", slots, len(self.slot_rows))
        foreign = ids[(self.slot_rows["owner"][ids] != lease_id) | (self.slot_rows["state"][ids] != SlotState.LEASED)]
        if foreign.size:
            raise NotOwned(f"lease {lease_id} does not own {foreign.size} of the slots, the first is {foreign[0]}")
        if not _are_different(ids):
            raise NotOwned(f"slot ids must be different, {len(ids) - len(np.unique(ids))} are repeated")
        return ids

    def reconcile(self, lease_id: int, held: PageIds) -> int:
        """The lease holds exactly `held` (checked; a page it pins twice is named twice). Returns what was freed."""
        is_sealed = self.prefixes.is_sealed(held)
        surplus = np.setdiff1d(self.pages_of(lease_id), held[~is_sealed])
        self._free_pages(surplus)
        self.prefixes.replace_pins(lease_id, self._counts(held[is_sealed]))
        return len(surplus)

    def hand_off(
        self,
        slot: int,
        page_ids: PageIds,
        move: Move,
        hashes: Sequence[bytes] = (),
        earlier_hashes: Sequence[bytes] = (),
    ) -> None:
        """Passes the slot and its pages to `move.to_lease_id`, or raises NotOwned. Page ids stay what they are.

        The first pages are sealed, pinned by the receiver: both kinds of hashes are as in `PageChain`.
        """
        self.check_owned_slots(move.from_lease_id, [slot])
        self.check_held_pages(move.from_lease_id, page_ids)
        is_pinned = self.prefixes.is_sealed(page_ids)
        row = self.slot_rows[slot : slot + 1]
        _note_move(row, move, len(page_ids))
        if row["acquirer"] == move.to_lease_id:  # it owns the slot by hand-off from here on, and so does its sender
            row["acquirer"] = NO_LEASE
        row["owner"] = move.to_lease_id  # the commit point; what follows `rebuild` would do as well
        self.page_rows["owner"][page_ids[~is_pinned]] = move.to_lease_id
        self.prefixes.move_pins(move.from_lease_id, move.to_lease_id, page_ids[is_pinned])
        self._keep(move.to_lease_id, page_ids, hashes, earlier_hashes, ~is_pinned)

    def adopt(self, slot: int, page_ids: PageIds, move: Move) -> None:
        """Passes an ORPHANED slot and its pages to `move.to_lease_id`. Page ids stay what they are."""
        is_own = self.page_rows["owner"][page_ids] == move.from_lease_id
        is_pinned = self.prefixes.is_sealed(page_ids)
        row = self.slot_rows[slot : slot + 1]
        _note_move(row, move, len(page_ids))
        row["acquirer"] = NO_LEASE  # it came by hand-off, so that its new owner is told of it
        row["state"] = SlotState.LEASED  # of a lease that has ended: until the next write `orphan` takes that back
        row["owner"] = move.to_lease_id  # the commit point; what follows `rebuild` would do as well
        self.page_rows["state"][page_ids[is_own]] = PageState.LEASED
        self.page_rows["owner"][page_ids[is_own]] = move.to_lease_id
        self.prefixes.move_pins(move.from_lease_id, move.to_lease_id, page_ids[is_pinned])

    def try_find_move(self, slot: int, request_id: str, attempt: Attempt) -> int | None:
        """Number of pages of the slot's last hand-off if it was this one, or an adoption of what this one passed on.

        Only for a slot that is not the asker's, or not with this sequence: then it was committed, whatever became of
        the slot since.
        """
        if slot >= len(self.slot_rows):
            return None
        row = self.slot_rows[slot]
        is_same = (bytes(row["moved_request_id"]).decode(), int(row["moved_dispatch"])) == (
            request_id,
            attempt.dispatch,
        )
        if not is_same or row["moved_adoption"] < attempt.adoption:
            return None
        return int(row["moved_num_pages"])

    def orphan(self, lease_id: int, block_table_of: BlockTableOf) -> int:
        """Its process is dead: sequences and their pages become ORPHANED, everything else of the lease is freed.

        What it pinned stays pinned as far as these sequences use it. Returns their number.
        """
        num_orphaned = 0
        pins = self._counts(_as_ids(()))
        for slot in self.slots_of(lease_id):
            block_table = block_table_of(slot)
            if block_table is None:
                continue
            own_pages = block_table[self.page_rows["owner"][block_table] == lease_id]
            self.page_rows["state"][own_pages] = PageState.ORPHANED
            self.slot_rows["state"][slot] = SlotState.ORPHANED
            pins += self._counts(block_table[self.prefixes.is_sealed(block_table)])
            num_orphaned += 1
        self.prefixes.replace_pins(lease_id, pins)
        self._free_fenced(lease_id, PageState.LEASED, SlotState.LEASED)
        return num_orphaned

    def free_orphans(self, lease_id: int, chains: Iterable[PageChain] = ()) -> None:
        """Frees what `orphan` left; pages of its sequences that have a hash in `chains` stay as reusable prefixes.

        The slots' records must have been cleared before.
        """
        # those with their first pages first: others may go on from there
        for chain in sorted(chains, key=lambda chain: len(chain.earlier_hashes)):
            pages = _as_ids(chain.page_ids)
            rows = self.page_rows
            is_own = (rows["owner"][pages] == lease_id) & (rows["state"][pages] == PageState.ORPHANED)
            self._keep(NO_LEASE, pages, chain.hashes, chain.earlier_hashes, is_own)
        self.prefixes.replace_pins(lease_id, self._counts(_as_ids(())))
        self._free_fenced(lease_id, PageState.ORPHANED, SlotState.ORPHANED)

    def rebuild(self, lease_ids: Iterable[int], block_table_of: BlockTableOf) -> None:
        """Ends what a death of the writer interrupted, given the leases that there are. Changes no complete table.

        Pinned is after that what block tables show; workers claim what else they hold when they attach again.
        """
        known = np.fromiter(lease_ids, np.uint32)
        for rows in (self.page_rows, self.slot_rows):
            owned = (rows["state"] == PageState.LEASED) | (rows["state"] == PageState.ORPHANED)
            rows["state"][owned & ~np.isin(rows["owner"], known)] = PageState.FREE
        self._free_slots(np.flatnonzero(self.slot_rows["state"] == SlotState.FREE))
        self._free_pages(np.flatnonzero(self.page_rows["state"] == PageState.FREE))
        is_owned = (self.page_rows["state"] == PageState.LEASED) | (self.page_rows["state"] == PageState.ORPHANED)
        self.page_rows["refcount"][is_owned] = 1  # sealing them may have begun
        self.prefixes.recover()
        for slot in np.flatnonzero(self.slot_rows["state"] != SlotState.FREE).tolist():
            block_table = block_table_of(slot)
            if block_table is not None:
                self._rebuild_sequence(slot, block_table)

    def _rebuild_sequence(self, slot: int, block_table: PageIds) -> None:
        row = self.slot_rows[slot]
        if row["state"] == SlotState.LEASED and self.came_by_hand_off(slot):
            left_behind = block_table[self.page_rows["owner"][block_table] == row["moved_from"]]
            self.page_rows["state"][left_behind] = PageState.LEASED  # of an adoption they may still be ORPHANED
            self.page_rows["owner"][left_behind] = row["owner"]
        self.prefixes.pin(int(row["owner"]), block_table[self.prefixes.is_sealed(block_table)])

    def _keep(
        self,
        lease_id: int,
        pages: PageIds,
        hashes: Sequence[bytes],
        earlier_hashes: Sequence[bytes],
        is_own: NDArray[np.bool_],
    ) -> None:
        """Seals the pages that have a hash and that `is_own` marks, unless a page before them is not kept: nobody who
        looks for this prefix gets to them then. What is kept of the prefix counts as used now."""
        if len(self.prefixes.find_prefix(earlier_hashes)) == len(earlier_hashes):
            own = np.flatnonzero(is_own[: len(hashes)])
            self.prefixes.seal(lease_id, pages[own], [hashes[index] for index in own.tolist()])
        self.prefixes.touch((*earlier_hashes, *hashes))

    def _counts(self, page_ids: PageIds) -> PinCounts:
        return np.bincount(page_ids, minlength=len(self.page_rows)).astype(np.uint32)

    def _free_fenced(self, lease_id: int, page_state: PageState, slot_state: SlotState) -> None:
        pages = np.flatnonzero((self.page_rows["owner"] == lease_id) & (self.page_rows["state"] == page_state))
        slots = np.flatnonzero((self.slot_rows["owner"] == lease_id) & (self.slot_rows["state"] == slot_state))
        self.slot_rows["generation"][slots] += 1
        self.page_rows["generation"][pages] += 1
        self._free_slots(slots)
        self._free_pages(pages)

    def _free_slots(self, slots: PageIds) -> None:
        self.slot_rows["state"][slots] = SlotState.FREE
        self.slot_rows["owner"][slots] = NO_LEASE
        self.slot_rows["acquirer"][slots] = NO_LEASE

    def _free_pages(self, pages: PageIds) -> None:
        self.page_rows["state"][pages] = PageState.FREE
        self.page_rows["owner"][pages] = NO_LEASE
        self.page_rows["refcount"][pages] = 0
        self.page_rows["hash"][pages] = 0


def _note_move(row: NDArray[Any], move: Move, num_pages: int) -> None:
    row["moved_request_id"] = move.request_id.encode()
    row["moved_dispatch"] = move.attempt.dispatch
    row["moved_adoption"] = move.attempt.adoption
    row["moved_from"] = move.from_lease_id
    row["moved_num_pages"] = num_pages


def _as_ids(given: Collection[int] | PageIds) -> PageIds:
    return given if isinstance(given, np.ndarray) else np.fromiter(given, np.int64, len(given))


def _are_different(ids: PageIds) -> bool:
    return len(set(ids.tolist())) == ids.size


def _valid_ids(kind: str, given: Collection[int] | PageIds, num_rows: int) -> PageIds:
    ids = _as_ids(given)
    if ids.size and not 0 <= ids.min() <= ids.max() < num_rows:
        raise NotOwned(f"{kind} ids must be 0 to {num_rows - 1}, given are {ids.min()} to {ids.max()}")
    return ids
