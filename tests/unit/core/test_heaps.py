"""A heap from which anything can be taken out is as good as a sorted list; no change waits for all that is in it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.opcodes import num_opcodes

from weir.core.heaps import LazyHeap


@given(seed=st.integers(0, 2**32), share_taken_out=st.sampled_from([0.1, 0.5, 0.9]))
@settings(max_examples=40, deadline=None)
def test_the_smallest_of_those_that_are_there_is_on_top_after_each_change(seed: int, share_taken_out: float) -> None:
    """Ids come back under their old key or under another; there are ties."""
    choose = random.Random(seed)
    heap: LazyHeap[tuple[float]] = LazyHeap()
    there: dict[str, tuple[float]] = {}
    names = [f"i{number}" for number in range(400)]
    for step in range(1200):
        name = choose.choice(names)
        action = choose.random()
        if step < 300 or action > share_taken_out:
            if name not in there:
                there[name] = (float(choose.randrange(50)),)
                heap.push(name, there[name])
        elif action < 0.1 and there:
            smallest = min((key, one) for one, key in there.items())[1]
            heap.discard(smallest)
            del there[smallest]
        else:
            there.pop(name, None)
            heap.discard(name)
        assert heap.try_peek() == min(((key, one) for one, key in there.items()), default=None)
        assert len(heap) == len(there)
        assert heap.num_entries <= 3 * len(there) + 500
    assert sorted(heap.ids()) == sorted(there)


def test_an_id_is_in_a_heap_once_and_an_empty_one_gives_nothing() -> None:
    heap: LazyHeap[tuple[float]] = LazyHeap()
    assert heap.try_peek() is None
    heap.push("a", (1.0,))
    with pytest.raises(ValueError, match="a is in the heap already"):
        heap.push("a", (2.0,))
    heap.discard("unknown")
    assert heap.try_peek() == ((1.0,), "a")
    heap.discard("a")
    assert heap.try_peek() is None


def test_what_is_taken_out_and_never_comes_to_the_top_is_forgotten_by_and_by() -> None:
    """One that stays at the top, and thousands that come and go below it."""
    heap: LazyHeap[tuple[float]] = LazyHeap()
    heap.push("top", (0.0,))
    for number in range(20_000):
        heap.push(f"i{number}", (1.0 + number,))
        if number >= 100:
            heap.discard(f"i{number - 100}")
    assert heap.num_entries < 500


def test_no_change_costs_much_more_than_another_however_many_are_there() -> None:
    heap: LazyHeap[tuple[float]] = LazyHeap()
    for number in range(4000):
        heap.push(f"i{number:04}", (float(number),))
    costs = []
    for number in range(3999, 0, -1):

        def change(name: str = f"i{number:04}") -> None:
            heap.discard(name)
            heap.try_peek()

        costs.append(num_opcodes(change))
    assert max(costs) < 10 * min(costs)
