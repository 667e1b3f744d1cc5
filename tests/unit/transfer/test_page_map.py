"""The page map of an arena."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weir.kv.layout import PageState
from weir_transfer.counters import page_map


@given(st.lists(st.sampled_from(list(PageState)), min_size=1, max_size=300), st.integers(1, 40))
def test_every_page_is_in_its_range_once_and_ranges_are_no_more_than_asked(
    states: list[PageState], max_ranges: int
) -> None:
    found = page_map(np.array(states, np.uint32), max_ranges)
    assert found.num_pages == len(states)
    assert len(found.ranges) <= max_ranges
    for index, one in enumerate(found.ranges):
        own = states[index * found.pages_per_range : (index + 1) * found.pages_per_range]
        assert (one.num_free, one.num_leased, one.num_orphaned, one.num_cached, one.num_shared) == tuple(
            own.count(state) for state in PageState
        )
    assert len(found.ranges) == -(-len(states) // found.pages_per_range)


def test_few_pages_have_a_range_each() -> None:
    assert page_map(np.zeros(3, np.uint32), 512).pages_per_range == 1
    assert len(page_map(np.zeros(0, np.uint32), 512).ranges) == 0
