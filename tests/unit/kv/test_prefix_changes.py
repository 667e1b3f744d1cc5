"""What an index gained and lost, taken in parts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.kv.prefixes.index import PrefixChanges

PAGES = [bytes([number]) * 16 for number in range(8)]


@settings(max_examples=200, deadline=None)
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
