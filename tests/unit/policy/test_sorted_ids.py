"""Ids in the order of their keys are those of a plain search, whatever comes and goes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.policy.sorted_ids import SortedIds


@given(seed=st.integers(0, 2**32), is_in_order=st.booleans())
@settings(max_examples=30, deadline=None)
def test_all_that_are_there_are_in_order_after_each_change(seed: int, is_in_order: bool) -> None:
    """Ids come back under their old key or under another; there are ties."""
    choose = random.Random(seed)
    sorted_ids: SortedIds[tuple[float]] = SortedIds()
    there: dict[str, tuple[float]] = {}
    for step in range(400):
        name = f"i{choose.randrange(100)}"
        if name in there or choose.random() < 0.2:
            there.pop(name, None)
            sorted_ids.discard(name)
        else:
            there[name] = (float(step // 3 if is_in_order else choose.randrange(20)),)
            sorted_ids.add(name, there[name])
        assert sorted_ids.ascending == sorted((key, one) for one, key in there.items())
        assert len(sorted_ids) == len(there)
    assert sorted(sorted_ids.ids()) == sorted(there)


def test_an_id_is_there_once() -> None:
    sorted_ids: SortedIds[tuple[float]] = SortedIds()
    sorted_ids.add("a", (1.0,))
    with pytest.raises(ValueError, match="a is in the queue already"):
        sorted_ids.add("a", (0.0,))
    assert sorted_ids.ascending == [((1.0,), "a")]
