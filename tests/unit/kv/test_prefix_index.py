"""The prefix cache in the ownership table, against what pages really hold: nobody finds or keeps a wrong page."""

import hashlib
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.life import Attempt
from weir.core.process import ProcessIdentity
from weir.kv.arena.integrity import check_integrity
from weir.kv.arena.lease import Lease, LeaseState
from weir.kv.arena.ownership import Move, OwnershipTable
from weir.kv.layout import NO_LEASE, PAGE_DTYPE, SLOT_DTYPE, PageState
from weir.kv.messages import PageChain
from weir.kv.prefixes import PageIds

_NUM_PAGES = 16
_NUM_SLOTS = 4
_LEASES = (1, 2)

Text = tuple[int, ...]
"""One letter a page; page i of a text holds everything up to letter i."""
_texts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def hashes_of(text: Text) -> tuple[bytes, ...]:
    ends = range(1, len(text) + 1)
    return tuple(hashlib.blake2b(bytes(text[:end]), digest_size=16).digest() for end in ends)


@dataclass
class Running:
    """A sequence whose last page is its own and is being written. `block_table` begins at its page `first_page`."""

    lease_id: int
    text: Text
    block_table: list[int]
    first_page: int = 0

    @property
    def num_full(self) -> int:
        return len(self.text)

    def chain(self, num_hashes: int) -> PageChain:
        return PageChain.of_sequence(tuple(self.block_table), self.first_page, hashes_of(self.text)[:num_hashes])


class PrefixMachine(RuleBasedStateMachine):
    """`holds` is what was last written to a page: a text, or a stranger's scribble."""

    def __init__(self) -> None:
        super().__init__()
        self.page_rows, self.slot_rows = np.zeros(_NUM_PAGES, PAGE_DTYPE), np.zeros(_NUM_SLOTS, SLOT_DTYPE)
        self.table = OwnershipTable(self.page_rows, self.slot_rows)
        self.holds: dict[int, Text | str] = {}
        self.running: dict[int, Running] = {}
        self.matched: list[tuple[int, list[int]]] = []  # pinned, not yet in a sequence
        self.uses_before: dict[int, tuple[bytes, int]] = {}  # of sealed pages: hash, and when it was used

    def block_table_of(self, slot: int) -> PageIds | None:
        return np.array(self.running[slot].block_table, np.int64) if slot in self.running else None

    def slots(self) -> st.SearchStrategy[int]:
        return st.sampled_from(sorted(self.running))

    @rule(lease_id=st.sampled_from(_LEASES), text=_texts)
    def start(self, lease_id: int, text: Text) -> None:
        pages = self.table.prefixes.find_prefix(hashes_of(text))
        self.table.prefixes.pin(lease_id, np.array(pages, np.int64))
        acquired = self.table.try_acquire(lease_id, len(text) + 1 - len(pages), 1)
        if acquired is None:
            self.matched.append((lease_id, pages))
            return
        for index, page in enumerate(acquired.page_ids, len(pages)):
            self.holds[page] = text[: index + 1] if index < len(text) else "unfinished"
        self.running[acquired.slots[0]] = Running(lease_id, text, [*pages, *acquired.page_ids])

    @precondition(lambda self: self.matched)
    @rule()
    def give_a_match_back(self) -> None:
        lease_id, pages = self.matched.pop()
        self.table.release(lease_id, [PageChain(tuple(pages))], [])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def seal_what_is_computed(self, data: st.DataObject) -> None:
        sequence = self.running[data.draw(self.slots())]
        first = data.draw(st.integers(sequence.first_page, sequence.num_full))
        end = data.draw(st.integers(first, sequence.num_full))
        pages = tuple(sequence.block_table[first - sequence.first_page : end - sequence.first_page])
        hashes = hashes_of(sequence.text)
        self.table.seal(sequence.lease_id, PageChain(pages, hashes[first:end], hashes[:first]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), to_lease_id=st.sampled_from(_LEASES))
    def hand_off(self, data: st.DataObject, to_lease_id: int) -> None:
        slot = data.draw(self.slots())
        sequence = self.running[slot]
        chain = sequence.chain(data.draw(st.integers(0, sequence.num_full)))
        move = Move("r", Attempt(1, 0), sequence.lease_id, to_lease_id)
        self.table.hand_off(slot, np.array(sequence.block_table, np.int64), move, chain.hashes, chain.earlier_hashes)
        sequence.lease_id = to_lease_id

    @precondition(lambda self: self.running)
    @rule(data=st.data(), has_hashes=st.booleans())
    def give_first_pages_back(self, data: st.DataObject, has_hashes: bool) -> None:
        """Of those that are computed: its own last page stays."""
        sequence = self.running[data.draw(self.slots())]
        first_page = data.draw(st.integers(sequence.first_page, sequence.num_full))
        num_given = first_page - sequence.first_page
        given, sequence.block_table = sequence.block_table[:num_given], sequence.block_table[num_given:]
        hashes = hashes_of(sequence.text) if has_hashes else ()
        chain = PageChain.of_sequence(tuple(given), sequence.first_page, hashes)
        sequence.first_page = first_page
        self.table.release(sequence.lease_id, [chain], [])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(self.slots())
        sequence = self.running.pop(slot)
        chain = sequence.chain(data.draw(st.integers(0, sequence.num_full)))
        self.table.release(sequence.lease_id, [chain], [slot])

    @rule(lease_id=st.sampled_from(_LEASES), num_pages=st.integers(1, _NUM_PAGES))
    def scribble(self, lease_id: int, num_pages: int) -> None:
        """Somebody takes pages, evicting cached ones, writes, and gives them back."""
        acquired = self.table.try_acquire(lease_id, num_pages, 0)
        num_evictable = self.table.num_pages(PageState.FREE) + self.table.num_pages(PageState.CACHED)
        if acquired is None:
            assert num_pages > num_evictable
            return
        self.holds.update(dict.fromkeys(acquired.page_ids, "scribble"))
        self.table.release(lease_id, [PageChain(acquired.page_ids)], [])

    @rule(lease_id=st.sampled_from(_LEASES), seals=st.booleans())
    def die(self, lease_id: int, seals: bool) -> None:
        lost = {slot: sequence for slot, sequence in self.running.items() if sequence.lease_id == lease_id}
        self.table.orphan(lease_id, self.block_table_of)
        assert check_integrity(self.table, self.leases(dead=lease_id), self.block_table_of) == ()
        self.running = {slot: sequence for slot, sequence in self.running.items() if slot not in lost}
        self.matched = [(owner, pages) for owner, pages in self.matched if owner != lease_id]
        chains = [sequence.chain(sequence.num_full if seals else 0) for sequence in lost.values()]
        self.table.free_orphans(lease_id, chains)
        for sequence in lost.values() if seals else ():
            hashes = hashes_of(sequence.text)
            num_found = len(self.table.prefixes.find_prefix(hashes))
            assert num_found == sequence.num_full or num_found < sequence.first_page

    @rule(half_sealed=st.booleans())
    def restart(self, half_sealed: bool) -> None:
        """Also in the middle of a seal; workers then claim what they hold."""
        leased = np.flatnonzero(self.page_rows["state"] == PageState.LEASED)
        if half_sealed and leased.size:
            self.page_rows["hash"][leased[0]] = (7, 7)
        self.table = OwnershipTable(self.page_rows, self.slot_rows)
        self.table.rebuild(_LEASES, self.block_table_of)
        assert check_integrity(self.table, self.leases(), self.block_table_of) == ()
        for lease_id in _LEASES:
            held = [page for seq in self.running.values() if seq.lease_id == lease_id for page in seq.block_table]
            held += [page for owner, pages in self.matched if owner == lease_id for page in pages]
            self.table.check_held_pages(lease_id, held, is_claim=True)
            assert self.table.reconcile(lease_id, np.array(held, np.int64)) == 0

    def leases(self, dead: int = NO_LEASE) -> list[Lease]:
        states = {lease_id: LeaseState.ORPHANED if lease_id == dead else LeaseState.ACTIVE for lease_id in _LEASES}
        return [
            Lease(lease_id, state, f"worker-{lease_id}", "decode", ProcessIdentity(lease_id, 1))
            for lease_id, state in states.items()
        ]

    @invariant()
    def every_hash_leads_to_its_text(self) -> None:
        for page in np.flatnonzero(self.page_rows["state"] >= PageState.CACHED).tolist():
            text = self.holds[page]
            assert isinstance(text, tuple)
            assert hashes_of(text)[-1] == self.page_rows["hash"][page].tobytes()

    @invariant()
    def what_is_sealed_or_used_can_be_reached_then(self) -> None:
        """What cannot be by now is older than anything that was used since, and goes before it."""
        rows = self.page_rows
        sealed = np.flatnonzero(rows["state"] >= PageState.CACHED).tolist()
        uses = {page: (rows["hash"][page].tobytes(), int(rows["last_use"][page])) for page in sealed}
        for page in {page for page, use in uses.items() if self.uses_before.get(page) != use}:
            text = self.holds[page]
            assert isinstance(text, tuple)
            assert page in self.table.prefixes.find_prefix(hashes_of(text))
        self.uses_before = uses

    @invariant()
    def running_sequences_keep_what_they_computed(self) -> None:
        for sequence in self.running.values():
            for index, page in enumerate(sequence.block_table[:-1], sequence.first_page):
                assert self.holds[page] == sequence.text[: index + 1]

    @invariant()
    def pins_are_what_sequences_and_matches_use(self) -> None:
        used = Counter(page for sequence in self.running.values() for page in sequence.block_table)
        used.update(page for _, pages in self.matched for page in pages)
        rows = self.page_rows
        assert {page: int(rows["refcount"][page]) for page in np.flatnonzero(rows["refcount"]).tolist()} == used
        assert self.table.num_pages(PageState.FREE) + self.table.num_pages(PageState.CACHED) == _NUM_PAGES - len(used)

    @invariant()
    def integrity_holds(self) -> None:
        assert check_integrity(self.table, self.leases(), self.block_table_of) == ()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def cached(table: OwnershipTable, text: Text) -> list[int]:
    """Computes a text, and lets it go."""
    acquired = table.try_acquire(1, len(text), 0)
    assert acquired is not None
    table.release(1, [PageChain(acquired.page_ids, hashes_of(text))], [])
    return list(acquired.page_ids)


def test_what_was_used_longest_ago_goes_first_and_of_a_chain_its_end() -> None:
    table = OwnershipTable(np.zeros(6, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    cached(table, (0, 0, 0))
    cached(table, (1, 1, 1))
    table.prefixes.touch(hashes_of((0, 0)))
    table.try_acquire(1, 3, 0)
    assert len(table.prefixes.find_prefix(hashes_of((1, 1, 1)))) == 1
    assert len(table.prefixes.find_prefix(hashes_of((0, 0, 0)))) == 2
    table.try_acquire(1, 1, 0)
    assert table.prefixes.find_prefix(hashes_of((1, 1, 1))) == []
    assert len(table.prefixes.find_prefix(hashes_of((0, 0, 0)))) == 2
    assert table.prefixes.num_evicted == 4


def test_a_prefix_ends_where_a_page_is_missing() -> None:
    table = OwnershipTable(np.zeros(8, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    acquired = table.try_acquire(1, 3, 0)
    assert acquired is not None
    first, second, third = acquired.page_ids
    hashes = hashes_of((0, 1, 0))
    table.seal(1, PageChain((first,), hashes[:1]))
    table.seal(1, PageChain((third,), hashes[2:]))
    assert table.prefixes.find_prefix(hashes) == [first]
    table.seal(1, PageChain((second,), hashes[1:2]))
    assert table.prefixes.find_prefix(hashes) == [first, second, third]


def test_a_prefix_that_another_sequence_computed_too_keeps_the_first_copy_and_frees_the_second() -> None:
    table = OwnershipTable(np.zeros(8, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    first = table.try_acquire(1, 2, 0)
    second = table.try_acquire(2, 3, 0)
    assert first is not None
    assert second is not None
    table.release(1, [PageChain(first.page_ids, hashes_of((0, 1)))], [])
    table.release(2, [PageChain(second.page_ids, hashes_of((0, 1, 1)))], [])
    assert table.prefixes.find_prefix(hashes_of((0, 1, 1))) == [*first.page_ids, second.page_ids[2]]
    assert (table.num_pages(PageState.FREE), table.num_pages(PageState.CACHED)) == (5, 3)


def running_text(table: OwnershipTable, text: Text, num_given: int) -> list[int]:
    """Of a sequence that has computed a text and given its first pages back, with their hashes, those that it holds."""
    acquired = table.try_acquire(1, len(text), 0)
    assert acquired is not None
    given, held = acquired.page_ids[:num_given], acquired.page_ids[num_given:]
    table.release(1, [PageChain(given, hashes_of(text)[:num_given])], [])
    return list(held)


def test_pages_behind_those_that_were_given_back_are_found_and_the_whole_chain_counts_as_used() -> None:
    table = OwnershipTable(np.zeros(8, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    text = (0, 1, 0, 1)
    held = running_text(table, text, num_given=2)
    cached(table, (1, 1))  # between the two
    assert len(table.prefixes.find_prefix(hashes_of(text))) == 2
    table.release(1, [PageChain.of_sequence(tuple(held), 2, hashes_of(text))], [])
    assert len(table.prefixes.find_prefix(hashes_of(text))) == 4
    table.try_acquire(1, 4, 0)  # 2 are free
    assert table.prefixes.find_prefix(hashes_of((1, 1))) == []
    assert len(table.prefixes.find_prefix(hashes_of(text))) == 4
    table.try_acquire(1, 1, 0)
    assert len(table.prefixes.find_prefix(hashes_of(text))) == 3, "its end goes first"


@pytest.mark.parametrize("way", ["release", "death", "hand-off", "seal"])
def test_pages_that_nobody_would_get_to_are_not_kept(way: str) -> None:
    """Those before them were evicted meanwhile."""
    table = OwnershipTable(np.zeros(4, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    text = (0, 1, 0)
    assert table.try_acquire(1, 0, 1) is not None
    held = running_text(table, text, num_given=2)
    assert table.try_acquire(2, 2, 0) is not None
    assert len(table.prefixes.find_prefix(hashes_of(text))) == 1
    chain = PageChain.of_sequence(tuple(held), 2, hashes_of(text))
    if way == "release":
        table.release(1, [chain], [])
    elif way == "death":
        table.orphan(1, lambda _: None)
        table.page_rows["state"][held], table.page_rows["owner"][held] = PageState.ORPHANED, 1
        table.page_rows["refcount"][held] = 1
        table.free_orphans(1, [chain])
    elif way == "hand-off":
        move = Move("r", Attempt(1, 0), 1, 2)
        table.hand_off(0, np.array(held, np.int64), move, chain.hashes, chain.earlier_hashes)
        table.release(2, [chain], [0])
    else:
        table.seal(1, chain)
        table.release(1, [chain], [])
    assert (table.num_pages(PageState.CACHED), table.num_pages(PageState.FREE)) == (1, 1)


def test_pages_that_nobody_gets_to_any_more_go_before_what_was_used_since() -> None:
    """They were pinned while those before them were evicted."""
    table = OwnershipTable(np.zeros(6, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    text = (0, 1, 0, 1)
    held = running_text(table, text, num_given=2)
    chain = PageChain.of_sequence(tuple(held), 2, hashes_of(text))
    table.seal(1, chain)
    other = table.try_acquire(2, 4, 0)
    assert other is not None
    assert table.prefixes.find_prefix(hashes_of(text)) == []
    table.release(2, [PageChain(other.page_ids, hashes_of((1, 1, 1, 1)))], [])
    table.release(1, [chain], [])
    assert table.try_acquire(1, 2, 0) is not None
    assert len(table.prefixes.find_prefix(hashes_of((1, 1, 1, 1)))) == 4


def test_pages_that_nobody_has_claimed_yet_are_not_evicted() -> None:
    table = OwnershipTable(np.zeros(4, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    cached(table, (0, 0, 0, 0))
    assert table.try_acquire(1, 1, 0, may_evict=False) is None
    assert table.try_acquire(1, 1, 0) is not None


def test_of_a_dead_workers_sequences_those_with_their_first_pages_keep_them_for_those_that_gave_them_back() -> None:
    table = OwnershipTable(np.zeros(6, PAGE_DTYPE), np.zeros(1, SLOT_DTYPE))
    text = (0, 1, 0)
    behind, whole = table.try_acquire(1, 1, 0), table.try_acquire(1, 3, 0)
    assert behind is not None
    assert whole is not None
    table.page_rows["state"][: 1 + 3] = PageState.ORPHANED
    chains = [
        PageChain.of_sequence(behind.page_ids, 2, hashes_of(text)),
        PageChain(whole.page_ids, hashes_of(text)[:2]),
    ]
    table.free_orphans(1, chains)
    assert len(table.prefixes.find_prefix(hashes_of(text))) == 3
