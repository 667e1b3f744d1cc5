"""Histograms against what they say they are, and against prometheus-client's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ReferenceHistogram

from weir.telemetry.histogram import Exemplar, Histogram, added

EDGES = (0.001, 0.5, 1.0, 2.5, 10.0)
near_edges = st.one_of(st.sampled_from((*EDGES, 0.0, 10.5)), st.floats(0, 20, allow_nan=False))
observations = st.lists(st.tuples(near_edges, st.integers(1, 5)), max_size=30)


def of(values: list[tuple[float, int]], edges: tuple[float, ...] = EDGES) -> Histogram:
    histogram = Histogram(edges)
    for value, num in values:
        histogram.observe(value, num)
    return histogram


@given(observations)
def test_it_counts_as_prometheus_client_does(values: list[tuple[float, int]]) -> None:
    reference = ReferenceHistogram("seen", "x", buckets=EDGES, registry=CollectorRegistry())
    for value, num in values:
        for _ in range(num):
            reference.observe(value)
    [metric] = reference.collect()
    wanted = [sample.value for sample in metric.samples if sample.name == "seen_bucket"]
    found = of(values).value()
    assert found.cumulative == wanted
    assert found.num == sum(num for _, num in values)
    assert found.total == pytest.approx(sum(value * num for value, num in values))


@given(observations, st.sets(st.sampled_from(EDGES), min_size=1))
def test_fewer_buckets_hold_what_they_would_have_counted_themselves(
    values: list[tuple[float, int]], kept: set[float]
) -> None:
    edges = tuple(sorted(kept))
    coarse, direct = of(values).value().coarser(edges), of(values, edges).value()
    assert (coarse.edges, coarse.counts) == (direct.edges, direct.counts)


@given(observations, observations)
def test_two_added_are_one_that_saw_both(one: list[tuple[float, int]], other: list[tuple[float, int]]) -> None:
    both, alone = added([of(one).value(), of(other).value()]), of(one + other).value()
    assert both.counts == alone.counts
    assert both.total == pytest.approx(alone.total)


def test_an_edge_that_it_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"edges \[0.7\]: none of the histogram's own"):
        of([]).value().coarser((0.5, 0.7))


def test_histograms_of_different_edges_are_not_added() -> None:
    with pytest.raises(ValueError, match="different edges"):
        added([of([]).value(), of([], (1.0,)).value()])


@pytest.mark.parametrize("edges", [(), (1.0, 1.0), (2.0, 1.0)])
def test_edges_rise(edges: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must rise"):
        Histogram(edges)


def test_each_bucket_keeps_its_newest_exemplar_and_none_of_what_was_not_sampled() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, trace_id, at_s in ((0.5, "a" * 32, 1.0), (0.7, "b" * 32, 2.0), (0.8, "", 3.0), (1.5, "", 4.0)):
        histogram.observe_traced(value, trace_id, at_s)
    found = histogram.value()
    assert found.counts == (3, 1, 0)
    assert found.exemplars == (Exemplar(0.7, "b" * 32, 2.0), None, None)


def test_the_newest_exemplar_stays_where_buckets_become_one() -> None:
    histogram, other = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    histogram.observe_traced(1.5, "a" * 32, 2.0)
    histogram.observe_traced(0.5, "b" * 32, 1.0)
    assert histogram.value().coarser((2.0,)).exemplars == (Exemplar(1.5, "a" * 32, 2.0), None)
    other.observe(0.5)
    assert added([other.value(), histogram.value()]).exemplars == histogram.value().exemplars
    assert added([other.value(), other.value()]).exemplars == ()
