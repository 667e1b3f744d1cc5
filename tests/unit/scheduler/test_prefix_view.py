"""What the scheduler believes of caches, whatever becomes of the messages that tell it."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.prefix_news import PrefixChanged, PrefixSnapshot
from weir.kv.geometry import PAGE_TOKENS
from weir.scheduling.prefix_view import PrefixView, hashes_from


def packed(pages: Sequence[int] | set[int]) -> bytes:
    return b"".join(page.to_bytes(8, "little") for page in pages)


class Owner:
    """A memory that tells what it caches: `chain(n)` is a prompt of n pages, whose prefixes it has as far as it is."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.sequence = -1
        self.pages: set[int] = set()

    def change(self, pages: set[int]) -> PrefixChanged:
        added, evicted = pages - self.pages, self.pages - pages
        self.sequence += 1
        self.pages = set(pages)
        return PrefixChanged("a", self.incarnation, self.sequence, len(pages), packed(added), packed(evicted))

    def snapshot(self) -> PrefixSnapshot:
        return PrefixSnapshot("a", self.incarnation, self.sequence, packed(self.pages))


def prefix_tokens(view: PrefixView, pages: Sequence[int]) -> int:
    return view.look_up(hashes_from(packed(pages))).num_tokens("a")


def test_the_longest_prefix_is_found() -> None:
    view, owner = PrefixView(), Owner()
    view.change(owner.change({1, 2, 3, 4, 5}), 0.0)
    for length in range(1, 9):
        assert prefix_tokens(view, range(1, 1 + length)) == min(length, 5) * PAGE_TOKENS
    assert prefix_tokens(view, [7, 8]) == 0
    assert view.look_up(hashes_from(packed([1]))).num_tokens("b") == 0
    view.change(owner.change({1, 2}), 0.0)
    assert prefix_tokens(view, range(1, 6)) == 2 * PAGE_TOKENS


def test_those_with_the_longest_prefix_are_found_among_many() -> None:
    view = PrefixView()
    for number in range(6):
        pages = set(range(1, 1 + min(number, 4)))
        view.change(PrefixChanged(f"m{number}", 1, 0, len(pages), packed(pages)), 0.0)
    ids = frozenset(f"m{number}" for number in range(6))
    assert view.look_up(hashes_from(packed(range(1, 9)))).deepest(ids) == (4 * PAGE_TOKENS, ("m4", "m5"))
    assert view.look_up(hashes_from(packed(range(1, 3)))).deepest(ids) == (2 * PAGE_TOKENS, ("m2", "m3", "m4", "m5"))
    assert view.look_up(hashes_from(packed([9, 1]))).deepest(ids) == (0, ())


def test_a_lost_message_is_noticed_by_the_next_and_the_whole_is_asked_for_once_a_second() -> None:
    view, owner = PrefixView(), Owner()
    view.change(owner.change({1}), 0.0)
    assert view.take_unknown(0.0) == ()
    owner.change({1, 2})
    view.change(owner.change({1, 2, 3}), 1.0)
    assert prefix_tokens(view, [1, 2, 3]) == PAGE_TOKENS, "what is known is used meanwhile"
    assert view.take_unknown(1.0) == ("a",)
    assert view.take_unknown(1.5) == ()
    assert view.take_unknown(2.0) == ("a",)
    view.replace(owner.snapshot(), 2.1)
    assert prefix_tokens(view, [1, 2, 3]) == 3 * PAGE_TOKENS
    assert view.take_unknown(9.0) == ()


def test_a_lost_message_is_noticed_by_its_number_even_if_the_count_of_pages_is_right() -> None:
    view, owner = PrefixView(), Owner()
    view.change(owner.change({1}), 0.0)
    owner.change({2})
    view.change(owner.change({2, 3}), 1.0)
    assert view.take_unknown(1.0) == ("a",)


def test_a_new_scheduler_asks_for_what_it_has_not_heard() -> None:
    view, owner = PrefixView(), Owner()
    owner.change({1, 2})
    view.change(owner.change({1, 2, 3}), 0.0)
    assert view.take_unknown(0.0) == ("a",)


def test_a_memory_that_starts_anew_is_believed_at_once_and_its_old_words_no_more() -> None:
    view, before, after = PrefixView(), Owner(1), Owner(2)
    view.change(before.change({1, 2}), 0.0)
    late = before.change({1, 2, 3})
    view.change(after.change({7}), 1.0)
    view.change(late, 1.0)
    view.replace(before.snapshot(), 1.0)
    assert (prefix_tokens(view, [1]), prefix_tokens(view, [7])) == (0, PAGE_TOKENS)
    assert view.take_unknown(2.0) == ()


def test_a_prompt_that_was_placed_counts_for_a_while_and_not_once_its_pages_are_evicted() -> None:
    view, owner = PrefixView(), Owner()
    first, second, third = range(10, 18), range(20, 24), range(30, 34)
    view.place("a", hashes_from(packed(first)), 0.0)
    assert prefix_tokens(view, first) == 0, "nobody spoke of that memory yet"
    view.change(owner.change({9}), 0.0)
    view.place("a", hashes_from(packed(first)), 100.0)
    assert prefix_tokens(view, [*first, 18]) == 8 * PAGE_TOKENS
    view.place("a", hashes_from(packed(second)), 115.0)
    assert prefix_tokens(view, first) == 8 * PAGE_TOKENS
    view.place("a", hashes_from(packed(third)), 130.0)
    assert prefix_tokens(view, first) == 0, "nobody ever said that it was computed"
    view.change(owner.change({9, *second, *third}), 130.0)
    view.change(owner.change({9, *second}), 130.0)
    assert (prefix_tokens(view, second), prefix_tokens(view, third)) == (4 * PAGE_TOKENS, 0)


LENGTHS = st.lists(st.integers(0, 40), min_size=3, max_size=3)


@settings(max_examples=200, deadline=None)
@given(reported=LENGTHS, placed=LENGTHS, num_pages=st.integers(0, 40), is_known=st.booleans())
def test_an_arena_has_what_it_reported_or_the_whole_blocks_of_what_was_placed_there(
    reported: list[int], placed: list[int], num_pages: int, is_known: bool
) -> None:
    view, ids = PrefixView(), ("a", "b", "c")
    for arena_id, num_reported, num_placed in zip(ids, reported, placed, strict=True):
        view.change(PrefixChanged(arena_id, 1, 0, num_reported, packed(range(1, 1 + num_reported))), 0.0)
        prompt = hashes_from(packed(range(1, 1 + num_placed)))
        num_cached_pages = view.look_up(prompt).num_tokens(arena_id) // PAGE_TOKENS if is_known else 0
        view.place(arena_id, prompt, 0.0, num_cached_pages=num_cached_pages)
    depths = view.look_up(hashes_from(packed(range(1, 1 + num_pages))))
    blocks = [4 * (min(num_placed, num_pages) // 4) for num_placed in placed]
    expected = [max(min(one, num_pages), other) for one, other in zip(reported, blocks, strict=True)]
    assert [depths.num_tokens(arena_id) // PAGE_TOKENS for arena_id in ids] == expected
    most = max(expected)
    holders = tuple(one for one, depth in zip(ids, expected, strict=True) if depth == most) if most else ()
    assert depths.deepest(frozenset(ids)) == (most * PAGE_TOKENS, holders)


def test_a_memory_that_has_gone_silent_is_forgotten() -> None:
    view, owner = PrefixView(), Owner()
    view.change(owner.change({1}), 0.0)
    view.forget_silent(29.0)
    assert len(view) == 1
    view.forget_silent(31.0)
    assert len(view) == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_lost_doubled_or_reordered_only_what_once_was_is_claimed_and_it_comes_right(
    data: st.DataObject,
) -> None:
    """Caches here are prefixes of one chain of pages, as caches are."""
    view, owner, wire = PrefixView(), Owner(), list[PrefixChanged]()
    chain = tuple(range(1, 7))
    longest = 0
    for step in range(data.draw(st.integers(1, 15))):
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            owner = Owner(owner.incarnation + 1)
        wire.append(owner.change(set(chain[: data.draw(st.integers(0, len(chain)))])))
        longest = max(longest, len(owner.pages))
        for _ in range(data.draw(st.integers(0, 3))):
            if wire:
                index = data.draw(st.integers(0, len(wire) - 1))
                view.change(wire[index], float(step))
                if data.draw(st.booleans()):
                    del wire[index]
        assert prefix_tokens(view, chain) <= longest * PAGE_TOKENS
    # From here on nothing is lost: a message a second, and the whole when it is asked for.
    for now_s in (100.0, 101.0):
        view.change(owner.change(owner.pages), now_s)
        if view.take_unknown(now_s):
            view.replace(owner.snapshot(), now_s)
    assert view.take_unknown(200.0) == ()
    assert prefix_tokens(view, chain) == len(owner.pages) * PAGE_TOKENS
