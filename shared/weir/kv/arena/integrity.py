"""What must hold between the ownership table, the leases and the records, at any moment between two calls."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.kv.arena.lease import Lease, LeaseState, LeaseTable
from weir.kv.arena.ownership import BlockTableOf, OwnershipTable
from weir.kv.layout import NO_LEASE, TRANSFER_LEASE, PageState, SlotState

_MAX_LEASE_ID = _MAX_STARTS = 1 << 31
_MAX_ATTACHMENT = 1 << 62


def find_damage(
    lease_rows: NDArray[Any], counters: NDArray[Any], table: OwnershipTable, block_table_of: BlockTableOf
) -> str:
    """Why nobody could go on with these tables: some of their bits were turned, which no death of their writer does.
    Empty: nothing. What would be done at a start is tried on copies."""
    try:
        leases = LeaseTable(lease_rows, counters).all()
    except ValueError as error:  # a state that does not exist, a name that is not UTF-8
        return f"a lease cannot be read ({error})"
    ids = [lease.lease_id for lease in leases]
    next_id = int(counters["next_lease_id"])
    if len(set(ids)) < len(ids) or not all(0 < lease_id < next_id for lease_id in ids) or next_id > _MAX_LEASE_ID:
        return f"leases {ids} are not different ones below the next, {next_id}"
    if counters["incarnation"] > _MAX_STARTS or counters["next_attachment"] > _MAX_ATTACHMENT:
        return f"nobody counts up to {counters}"
    for kind, rows, most in (("page", table.page_rows, max(PageState)), ("slot", table.slot_rows, max(SlotState))):
        for index in np.flatnonzero(rows["state"] > most).tolist()[:1]:
            return f"{kind} {index} has state {rows['state'][index]}, which does not exist"
    tried = OwnershipTable(table.page_rows.copy(), table.slot_rows.copy())
    tried.rebuild(ids, block_table_of)
    for lease in leases:
        if lease.state == LeaseState.ORPHANED:
            tried.orphan(lease.lease_id, block_table_of)
    free = set(tried.free_slots())  # whose records are cleared at a start
    errors = check_integrity(tried, leases, lambda slot: None if slot in free else block_table_of(slot))
    return "; ".join(errors[:3])


def check_integrity(table: OwnershipTable, leases: list[Lease], block_table_of: BlockTableOf) -> tuple[str, ...]:
    """One sentence for each thing that is wrong; none when all is well.

    Workers write their records meanwhile, so what the records show counts only if a second look shows it again.
    """
    errors = [
        *_row_errors("page", table.page_rows, leases),
        *_row_errors("slot", table.slot_rows, leases),
        *_refcount_errors(table),
        *table.prefixes.integrity_errors(),
    ]
    suspected = list(_record_errors(table, block_table_of))
    if suspected:
        confirmed = set(_record_errors(table, block_table_of))
        errors += [error for error in suspected if error in confirmed]
    return tuple(errors)


def _row_errors(kind: str, rows: NDArray[Any], leases: list[Lease]) -> Iterator[str]:
    live_ids = [TRANSFER_LEASE, *(lease.lease_id for lease in leases if lease.state != LeaseState.ORPHANED)]
    orphaned_ids = [lease.lease_id for lease in leases if lease.state == LeaseState.ORPHANED]
    leased, orphaned = rows["state"] == PageState.LEASED, rows["state"] == PageState.ORPHANED
    checks = (
        ("is free or cached but has an owner", ~leased & ~orphaned & (rows["owner"] != NO_LEASE)),
        ("is leased to a lease that does not live", leased & ~np.isin(rows["owner"], live_ids)),
        ("is orphaned but its owner is not", orphaned & ~np.isin(rows["owner"], orphaned_ids)),
        ("has a state that does not exist", rows["state"] > max(PageState)),
    )
    for sentence, wrong in checks:
        for index in np.flatnonzero(wrong).tolist():
            yield f"{kind} {index} {sentence} (owner {rows['owner'][index]})"


def _refcount_errors(table: OwnershipTable) -> Iterator[str]:
    rows = table.page_rows
    owned = (rows["state"] == PageState.LEASED) | (rows["state"] == PageState.ORPHANED)
    wrong = (owned & (rows["refcount"] != 1)) | ((rows["state"] == PageState.FREE) & (rows["refcount"] > 0))
    for page_id in np.flatnonzero(wrong).tolist():
        yield f"page {page_id} has reference count {rows['refcount'][page_id]} in state {rows['state'][page_id]}"


def _record_errors(table: OwnershipTable, block_table_of: BlockTableOf) -> Iterator[str]:
    """An own page is in one block table, that of its owner; a shared one in no more than its owners pin."""
    slot_of_page = np.full(len(table.page_rows), -1, np.int64)
    needed_pins: dict[int, NDArray[np.int64]] = {}
    for slot in range(len(table.slot_rows)):
        block_table = block_table_of(slot)
        if block_table is None:
            continue
        if table.slot_rows["state"][slot] == SlotState.FREE:
            yield f"slot {slot} is free but has a sequence record"
            continue
        owner = int(table.slot_rows["owner"][slot])
        is_sealed = table.prefixes.is_sealed(block_table)
        needed = needed_pins.setdefault(owner, np.zeros(len(table.page_rows), np.int64))
        needed += np.bincount(block_table[is_sealed], minlength=len(needed))
        own = block_table[~is_sealed]
        for page_id in own[table.page_rows["owner"][own] != owner].tolist():
            yield f"page {page_id} is in the block table of slot {slot} but has another owner"
        for page_id in own[slot_of_page[own] >= 0].tolist():
            yield f"page {page_id} is in the block tables of slots {slot_of_page[page_id]} and {slot}"
        slot_of_page[own] = slot
    for lease_id, needed in needed_pins.items():
        for page_id in np.flatnonzero(needed > table.prefixes.pins_of(lease_id)).tolist():
            yield f"page {page_id} is shared by {needed[page_id]} sequences of lease {lease_id}, which pins it less"
