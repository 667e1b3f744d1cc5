"""Page hashes are equal exactly for equal prefixes under one model and salt; changes of an index add up to it."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.kv.prefixes import HASH_BYTES, PrefixChanges, page_hashes, prefix_seed, split_hashes

PAGES = [bytes([number]) * 16 for number in range(8)]
_token_ids = st.lists(st.integers(0, 3), max_size=80)


@given(first=_token_ids, second=_token_ids)
def test_pages_have_one_hash_exactly_as_far_as_two_texts_are_equal(first: list[int], second: list[int]) -> None:
    hashes = page_hashes(first, b"seed"), page_hashes(second, b"seed")
    assert [len(found) for found in hashes] == [len(first) // 16, len(second) // 16]
    for index, (one, other) in enumerate(zip(*hashes, strict=False)):
        assert (one == other) == (first[: 16 * (index + 1)] == second[: 16 * (index + 1)])


def test_a_hash_is_the_digest_of_its_predecessor_and_sixteen_little_endian_ids() -> None:
    token_ids = [49151, 1, *range(14)]
    packed = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    assert page_hashes(token_ids, b"before") == (hashlib.blake2b(b"before" + packed, digest_size=16).digest(),)


def test_models_and_salts_share_nothing() -> None:
    seeds = [
        prefix_seed("model"),
        prefix_seed("model2"),
        prefix_seed("model", salt="salt"),
        prefix_seed("mode", salt="l"),
        prefix_seed("", salt="model"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert {len(seed) for seed in seeds} == {HASH_BYTES}


def test_hashes_on_the_wire_lie_one_after_the_other() -> None:
    hashes = page_hashes(range(64), b"")
    assert split_hashes(b"".join(hashes)) == hashes
    with pytest.raises(ValueError, match="page_hashes: 17 bytes, must be a multiple of 16"):
        split_hashes(bytes(17))


def test_equal_pages_after_different_prefixes_have_different_hashes() -> None:
    one, other = page_hashes([1] * 16 + [7] * 32, b"seed"), page_hashes([2] * 16 + [7] * 32, b"seed")
    assert not set(one) & set(other)
    assert len(set(one)) == 3


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whoever_takes_all_changes_in_turn_has_what_the_index_has(data: st.DataObject) -> None:
    changes, index, seen = PrefixChanges(), set[bytes](), set[bytes]()
    for _ in range(data.draw(st.integers(0, 30))):
        absent, present = sorted(set(PAGES) - index), sorted(index)
        match data.draw(st.sampled_from(["add", "evict", "take"])):
            case "add" if absent:
                added = data.draw(st.lists(st.sampled_from(absent), unique=True))
                changes.add(added)
                index.update(added)
            case "evict" if present:
                evicted = data.draw(st.lists(st.sampled_from(present), unique=True))
                changes.evict(evicted)
                index.difference_update(evicted)
            case "take":
                taken = changes.take()
                assert taken is not None
                assert seen.isdisjoint(taken.added)
                assert seen.issuperset(taken.evicted)
                seen.difference_update(taken.evicted)
                seen.update(taken.added)
                assert seen == index
            case _:
                pass


def test_what_came_and_went_in_between_is_not_seen() -> None:
    changes = PrefixChanges()
    changes.add(PAGES[:2])
    changes.evict(PAGES[:1])
    taken = changes.take()
    assert taken is not None
    assert (set(taken.added), set(taken.evicted)) == ({PAGES[1]}, set())


def test_too_many_changes_are_not_kept_and_the_next_ones_are() -> None:
    changes = PrefixChanges(max_changes=3)
    changes.add(PAGES[:4])
    changes.add(PAGES[4:5])
    assert changes.take() is None
    changes.evict(PAGES[:1])
    taken = changes.take()
    assert taken is not None
    assert list(taken.evicted) == [PAGES[0]]
