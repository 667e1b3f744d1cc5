"""Pages as prometheus-client's own parsers read them."""

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from weir.telemetry.exposition import is_openmetrics, render, split
from weir.telemetry.families import Family, Kind, Sample, gathered
from weir.telemetry.histogram import Histogram
from weir.telemetry.labels import OTHER, StickyLabels
from weir.telemetry.page_cache import PageCache

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def parsed(families: Iterable[Family], *, as_openmetrics: bool) -> dict[str, Metric]:
    page = asyncio.run(render(list(families), as_openmetrics=as_openmetrics))
    parse = parse_openmetrics if as_openmetrics else parse_text
    return {metric.name: metric for metric in parse(page.content.decode())}


def values(metric: Metric) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in metric.samples}


def histogram_of(*seen: float) -> Histogram:
    histogram = Histogram((0.5, 1.0))
    for value in seen:
        histogram.observe_traced(value, TRACE_ID, 1000.0 + value)
    return histogram


@pytest.mark.parametrize("as_openmetrics", [False, True])
def test_counters_gauges_and_histograms_are_read_as_they_were(as_openmetrics: bool) -> None:
    families = [
        Family("weir_a_total", Kind.COUNTER, "How many.", (Sample(3.0, (("lane", 'odd "name"\\\n'),)),)),
        Family("vllm:b", Kind.GAUGE, "How full.", (Sample(0.25),)),
        Family("weir_c_seconds", Kind.HISTOGRAM, "How long.", (Sample(histogram_of(0.2, 0.7, 9.0).value()),)),
    ]
    found = parsed(families, as_openmetrics=as_openmetrics)
    assert [found[name].type for name in ("weir_a", "vllm:b", "weir_c_seconds")] == ["counter", "gauge", "histogram"]
    assert values(found["weir_a"]) == {("weir_a_total", (("lane", 'odd "name"\\\n'),)): 3.0}
    assert values(found["vllm:b"]) == {("vllm:b", ()): 0.25}
    assert values(found["weir_c_seconds"]) == {
        ("weir_c_seconds_bucket", (("le", "0.5"),)): 1.0,
        ("weir_c_seconds_bucket", (("le", "1.0"),)): 2.0,
        ("weir_c_seconds_bucket", (("le", "+Inf"),)): 3.0,
        ("weir_c_seconds_sum", ()): pytest.approx(9.9),
        ("weir_c_seconds_count", ()): 3.0,
    }


def test_exemplars_are_in_openmetrics_with_their_traces() -> None:
    family = Family("weir_c_seconds", Kind.HISTOGRAM, "How long.", (Sample(histogram_of(0.2, 0.3).value()),))
    [metric] = parsed([family], as_openmetrics=True).values()
    [exemplar] = [sample.exemplar for sample in metric.samples if sample.exemplar]
    assert (exemplar.labels, exemplar.value) == ({"trace_id": TRACE_ID}, 0.3)
    assert str(exemplar.timestamp).startswith("1000.3")


@given(st.integers(1, 3), st.integers(1, 400))
def test_a_long_family_in_parts_is_the_family(num_families: int, num_samples: int) -> None:
    families = [
        Family(
            f"weir_{name}_total",
            Kind.COUNTER,
            "x",
            tuple(Sample(float(i), (("i", str(i)),)) for i in range(num_samples)),
        )
        for name in range(num_families)
    ]
    found = parsed(families, as_openmetrics=True)
    assert len(found) == num_families
    assert all(len(metric.samples) == num_samples for metric in found.values())


def test_no_part_is_longer_than_what_may_be_written_in_one_go() -> None:
    value = Histogram(tuple(map(float, range(1, 21)))).value()
    family = Family("weir_c", Kind.HISTOGRAM, "x", tuple(Sample(value, (("i", str(i)),)) for i in range(100)))
    parts = list(split(family))
    assert sum((part.samples for part in parts), ()) == family.samples
    assert max(len(part.samples) for part in parts) * (20 + 1 + 2) <= 300
    assert [part.samples for part in split(Family("weir_d", Kind.GAUGE, "x"))] == [()]


def test_an_empty_page_is_a_page() -> None:
    assert parsed([], as_openmetrics=True) == parsed([], as_openmetrics=False) == {}


@pytest.mark.parametrize(
    ("accept", "is_it"),
    [
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", True),
        ("text/plain, Application/OpenMetrics-Text; version=not-a-version", True),
        ("text/plain", False),
        ("", False),
        ("*/*", False),
    ],
)
def test_openmetrics_is_for_those_who_name_it(accept: str, is_it: bool) -> None:
    assert is_openmetrics(accept) is is_it


def test_families_of_one_name_become_one_and_no_series_is_there_twice() -> None:
    one = Family("weir_b", Kind.GAUGE, "x", (Sample(1.0, (("process", "p"),)),))
    other = Family("weir_b", Kind.GAUGE, "x", (Sample(2.0, (("process", "q"),)),))
    again = Family("weir_b", Kind.GAUGE, "x", (Sample(3.0, (("process", "p"),)),))
    first = Family("weir_a", Kind.GAUGE, "x", (Sample(0.0),))
    found = gathered([one, other, first, again])
    assert [family.name for family in found] == ["weir_a", "weir_b"]
    assert [(sample.labels, sample.value) for sample in found[1].samples] == [
        ((("process", "p"),), 3.0),
        ((("process", "q"),), 2.0),
    ]


def test_the_first_labels_keep_their_series_and_what_comes_later_is_counted_together() -> None:
    labels = StickyLabels(2)
    assert [labels.of(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
    assert labels.num_dropped == 2


async def test_a_page_is_made_once_for_all_who_ask_within_a_moment() -> None:
    now_s, made = [0.0], list[int]()

    async def make() -> int:
        await asyncio.sleep(0)
        made.append(len(made))
        return made[-1]

    cache = PageCache[str, int](0.25, lambda: now_s[0])
    assert await asyncio.gather(*(cache.page("a", make) for _ in range(3))) == [0, 0, 0]
    now_s[0] = 0.2
    assert (await cache.page("a", make), await cache.page("b", make)) == (0, 1)
    now_s[0] = 0.26
    assert await cache.page("a", make) == 2


async def test_what_could_not_be_made_is_made_again() -> None:
    async def fail() -> int:
        raise RuntimeError("broken")

    async def make() -> int:
        return 7

    cache = PageCache[str, int]()
    with pytest.raises(RuntimeError):
        await cache.page("a", fail)
    assert await cache.page("a", make) == 7
