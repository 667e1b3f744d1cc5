"""The ownership table: what one lease does never changes what another owns, and a restart changes nothing complete."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.life import Attempt
from weir.core.process import ProcessIdentity
from weir.kv.arena.integrity import check_integrity
from weir.kv.arena.lease import Lease, LeaseState
from weir.kv.arena.ownership import Move, NotOwned, OwnershipTable
from weir.kv.layout import PAGE_DTYPE, SLOT_DTYPE, PageState, SlotState
from weir.kv.messages import PageChain
from weir.kv.prefixes import PageIds

_NUM_PAGES = 24
_NUM_SLOTS = 5
_LEASES = (1, 2, 3)


def _no_records(slot: int) -> None:
    del slot


def _table(num_pages: int = _NUM_PAGES, num_slots: int = _NUM_SLOTS) -> OwnershipTable:
    return OwnershipTable(np.zeros(num_pages, PAGE_DTYPE), np.zeros(num_slots, SLOT_DTYPE))


def _lease(lease_id: int, state: LeaseState = LeaseState.ACTIVE) -> Lease:
    return Lease(lease_id, state, f"worker-{lease_id}", "decode", ProcessIdentity(lease_id, 1))


def _move(from_lease_id: int, to_lease_id: int, request_id: str = "r") -> Move:
    return Move(request_id, Attempt(1, 0), from_lease_id, to_lease_id)


class OwnershipMachine(RuleBasedStateMachine):
    """Random calls against the plain dictionaries `pages`, `slots` and `sequences` of what must come out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = _table()
        self.pages: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.sequences: dict[int, list[int]] = {}
        self.generations = np.zeros(_NUM_PAGES, np.uint32)

    def block_table_of(self, slot: int) -> PageIds | None:
        return np.array(self.sequences[slot], np.int64) if slot in self.sequences else None

    def _free_pages_of(self, lease_id: int) -> list[int]:
        used = {page for sequence in self.sequences.values() for page in sequence}
        return sorted(page for page, owner in self.pages.items() if owner == lease_id and page not in used)

    @rule(lease_id=st.sampled_from(_LEASES), num_pages=st.integers(0, 9), num_slots=st.integers(0, 2))
    def acquire(self, lease_id: int, num_pages: int, num_slots: int) -> None:
        acquired = self.table.try_acquire(lease_id, num_pages, num_slots)
        fits = num_pages <= _NUM_PAGES - len(self.pages) and num_slots <= _NUM_SLOTS - len(self.slots)
        assert (acquired is not None) == fits
        if acquired is not None:
            assert not set(acquired.page_ids) & set(self.pages)
            assert not set(acquired.slots) & set(self.slots)
            assert (len(acquired.page_ids), len(acquired.slots)) == (num_pages, num_slots)
            self.pages |= dict.fromkeys(acquired.page_ids, lease_id)
            self.slots |= dict.fromkeys(acquired.slots, lease_id)
            self.generations[list(acquired.page_ids)] += 1

    @precondition(lambda self: any(slot not in self.sequences for slot in self.slots))
    @rule(data=st.data())
    def begin_sequence(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.slots) - set(self.sequences))))
        candidates = self._free_pages_of(self.slots[slot])
        self.sequences[slot] = data.draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release_slot(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        sequence = self.sequences.pop(slot, [])
        self.table.release(self.slots.pop(slot), [PageChain(tuple(sequence))], [slot])
        for page in sequence:
            del self.pages[page]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_pages=st.integers(0, 5), dies=st.sampled_from(["", "worker", "service"]))
    def give_first_pages_back(self, data: st.DataObject, num_pages: int, dies: str) -> None:
        """The record says it first; whoever dies then loses no page."""
        slot = data.draw(st.sampled_from(sorted(self.sequences)))
        given, self.sequences[slot] = self.sequences[slot][:num_pages], self.sequences[slot][num_pages:]
        if dies == "worker":
            self.fence(self.slots[slot])
            return
        if dies == "service":
            self.restart()
        self.table.release(self.slots[slot], [PageChain(tuple(given))], [])
        for page in given:
            del self.pages[page]

    @rule(lease_id=st.sampled_from(_LEASES), page_ids=st.lists(st.integers(-2, _NUM_PAGES + 1), max_size=6))
    def release_pages_that_may_be_foreign(self, lease_id: int, page_ids: list[int]) -> None:
        allowed = set(self._free_pages_of(lease_id))
        if set(page_ids) <= allowed and len(set(page_ids)) == len(page_ids):
            self.table.release(lease_id, [PageChain(tuple(page_ids))], [])
            for page in page_ids:
                del self.pages[page]
        elif not set(page_ids) <= {page for page, owner in self.pages.items() if owner == lease_id}:
            with pytest.raises(NotOwned):
                self.table.release(lease_id, [PageChain(tuple(page_ids))], [])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), to_lease_id=st.sampled_from(_LEASES), dies_after_commit=st.booleans())
    def hand_off(self, data: st.DataObject, to_lease_id: int, dies_after_commit: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence, from_lease_id = self.sequences[slot], self.slots[slot]
        owners_before = self.table.page_rows["owner"].copy()
        self.table.hand_off(slot, np.array(sequence, np.int64), _move(from_lease_id, to_lease_id))
        if dies_after_commit:  # the pages' owners were not written
            self.table.page_rows["owner"] = owners_before
            self.restart()
        self.slots[slot] = to_lease_id
        self.pages |= dict.fromkeys(sequence, to_lease_id)

    @rule(lease_id=st.sampled_from(_LEASES))
    def fence(self, lease_id: int) -> None:
        lost_slots = {slot for slot, owner in self.slots.items() if owner == lease_id}
        lost_pages = [page for page, owner in self.pages.items() if owner == lease_id]
        num_orphaned = self.table.orphan(lease_id, self.block_table_of)
        assert num_orphaned == len(lost_slots & set(self.sequences))
        self.table.orphan(lease_id, self.block_table_of)  # a restart in the middle does it again
        for slot in lost_slots:
            del self.slots[slot]
            orphaned = self.sequences.pop(slot, [])
            assert (self.table.page_rows["state"][orphaned] == PageState.ORPHANED).all()
        self.table.free_orphans(lease_id)
        for page in lost_pages:
            del self.pages[page]
        self.generations[lost_pages] += 1

    @rule()
    def restart(self) -> None:
        self.table = OwnershipTable(self.table.page_rows, self.table.slot_rows)
        self.table.rebuild(_LEASES, self.block_table_of)

    @invariant()
    def the_table_is_what_the_dictionaries_say(self) -> None:
        rows = self.table.page_rows
        assert {int(page): int(rows["owner"][page]) for page in np.flatnonzero(rows["owner"])} == self.pages
        assert set(np.flatnonzero(rows["state"] == PageState.LEASED)) == set(self.pages)
        for lease_id in _LEASES:
            assert self.table.slots_of(lease_id) == sorted(s for s, owner in self.slots.items() if owner == lease_id)
        assert self.table.num_pages(PageState.FREE) == _NUM_PAGES - len(self.pages)
        assert self.table.num_slots(SlotState.FREE) == _NUM_SLOTS - len(self.slots)

    @invariant()
    def generations_rise_with_every_lease_and_every_fencing(self) -> None:
        assert self.table.page_rows["generation"].tolist() == self.generations.tolist()

    @invariant()
    def integrity_holds(self) -> None:
        assert check_integrity(self.table, [_lease(lease_id) for lease_id in _LEASES], self.block_table_of) == ()


TestOwnershipMachine = OwnershipMachine.TestCase
TestOwnershipMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_who_may_not_evict_gets_what_is_free_to_the_last_page_and_slot() -> None:
    table = _table(num_pages=4, num_slots=2)
    acquired = table.try_acquire(1, 4, 2, may_evict=False)
    assert acquired is not None
    assert (sorted(acquired.page_ids), sorted(acquired.slots)) == ([0, 1, 2, 3], [0, 1])
    assert table.try_acquire(1, 1, 0, may_evict=False) is None


def test_a_hand_off_interrupted_before_its_commit_has_not_happened() -> None:
    table = _table()
    acquired = table.try_acquire(1, 4, 1)
    assert acquired is not None
    # All that hand_off writes before the slot's owner.
    table.slot_rows["moved_request_id"][0] = b"r"
    table.slot_rows["moved_from"][0] = 1
    table.slot_rows["acquirer"][0] = 0
    table.rebuild([1, 2], {0: np.array([0, 1], np.int64)}.get)
    assert table.slots_of(1) == [0]
    assert table.pages_of(1).tolist() == [0, 1, 2, 3]


def test_a_hand_off_interrupted_right_after_its_commit_takes_all_pages_along() -> None:
    table = _table()
    acquired = table.try_acquire(1, 4, 1)
    assert acquired is not None
    table.hand_off(0, np.array([0, 1], np.int64), _move(1, 2))
    table.page_rows["owner"][1] = 1
    table.rebuild([1, 2], {0: np.array([0, 1], np.int64)}.get)
    assert table.pages_of(2).tolist() == [0, 1]
    assert table.pages_of(1).tolist() == [2, 3]


def test_a_record_that_names_pages_of_others_does_not_get_them_by_a_restart() -> None:
    table = _table()
    table.try_acquire(1, 2, 1)
    table.try_acquire(2, 2, 0)
    table.hand_off(0, np.array([0], np.int64), _move(1, 3))
    table.rebuild([1, 2, 3], {0: np.array([0, 2, 3], np.int64)}.get)
    assert table.pages_of(2).tolist() == [2, 3]


def test_what_a_vanished_lease_owned_is_free_after_a_restart() -> None:
    table = _table()
    table.try_acquire(1, 4, 1)
    table.try_acquire(2, 3, 1)
    table.rebuild([2], _no_records)
    assert table.num_pages(PageState.FREE) == _NUM_PAGES - 3
    assert table.slots_of(1) == []
    assert check_integrity(table, [_lease(2)], _no_records) == ()


def test_a_refused_hand_off_changes_nothing() -> None:
    table = _table()
    table.try_acquire(1, 2, 1)
    table.try_acquire(2, 2, 0)
    before = (table.page_rows.copy(), table.slot_rows.copy())
    with pytest.raises(NotOwned, match="lease 1 does not own 1 of the pages, the first is 2"):
        table.hand_off(0, np.array([0, 2], np.int64), _move(1, 3))
    with pytest.raises(NotOwned, match="lease 2 does not own"):
        table.hand_off(0, np.array([2], np.int64), _move(2, 3))
    assert (table.page_rows == before[0]).all()
    assert (table.slot_rows == before[1]).all()


def test_a_committed_hand_off_is_known_even_after_its_slot_was_released() -> None:
    table = _table()
    table.try_acquire(1, 2, 1)
    table.hand_off(0, np.array([0, 1], np.int64), _move(1, 2, "abc"))
    table.release(2, [PageChain((0, 1))], [0])
    assert table.try_find_move(0, "abc", Attempt(1, 0)) == 2
    assert table.try_find_move(0, "abc", Attempt(2, 0)) is None
    assert table.try_find_move(0, "abd", Attempt(1, 0)) is None


def test_a_slot_that_comes_back_to_its_acquirer_has_come_by_hand_off() -> None:
    table = _table()
    table.try_acquire(1, 0, 1)
    assert not table.came_by_hand_off(0)
    table.hand_off(0, np.array([], np.int64), _move(1, 2))
    table.hand_off(0, np.array([], np.int64), _move(2, 1))
    assert table.came_by_hand_off(0)


@pytest.mark.parametrize(
    ("page_ids", "reason"),
    [([0, 0], "must be different, 1 are repeated"), ([-1], "must be 0 to 23"), ([24], "must be 0 to 23")],
)
def test_ids_that_make_no_sense_are_refused(page_ids: Sequence[int], reason: str) -> None:
    table = _table()
    table.try_acquire(1, 2, 0)
    with pytest.raises(NotOwned, match=reason):
        table.release(1, [PageChain(tuple(page_ids))], [])
