"""vLLM's names: where each value comes from, and that nothing is made up."""

from collections import Counter
from dataclasses import replace

import pytest

from weir.bus.messages import WorkerRecord
from weir.core.life import Phase
from weir.telemetry.catalog.histograms import (
    STEP_TOKENS,
    VLLM_E2E_EDGES,
    VLLM_ITERATION_EDGES,
    VLLM_ITL_EDGES,
    VLLM_PARAMS_N_EDGES,
    VLLM_TTFT_EDGES,
)
from weir.telemetry.described import Described, HistogramFigure
from weir.telemetry.families import Family, Kind
from weir.telemetry.histogram import Histogram, HistogramValue
from weir_gateway.metrics.neighbours import Neighbours
from weir_gateway.metrics.steady_sums import SteadySums
from weir_gateway.metrics.vllm_names import VLLM_NAMES, ModelView, Source, vllm_families
from weir_gateway.requests.request_figures import LaneFigures

MAX_CONTEXT = 100
LENGTHS = (1, 2, 5, 10, 20, 50, 100)
EDGES = {
    "time_to_first_token_seconds": VLLM_TTFT_EDGES,
    "inter_token_latency_seconds": VLLM_ITL_EDGES,
    "request_time_per_output_token_seconds": VLLM_ITL_EDGES,
    "e2e_request_latency_seconds": VLLM_E2E_EDGES,
    "request_queue_time_seconds": VLLM_E2E_EDGES,
    "request_inference_time_seconds": VLLM_E2E_EDGES,
    "request_prefill_time_seconds": VLLM_E2E_EDGES,
    "request_decode_time_seconds": VLLM_E2E_EDGES,
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_max_num_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_prefill_kv_computed_tokens": LENGTHS,
    "request_params_n": VLLM_PARAMS_N_EDGES,
    "iteration_tokens_total": VLLM_ITERATION_EDGES,
}
RECORD = WorkerRecord("d1", "decode", "m", "a:1", "host", 100, 16, 50, 4, 0, 0)


def described(worker_id: str, num_preemptions: float, *tokens: float) -> tuple[WorkerRecord, Described]:
    steps = Histogram(VLLM_ITERATION_EDGES)
    for num in tokens:
        steps.observe(num)
    metrics = {"preemptions_total": num_preemptions}
    figures = [HistogramFigure(STEP_TOKENS.name, steps.value())]
    return replace(RECORD, worker_id=worker_id), Described("decode", worker_id, metrics, figures)


ARENA = Described("transfer", "t", {"total_pages": 100.0, "free_pages": 50.0, "cached_pages": 25.0})


def view(neighbours: Neighbours = Neighbours(), *lanes: LaneFigures) -> ModelView:  # noqa: B008 - frozen
    return ModelView(lanes or (LaneFigures(MAX_CONTEXT),), Counter(), neighbours, SteadySums())


def by_name(view: ModelView) -> dict[str, Family]:
    return {family.name: family for family in vllm_families("m", view)}


def value_of(family: Family, **labels: str) -> float | HistogramValue:
    [value] = [one.value for one in family.samples if labels.items() <= dict(one.labels).items()]
    return value


def test_every_name_says_where_its_value_comes_from_and_has_one_row() -> None:
    names = [row.name for row in VLLM_NAMES]
    assert len(names) == len(set(names)) >= 50
    assert all(name.startswith("vllm:") for name in names)
    assert all((row.make is None) == (row.source is Source.ABSENT) for row in VLLM_NAMES)
    assert all(row.note.endswith((".", "total.")) for row in VLLM_NAMES)
    ends_total = {row.name for row in VLLM_NAMES if row.name.endswith("_total")}
    assert ends_total - {"vllm:iteration_tokens_total"} == {row.name for row in VLLM_NAMES if row.kind is Kind.COUNTER}


@pytest.mark.parametrize("name", sorted(EDGES))
def test_histograms_have_vllms_edges(name: str) -> None:
    neighbours = Neighbours((described("d1", 0.0),))
    family = by_name(view(neighbours))[f"vllm:{name}"]
    value = value_of(family)
    assert isinstance(value, HistogramValue)
    assert value.edges == EDGES[name]


def test_every_histogram_is_among_those() -> None:
    own = {row.name for row in VLLM_NAMES if row.kind is Kind.HISTOGRAM and row.make is not None}
    assert own == {f"vllm:{name}" for name in EDGES}


def test_without_workers_and_arenas_what_they_count_has_no_series() -> None:
    found = by_name(view())
    summed = {row.name for row in VLLM_NAMES if row.source is Source.SUMMED}
    assert found.keys() == {row.name for row in VLLM_NAMES if row.source is Source.MEASURED}
    assert by_name(view(Neighbours((described("d1", 0.0),), (ARENA,)))).keys() - found.keys() == summed


def test_labels_are_vllms() -> None:
    for family in by_name(view(Neighbours((described("d1", 0.0),), (ARENA,)))).values():
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
            assert labels.keys() <= {"source", "finished_reason", "block_size", "num_gpu_blocks"}


def test_requests_run_or_wait_by_their_phases() -> None:
    phases = Counter({Phase.QUEUED: 3, Phase.GRANTED: 1, Phase.PREFILLING: 5, Phase.DECODING: 7})
    found = by_name(replace(view(), phases=phases))
    assert value_of(found["vllm:num_requests_waiting"]) == 4.0
    assert value_of(found["vllm:num_requests_running"]) == 12.0


def test_lanes_are_added_up() -> None:
    one, other = LaneFigures(MAX_CONTEXT), LaneFigures(MAX_CONTEXT)
    for lane in (one, other):
        lane.ttft.observe(0.003)
        lane.num_prompt_tokens, lane.num_cached_tokens, lane.num_output_tokens = 100, 30, 7
        lane.ends.update(("stop", "error"))
    found = by_name(view(Neighbours(), one, other))
    ttft = value_of(found["vllm:time_to_first_token_seconds"])
    assert isinstance(ttft, HistogramValue)
    assert (ttft.counts[1], ttft.num) == (2, 2)
    assert value_of(found["vllm:generation_tokens_total"]) == 14.0
    assert value_of(found["vllm:prompt_tokens_by_source_total"], source="local_cache_hit") == 60.0
    assert value_of(found["vllm:prompt_tokens_by_source_total"], source="local_compute") == 140.0
    assert value_of(found["vllm:request_success_total"], finished_reason="stop") == 2.0
    assert value_of(found["vllm:request_success_total"], finished_reason="abort") == 0.0


def test_pages_in_use_are_those_that_are_neither_free_nor_only_cached() -> None:
    found = by_name(view(Neighbours((described("d1", 0.0),), (ARENA,))))
    assert value_of(found["vllm:kv_cache_usage_perc"]) == 0.25
    assert value_of(found["vllm:cache_config_info"], block_size="16", num_gpu_blocks="50") == 1.0


def test_without_the_arena_of_another_host_the_share_of_all_pages_is_not_known() -> None:
    record, known = described("d2", 0.0)
    elsewhere = replace(record, host_id="other host"), known
    found = by_name(view(Neighbours((described("d1", 0.0), elsewhere), (ARENA,))))
    assert "vllm:kv_cache_usage_perc" not in found
    assert value_of(found["vllm:cache_config_info"], num_gpu_blocks="100") == 1.0


def test_what_a_worker_that_is_gone_had_counted_stays_in() -> None:
    seen = view(Neighbours((described("d1", 2.0, 5, 900), described("d2", 3.0, 5))))
    assert value_of(by_name(seen)["vllm:num_preemptions_total"]) == 5.0
    later = by_name(replace(seen, neighbours=Neighbours((described("d2", 4.0, 5, 5),))))
    assert value_of(later["vllm:num_preemptions_total"]) == 6.0
    steps = value_of(later["vllm:iteration_tokens_total"])
    assert isinstance(steps, HistogramValue)
    assert (steps.num, steps.total) == (4, 915.0)
    again = by_name(replace(seen, neighbours=Neighbours((described("d1", 2.0), described("d2", 4.0)))))
    assert value_of(again["vllm:num_preemptions_total"]) == 6.0


@pytest.mark.parametrize("edges", [(1.0, 8.0), (*VLLM_ITERATION_EDGES, 32768), (2, *VLLM_ITERATION_EDGES[1:])])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_with_other_edges_is_left_out(edges: tuple[float, ...], *, is_first: bool) -> None:
    steps = Histogram(edges)
    steps.observe(7)
    record, known = described("d1", 0.0, 5)
    other = replace(known, process_id="d0", histograms=[HistogramFigure(STEP_TOKENS.name, steps.value())])
    workers = [(record, known), (replace(record, worker_id="d0"), other)]
    found = by_name(view(Neighbours(tuple(reversed(workers) if is_first else workers))))
    value = value_of(found["vllm:iteration_tokens_total"])
    assert isinstance(value, HistogramValue)
    assert (value.edges, value.num, value.total) == (VLLM_ITERATION_EDGES, 1, 5.0)
    assert "vllm:iteration_tokens_total" not in by_name(view(Neighbours((workers[1],))))


def test_sums_remember_few_processes_and_lose_nothing() -> None:
    sums = SteadySums(max_remembered=2)
    for index in range(5):
        assert sums.of("x", {f"p{index}": 1.0}) == index + 1
