"""check_integrity: one sentence for each thing that is wrong, and none for what only looks wrong for a moment."""

from collections.abc import Collection

import numpy as np
import pytest

from weir.core.process import ProcessIdentity
from weir.kv.arena.integrity import check_integrity
from weir.kv.arena.lease import Lease, LeaseState
from weir.kv.arena.ownership import OwnershipTable
from weir.kv.layout import PAGE_DTYPE, SLOT_DTYPE, PageState
from weir.kv.prefixes import PageIds


def _no_records(slot: int) -> None:
    del slot


def _table() -> OwnershipTable:
    return OwnershipTable(np.zeros(24, PAGE_DTYPE), np.zeros(5, SLOT_DTYPE))


def _lease(lease_id: int) -> Lease:
    return Lease(lease_id, LeaseState.ACTIVE, f"worker-{lease_id}", "decode", ProcessIdentity(lease_id, 1))


def _damage_owner(table: OwnershipTable) -> None:
    table.page_rows["owner"][9] = 1


def _damage_lease(table: OwnershipTable) -> None:
    table.page_rows["owner"][0] = 77


def _damage_state(table: OwnershipTable) -> None:
    table.slot_rows["state"][1] = 9


def _damage_refcount(table: OwnershipTable) -> None:
    table.page_rows["refcount"][0] = 0


def _damage_orphan(table: OwnershipTable) -> None:
    table.page_rows["state"][0] = PageState.ORPHANED


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_damage_owner, "page 9 is free or cached but has an owner (owner 1)"),
        (_damage_lease, "page 0 is leased to a lease that does not live (owner 77)"),
        (_damage_state, "slot 1 has a state that does not exist (owner 0)"),
        (_damage_refcount, "page 0 has reference count 0 in state 1"),
        (_damage_orphan, "page 0 is orphaned but its owner is not (owner 1)"),
    ],
)
def test_integrity_names_what_is_wrong_with_a_row(damage: object, sentence: str) -> None:
    table = _table()
    table.try_acquire(1, 2, 1)
    assert check_integrity(table, [_lease(1)], _no_records) == ()
    assert callable(damage)
    damage(table)
    assert sentence in check_integrity(table, [_lease(1)], _no_records)


def test_integrity_names_what_is_wrong_between_records_and_table() -> None:
    table = _table()
    table.try_acquire(1, 4, 2)
    table.try_acquire(2, 1, 0)
    block_tables = {0: np.array([0, 1, 4], np.int64), 1: np.array([1], np.int64), 3: np.array([9], np.int64)}
    errors = check_integrity(table, [_lease(1), _lease(2)], block_tables.get)
    assert errors == (
        "page 4 is in the block table of slot 0 but has another owner",
        "page 1 is in the block tables of slots 0 and 1",
        "slot 3 is free but has a sequence record",
    )


def test_a_record_that_changes_while_it_is_looked_at_is_no_error() -> None:
    table = _table()
    table.try_acquire(1, 2, 2)
    answers: dict[int, list[Collection[int] | None]] = {0: [[0], None], 1: [[0], [0]]}

    def block_table_of(slot: int) -> PageIds | None:
        pages = answers[slot].pop(0) if answers.get(slot) else None
        return None if pages is None else np.array(list(pages), np.int64)

    assert check_integrity(table, [_lease(1)], block_table_of) == ()
