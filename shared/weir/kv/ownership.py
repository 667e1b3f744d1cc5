"""The ownership table: which lease owns which page and which slot. The transfer service alone writes it.

    FREE ──acquire──> LEASED ──release──> FREE            owner = the lease
                        └──orphan──> ORPHANED ──> FREE    its process is dead

A page's or slot's generation rises when it is leased and when fencing takes it from a dead owner: whoever remembers
an older one knows that what he holds is not his any more.

All operations are vectorised over views of the segment. One writer, whose death may fall between any two writes:
a slot's owner is the truth about its sequence, and `rebuild` brings everything else into line with it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.core.attempt import Attempt

NO_LEASE = 0

PageIds = NDArray[np.int64]
BlockTableOf = Callable[[int], PageIds | None]
"""The published pages of a slot's sequence; None if the slot has no valid record."""


class PageState(IntEnum):
    """CACHED: kept as a reusable prefix, owned by nobody."""

    FREE = 0
    LEASED = 1
    ORPHANED = 2
    CACHED = 3


class SlotState(IntEnum):
    """As for pages."""

    FREE = 0
    LEASED = 1
    ORPHANED = 2


class NotOwned(Exception):
    """A lease named pages or slots that it does not own. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """What a lease was given."""

    page_ids: tuple[int, ...]
    slots: tuple[int, ...]


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

    def slot_generation(self, slot: int) -> int:
        return int(self.slot_rows["generation"][slot])

    def came_by_hand_off(self, slot: int) -> bool:
        """Whether its owner got it from another lease and did not acquire it."""
        return bool(self.slot_rows["owner"][slot] != self.slot_rows["acquirer"][slot])

    def try_acquire(self, lease_id: int, num_pages: int, num_slots: int) -> Acquired | None:
        """Gives the lease all of what it asks for, or nothing: None."""
        page_ids = np.flatnonzero(self.page_rows["state"] == PageState.FREE)[:num_pages]
        slots = np.flatnonzero(self.slot_rows["state"] == SlotState.FREE)[:num_slots]
        if len(page_ids) < num_pages or len(slots) < num_slots:
            return None
        self.page_rows["generation"][page_ids] += 1
        self.page_rows["refcount"][page_ids] = 1
        self.page_rows["owner"][page_ids] = lease_id
        self.page_rows["state"][page_ids] = PageState.LEASED
        self.slot_rows["generation"][slots] += 1
        self.slot_rows["acquirer"][slots] = lease_id
        self.slot_rows["owner"][slots] = lease_id
        self.slot_rows["state"][slots] = SlotState.LEASED
        return Acquired(tuple(page_ids.tolist()), tuple(slots.tolist()))

    def release(self, lease_id: int, page_ids: Collection[int], slots: Collection[int]) -> None:
        """Takes all of them back, or raises NotOwned. The slots' records must have been cleared before."""
        pages = self.check_owned_pages(lease_id, page_ids)
        checked_slots = self.check_owned_slots(lease_id, slots)
        self._free_slots(checked_slots)
        self._free_pages(pages)

    def check_owned_pages(self, lease_id: int, page_ids: Collection[int] | PageIds) -> PageIds:
        """The ids as an array, or NotOwned: an id that is not there, not the lease's, or named twice."""
        return _checked_ids("page", page_ids, self.page_rows, lease_id)

    def check_owned_slots(self, lease_id: int, slots: Collection[int]) -> PageIds:
        """As for pages."""
        return _checked_ids("slot", slots, self.slot_rows, lease_id)

    def hand_off(self, slot: int, page_ids: PageIds, move: Move) -> None:
        """Passes the slot and its pages to `move.to_lease_id`, or raises NotOwned. Page ids stay what they are."""
        self.check_owned_slots(move.from_lease_id, [slot])
        pages = self.check_owned_pages(move.from_lease_id, page_ids)
        row = self.slot_rows[slot : slot + 1]
        row["moved_request_id"] = move.request_id.encode()
        row["moved_dispatch"] = move.attempt.dispatch
        row["moved_adoption"] = move.attempt.adoption
        row["moved_from"] = move.from_lease_id
        row["moved_num_pages"] = len(pages)
        row["acquirer"] = (
            NO_LEASE  # whoever owns the slot from here on has it by hand-off, the acquirer itself included
        )
        row["owner"] = move.to_lease_id  # the commit point; what follows `rebuild` would do as well
        self.page_rows["owner"][pages] = move.to_lease_id

    def try_find_move(self, slot: int, request_id: str, attempt: Attempt) -> int | None:
        """Number of pages of the slot's last hand-off if it was this one.

        Only for a slot that the asker does not own: then it was committed, whatever became of the slot since.
        """
        if slot >= len(self.slot_rows):
            return None
        row = self.slot_rows[slot]
        recorded = (bytes(row["moved_request_id"]).decode(), int(row["moved_dispatch"]), int(row["moved_adoption"]))
        if recorded != (request_id, attempt.dispatch, attempt.adoption):
            return None
        return int(row["moved_num_pages"])

    def orphan(self, lease_id: int, block_table_of: BlockTableOf) -> int:
        """Its process is dead: sequences and their pages become ORPHANED, everything else of the lease is freed.

        Returns the number of orphaned sequences.
        """
        num_orphaned = 0
        for slot in self.slots_of(lease_id):
            block_table = block_table_of(slot)
            if block_table is None:
                continue
            own_pages = block_table[self.page_rows["owner"][block_table] == lease_id]
            self.page_rows["state"][own_pages] = PageState.ORPHANED
            self.slot_rows["state"][slot] = SlotState.ORPHANED
            num_orphaned += 1
        self._free_fenced(lease_id, PageState.LEASED, SlotState.LEASED)
        return num_orphaned

    def free_orphans(self, lease_id: int) -> None:
        """Frees what `orphan` left. The slots' records must have been cleared before."""
        self._free_fenced(lease_id, PageState.ORPHANED, SlotState.ORPHANED)

    def rebuild(self, lease_ids: Iterable[int], block_table_of: BlockTableOf) -> None:
        """Ends what a death of the writer interrupted, given the leases that there are. Changes no complete table."""
        known = np.fromiter(lease_ids, np.uint32)
        for rows in (self.page_rows, self.slot_rows):
            owned = (rows["state"] == PageState.LEASED) | (rows["state"] == PageState.ORPHANED)
            rows["state"][owned & ~np.isin(rows["owner"], known)] = PageState.FREE
        self._free_slots(np.flatnonzero(self.slot_rows["state"] == SlotState.FREE))
        self._free_pages(np.flatnonzero(self.page_rows["state"] == PageState.FREE))
        for slot in np.flatnonzero(self.slot_rows["state"] == SlotState.LEASED).tolist():
            block_table = block_table_of(slot) if self.came_by_hand_off(slot) else None
            if block_table is not None:
                row = self.slot_rows[slot]
                left_behind = block_table[self.page_rows["owner"][block_table] == row["moved_from"]]
                self.page_rows["owner"][left_behind] = row["owner"]

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
        self.page_rows["sealed"][pages] = 0
        self.page_rows["hash"][pages] = 0


def _checked_ids(kind: str, given: Collection[int] | PageIds, rows: NDArray[Any], lease_id: int) -> PageIds:
    ids = given if isinstance(given, np.ndarray) else np.fromiter(given, np.int64, len(given))
    if not ids.size:
        return ids
    if ids.min() < 0 or ids.max() >= len(rows):
        raise NotOwned(f"{kind} ids must be 0 to {len(rows) - 1}, given are {ids.min()} to {ids.max()}")
    foreign = ids[(rows["owner"][ids] != lease_id) | (rows["state"][ids] != PageState.LEASED)]
    if foreign.size:
        raise NotOwned(f"lease {lease_id} does not own {foreign.size} of the {kind}s, the first is {foreign[0]}")
    if len(np.unique(ids)) < len(ids):
        raise NotOwned(f"{kind} ids must be different, {len(ids) - len(np.unique(ids))} are repeated")
    return ids
