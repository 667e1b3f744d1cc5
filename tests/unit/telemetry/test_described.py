"""Figures as processes name them, and as they are exported."""

import re

from weir.telemetry.catalog.entry import FigureEntry
from weir.telemetry.catalog.histograms import (
    E2E,
    HISTOGRAMS,
    ITL_EDGES,
    STAGE_EDGES,
    TTFT_EDGES,
    VLLM_E2E_EDGES,
    VLLM_ITL_EDGES,
    VLLM_TTFT_EDGES,
    HistogramEntry,
    token_edges,
)
from weir.telemetry.described import CATALOG, Described, HistogramFigure, families_of
from weir.telemetry.families import Kind, Sample
from weir.telemetry.histogram import Histogram

OWN = (("role", "scheduler"), ("process", "scheduler-0-aa"))


def help_of(entry: FigureEntry | HistogramEntry) -> str:
    return entry.help


def exported(role: str, **metrics: float) -> dict[str, list[Sample]]:
    found = families_of(Described(role, f"{role}-0-aa", metrics))
    return {family.name: list(family.samples) for family in found}


def test_a_figure_has_its_role_and_process() -> None:
    assert exported("scheduler", queued=3.0) == {"weir_scheduler_requests_queued": [Sample(3.0, OWN)]}


def test_what_varies_in_a_name_becomes_a_label() -> None:
    found = exported("scheduler", granted_batch_total=7.0, **{"granted_my-lane_total": 1.0})
    assert found == {
        "weir_lane_grants_total": [
            Sample(7.0, (("lane", "batch"), *OWN)),
            Sample(1.0, (("lane", "my-lane"), *OWN)),
        ]
    }


def test_of_two_patterns_the_longer_one_is_meant() -> None:
    assert list(exported("gateway", entry_refused_lane_full_total=1.0)) == ["weir_gateway_entry_refusals_total"]
    assert list(exported("gateway", entry_refused_total=1.0)) == ["weir_gateway_entry_refused_total"]


def test_a_label_in_a_name_is_a_label_whatever_it_says() -> None:
    [family] = families_of(Described("gateway", "g", {'tenant_finished_total{tenant="a "b" c"}': 2.0}))
    assert family.name == "weir_tenant_requests_finished_total"
    assert family.samples[0].labels[0] == ("tenant", 'a "b" c')


def test_times_are_in_seconds() -> None:
    assert list(exported("gateway", queue_report_age_s=0.5)) == ["weir_gateway_queue_report_age_seconds"]
    [[sample]] = exported("decode", new_thing_ms=250.0).values()
    assert sample.value == 0.25


def test_what_the_table_does_not_have_is_exported_all_the_same() -> None:
    [family] = families_of(Described("decode", "d", {"num_new_things_total": 1.0}))
    assert (family.name, family.kind, family.help) == ("weir_worker_new_things_total", Kind.COUNTER, "Not described.")


def test_histograms_have_their_own_names() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    figure = HistogramFigure(E2E.name, histogram.value(), (("lane", "batch"),))
    [family] = families_of(Described("scheduler", "scheduler-0-aa", {}, [figure]))
    assert (family.name, family.kind, family.help) == (E2E.name, Kind.HISTOGRAM, E2E.help)
    assert family.samples == (Sample(histogram.value(), (("lane", "batch"), *OWN)),)


def is_total(name: str) -> bool:
    return name.removesuffix("_*").endswith("_total")


def test_names_of_the_table_are_prometheus_names_in_base_units_and_mean_one_thing() -> None:
    names = [entry.name for entry in CATALOG] + [entry.name for entry in HISTOGRAMS]
    assert len(names) == len(set(names))
    assert [name for name in names if not re.fullmatch(r"weir_[a-z][a-z0-9_]*", name)] == []
    assert [name for name in names if re.search(r"_(s|ms|us|count|sum|bucket|info)$", name)] == []
    assert [entry.name for entry in CATALOG if is_total(entry.source) != is_total(entry.name)] == []
    assert [entry.name for entry in CATALOG if ("*" in entry.source) != bool(entry.label)] == []
    assert [one for one in [*map(help_of, CATALOG), *map(help_of, HISTOGRAMS)] if not one.endswith(".")] == []


def test_edges_have_those_of_vllm_among_them() -> None:
    assert set(VLLM_TTFT_EDGES) < set(TTFT_EDGES)
    assert set(VLLM_ITL_EDGES) < set(ITL_EDGES)
    assert set(VLLM_E2E_EDGES) < set(STAGE_EDGES)


def test_lengths_have_edges_up_to_what_there_is() -> None:
    assert token_edges(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_edges(199) == (1, 2, 5, 10, 20, 50, 100)
    assert token_edges(1) == (1,)
