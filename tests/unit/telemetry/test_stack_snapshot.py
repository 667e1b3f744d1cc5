"""Percentiles of histograms."""

from hypothesis import given
from hypothesis import strategies as st

from weir.telemetry.histogram import Histogram
from weir.telemetry.stack_snapshot import percentile_of

EDGES = (0.5, 1.0, 2.0, 8.0)


@given(st.lists(st.floats(0.0, 8.0), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_in_the_bucket_of_the_value_that_it_stands_for(values: list[float], share: float) -> None:
    histogram = Histogram(EDGES)
    for value in values:
        histogram.observe(value)
    found = percentile_of(histogram.value(), share)
    rank = next(rank for rank in range(1, len(values) + 1) if rank >= share * len(values))
    exact = sorted(values)[rank - 1]
    high = next(edge for edge in EDGES if exact <= edge)
    low = max((edge for edge in EDGES if edge < high), default=0.0)
    assert found is not None
    assert low <= found <= high


def test_nothing_has_no_percentile_and_what_is_above_all_edges_has_the_last() -> None:
    histogram = Histogram(EDGES)
    assert percentile_of(histogram.value(), 0.5) is None
    histogram.observe(100.0)
    assert percentile_of(histogram.value(), 0.5) == 8.0
