"""Which pages are put in a tier, in which order, and whether a prefix comes back from there."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.clock import ManualClock
from weir.kv.layout import NO_LEASE, PAGE_DTYPE, PageState
from weir.kv.prefixes import PrefixIndex
from weir_transfer.page_tier import LoadRates, PrefillMeter, UnwrittenPages

HASHES = [bytes([number]) * 16 for number in range(40)]


class Arena:
    """An index whose pages are sealed in turn."""

    def __init__(self, written: Iterable[bytes] = (), min_uses: int = 1) -> None:
        self.rows = np.zeros(40, PAGE_DTYPE)
        self.index = PrefixIndex(self.rows)
        self.written = set(written)
        self.unwritten = UnwrittenPages(self.index, self.written.__contains__, min_uses)

    def seal(self, *numbers: int) -> None:
        hashes = [HASHES[number] for number in numbers]
        self.index.seal(NO_LEASE, np.array(numbers, np.int64), hashes)
        self.index.touch(hashes)

    def evict(self, num_pages: int) -> None:
        pages = self.index.try_evict(num_pages)
        assert pages is not None
        self.rows["state"][pages] = PageState.FREE
        self.rows["hash"][pages] = 0

    def take(self, max_pages: int = 40) -> list[int]:
        self.unwritten.update()
        return [page_hash[0] for page_hash in self.unwritten.take(max_pages)]


def test_what_is_sealed_is_written_once_and_first_what_was_sealed_first() -> None:
    arena = Arena(written=[HASHES[2]])
    arena.seal(5)
    arena.unwritten.update()
    arena.seal(3)
    arena.unwritten.update()
    arena.seal(2, 1)
    assert [arena.take(2), arena.take(2), arena.take(2)] == [[5, 3], [1], []]
    assert len(arena.unwritten) == 0


def test_what_an_earlier_process_left_in_the_arena_is_written() -> None:
    index = PrefixIndex(np.zeros(40, PAGE_DTYPE))
    index.seal(NO_LEASE, np.array([1, 2]), HASHES[1:3])
    unwritten = UnwrittenPages(index, {HASHES[1]}.__contains__, 1)
    unwritten.update()
    assert unwritten.take(40) == [HASHES[2]]


def test_what_was_not_written_comes_next_again() -> None:
    arena = Arena()
    for number in (1, 2, 3):
        arena.seal(number)
        arena.unwritten.update()
    assert arena.take(2) == [1, 2]
    arena.unwritten.put_back([HASHES[2]])
    assert arena.take() == [2, 3]


def test_what_left_the_arena_while_it_was_being_written_in_vain_is_not_tried_again() -> None:
    arena = Arena()
    arena.seal(1, 2)
    arena.unwritten.update()
    assert sorted(arena.take()) == [1, 2]
    arena.evict(1)
    arena.unwritten.update()
    arena.unwritten.put_back([HASHES[1], HASHES[2]])
    assert len(arena.take()) == 1
    assert arena.unwritten.num_lost == 1


def test_what_leaves_the_arena_before_it_is_written_is_lost_and_counted() -> None:
    arena = Arena()
    arena.seal(1, 2, 3)
    arena.unwritten.update()
    arena.evict(2)
    assert len(arena.take()) == 1
    assert arena.unwritten.num_lost == 2
    arena.evict(1)
    assert arena.take() == []
    assert arena.unwritten.num_lost == 2, "it was written"


def test_pages_are_written_once_prompts_have_used_them_often_enough() -> None:
    arena = Arena(min_uses=3)
    arena.seal(1, 2)
    assert arena.take() == []
    arena.unwritten.note_used([HASHES[1], HASHES[2]])
    assert arena.take() == []
    arena.unwritten.note_used([HASHES[1]])
    assert arena.take() == [1]
    arena.evict(2)
    arena.unwritten.update()
    arena.seal(2)
    arena.unwritten.note_used([HASHES[2]])
    assert arena.take() == [], "what left the arena is not remembered"
    assert arena.unwritten.num_lost == 0


def test_what_the_tier_has_lost_is_wanted_again_when_it_is_used() -> None:
    arena = Arena()
    arena.seal(1, 2)
    arena.written |= {HASHES[page] for page in arena.take()}
    arena.unwritten.note_used(HASHES[1:3])
    assert arena.take() == []
    arena.written.remove(HASHES[1])
    assert arena.take() == [], "not before: it would push others out for ever"
    arena.unwritten.note_used(HASHES[1:3])
    assert arena.take() == [1]


def test_a_page_that_came_was_used_and_went_between_two_updates_is_not_wanted() -> None:
    arena = Arena()
    arena.unwritten.update()
    arena.seal(1)
    arena.unwritten.note_used([HASHES[1]])
    arena.evict(1)
    assert arena.take() == []


@given(
    st.lists(st.tuples(st.sampled_from(["seal", "evict", "use", "take", "rebuild"]), st.integers(0, 39)), max_size=60),
    st.integers(1, 3),
)
def test_only_what_is_in_the_arena_and_not_written_is_ever_taken(steps: list[tuple[str, int]], min_uses: int) -> None:
    arena = Arena(min_uses=min_uses)
    for what, number in steps:
        if what == "seal" and HASHES[number] not in arena.index.hashes():
            arena.seal(number)
        elif what == "evict":
            arena.evict(min(3, len(arena.index)))
        elif what == "use":
            arena.unwritten.note_used(
                [page_hash for page_hash in HASHES[number : number + 4] if page_hash in arena.index.hashes()]
            )
        elif what == "rebuild":
            arena.index.changes.forget()
            arena.unwritten.changes.forget()
        elif what == "take":
            taken = {HASHES[page] for page in arena.take(2)}
            assert taken <= set(arena.index.hashes()) - arena.written
            arena.written |= taken
    arena.take(0)
    waiting = len(arena.unwritten._num_uses) + len(arena.unwritten)
    assert waiting == len(set(arena.index.hashes()) - arena.written), "nothing is forgotten, nothing is kept for ever"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def compute(meter: PrefillMeter, clock: ManualClock, match_id: int, num_pages: int, seconds: float) -> None:
    meter.begin(match_id)
    clock.advance(seconds)
    for number in range(num_pages):
        meter.add_page(match_id, is_last=number == num_pages - 1)


def test_computing_is_measured_from_the_match_to_its_last_page(clock: ManualClock) -> None:
    meter = PrefillMeter(clock)
    compute(meter, clock, 1, num_pages=7, seconds=1)
    assert meter.pages_per_s is None, "too few to tell"
    meter.begin(2)
    clock.advance(50)
    meter.drop(2)
    for number in range(20):
        meter.add_page(2, is_last=number == 19)
    assert meter.pages_per_s is None, "given up"
    compute(meter, clock, 3, num_pages=20, seconds=2)
    assert meter.pages_per_s == pytest.approx(10)


def test_a_fast_measurement_counts_at_once_a_slow_one_bit_by_bit(clock: ManualClock) -> None:
    meter = PrefillMeter(clock)
    for number, (rate, known) in enumerate([(10, 10), (20, 20), (10, 17), (20, 20)]):
        compute(meter, clock, number, num_pages=20, seconds=20 / rate)
        assert meter.pages_per_s == pytest.approx(known)


def test_a_prefix_is_loaded_where_that_takes_half_the_time_of_computing_it(clock: ManualClock) -> None:
    meter = PrefillMeter(clock)
    rates = LoadRates(meter)
    assert (rates.is_worth, rates.longest_s(100)) == (True, None)
    rates.on_loaded(19, seconds=1)
    assert rates.is_worth, "nothing is known of computing"
    compute(meter, clock, 1, num_pages=10, seconds=1)
    assert [rates.is_worth] == [False]
    assert rates.longest_s(100) == pytest.approx(5)
    rates.on_loaded(23, seconds=1)
    assert rates.is_worth
    for _ in range(3):
        rates.on_loaded(0, seconds=5)
    assert [rates.is_worth] == [False], "what does not come is slow"
