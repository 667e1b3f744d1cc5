"""vLLM's names for what Weir counts: what dashboards, the Gateway API's inference extension and autoscalers ask for.

One row a name of vLLM 0.32, with vLLM's labels and edges, and where its value comes from: measured by this gateway of
its own requests, summed over the workers that it can reach, or absent, with the reason. Nothing is ever made up: what
is not known has no series.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from weir.core.life import Phase
from weir.telemetry.catalog.histograms import (
    STEP_TOKENS,
    VLLM_E2E_EDGES,
    VLLM_ITERATION_EDGES,
    VLLM_ITL_EDGES,
    VLLM_TTFT_EDGES,
)
from weir.telemetry.families import Family, Kind, Sample
from weir.telemetry.histogram import Histogram, HistogramValue, added
from weir_gateway.metrics.neighbours import Neighbours
from weir_gateway.metrics.steady_sums import SteadySums
from weir_gateway.requests.request_figures import LaneFigures

_RUNNING = (Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING)
_WAITING = (Phase.RECEIVED, Phase.QUEUED, Phase.GRANTED)
_ENDS = ("stop", "length", "abort", "error")


class Source(Enum):
    """Where a value comes from."""

    MEASURED = "measured"
    """By this gateway, of its own requests."""
    SUMMED = "summed"
    """Over the processes that this gateway reaches, and of counters those that are gone as far as it saw them."""
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class ModelView:
    """What is known of one model now."""

    lanes: Sequence[LaneFigures]
    """At least one."""
    phases: Counter[Phase]
    """Of its requests that have not ended."""
    neighbours: Neighbours
    """Workers are those of the model."""
    sums: SteadySums

    def count(self, of: Callable[[LaneFigures], int]) -> float:
        return float(sum(map(of, self.lanes)))

    def histogram(self, of: Callable[[LaneFigures], Histogram], edges: Sequence[float] = ()) -> HistogramValue:
        value = added([of(figures).value() for figures in self.lanes])
        return value.coarser(edges) if edges else value

    def of_workers(self, name: str) -> float | None:
        """Sum of a counter; None: nobody answers."""
        values = {
            record.worker_id: described.metrics[name]
            for record, described in self.neighbours.workers
            if name in described.metrics
        }
        return self.sums.of(name, values) if values else None


_Value = float | HistogramValue
_Labels = Mapping[str, str]
_Make = Callable[[ModelView], "_Value | Sequence[tuple[_Labels, _Value]] | None"]


@dataclass(frozen=True, slots=True)
class VllmName:
    """One row. `note`: what it counts here, or why it is absent."""

    name: str
    kind: Kind
    source: Source
    note: str
    make: _Make | None = None


def vllm_families(model: str, view: ModelView) -> list[Family]:
    """With vLLM's labels; families without a known value are left out."""
    own = (("model_name", model), ("engine", "0"))
    families = []
    for row in VLLM_NAMES:
        made = None if row.make is None else row.make(view)
        if made is None:
            continue
        several = [({}, made)] if isinstance(made, float | HistogramValue) else made
        samples = tuple(Sample(value, (*labels.items(), *own)) for labels, value in several)
        families.append(Family(row.name, row.kind, row.note, samples))
    return families


def _pages_used(view: ModelView) -> float | None:
    """Cached pages are free, as vLLM counts those that nobody uses. None: not all arenas of the workers are reached;
    of other hosts those that offer pages are."""
    hosts = {record.host_id for record, _ in view.neighbours.workers}
    arenas = [one.metrics for one in view.neighbours.others if one.role == "transfer" and "total_pages" in one.metrics]
    if len(arenas) != len(hosts):
        return None
    total = sum(arena["total_pages"] for arena in arenas)
    free = sum(arena["free_pages"] + arena["cached_pages"] for arena in arenas)
    return 1 - free / total if total else None


def _cache_config(view: ModelView) -> Sequence[tuple[_Labels, _Value]] | None:
    hosts = {record.host_id: record for record, _ in view.neighbours.workers}
    if not hosts:
        return None
    num_pages = sum(record.num_arena_pages for record in hosts.values())
    page_tokens = next(iter(hosts.values())).page_tokens
    return [({"block_size": str(page_tokens), "num_gpu_blocks": str(num_pages)}, 1.0)]


def _iteration_tokens(view: ModelView) -> HistogramValue | None:
    values = {
        record.worker_id: figure.value
        for record, described in view.neighbours.workers
        for figure in described.histograms
        if figure.name == STEP_TOKENS.name
    }
    return view.sums.of_histograms(STEP_TOKENS.name, values, VLLM_ITERATION_EDGES)


def _by_source(view: ModelView) -> Sequence[tuple[_Labels, _Value]]:
    cached = view.count(lambda lane: lane.num_cached_tokens)
    computed = view.count(lambda lane: lane.num_prompt_tokens) - cached
    return [({"source": "local_compute"}, computed), ({"source": "local_cache_hit"}, cached)]


def _successes(view: ModelView) -> Sequence[tuple[_Labels, _Value]]:
    ends = sum((figures.ends for figures in view.lanes), Counter[str]())
    return [({"finished_reason": reason}, float(ends[reason])) for reason in _ENDS]


def _measured(name: str, kind: Kind, note: str, make: _Make) -> VllmName:
    return VllmName(f"vllm:{name}", kind, Source.MEASURED, note, make)


def _summed(name: str, kind: Kind, note: str, make: _Make) -> VllmName:
    return VllmName(f"vllm:{name}", kind, Source.SUMMED, note, make)


def _absent(kind: Kind, why: str, *names: str) -> tuple[VllmName, ...]:
    return tuple(VllmName(f"vllm:{name}", kind, Source.ABSENT, why) for name in names)


def _phases(phases: Sequence[Phase]) -> _Make:
    return lambda view: float(sum(view.phases[phase] for phase in phases))


def _histogram(of: Callable[[LaneFigures], Histogram], edges: Sequence[float] = ()) -> _Make:
    return lambda view: view.histogram(of, edges)


_G, _C, _H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM

VLLM_NAMES: tuple[VllmName, ...] = (
    _measured("num_requests_running", _G, "Requests of this gateway that workers have.", _phases(_RUNNING)),
    _measured("num_requests_waiting", _G, "Requests of this gateway that wait for a worker.", _phases(_WAITING)),
    _measured("prompt_tokens_total", _C, "Tokens of prompts that have a first token, added when their requests end.",
              lambda view: view.count(lambda lane: lane.num_prompt_tokens)),
    _measured("prompt_tokens_by_source_total", _C, "The same by where their pages came from.", _by_source),
    _measured("prompt_tokens_cached_total", _C, "Those of them that were in the prefix cache.",
              lambda view: view.count(lambda lane: lane.num_cached_tokens)),
    _measured("generation_tokens_total", _C, "Tokens of answers, as they come.",
              lambda view: view.count(lambda lane: lane.num_output_tokens)),
    _measured("prefix_cache_queries_total", _C, "Tokens of prompts that were looked for in the prefix cache.",
              lambda view: view.count(lambda lane: lane.num_prompt_tokens)),
    _measured("prefix_cache_hits_total", _C, "Tokens of prompts that were found there.",
              lambda view: view.count(lambda lane: lane.num_cached_tokens)),
    _measured("request_success_total", _C, "Requests that ended: cancelled ones as abort, failed ones as error.",
              _successes),
    _measured("time_to_first_token_seconds", _H, "From arrival to the first token at the gateway.",
              _histogram(lambda lane: lane.ttft, VLLM_TTFT_EDGES)),
    _measured("inter_token_latency_seconds", _H, "Between two frames with tokens of one answer.",
              _histogram(lambda lane: lane.itl, VLLM_ITL_EDGES)),
    _measured("request_time_per_output_token_seconds", _H, "From first to last token, by the tokens after the first.",
              _histogram(lambda lane: lane.tpot, VLLM_ITL_EDGES)),
    _measured("e2e_request_latency_seconds", _H, "From arrival to the last token at the gateway.",
              _histogram(lambda lane: lane.e2e, VLLM_E2E_EDGES)),
    _measured("request_queue_time_seconds", _H, "From acceptance to the scheduler's grant.",
              _histogram(lambda lane: lane.stages["queue"], VLLM_E2E_EDGES)),
    _measured("request_prefill_time_seconds", _H, "From the start at a worker to the first token.",
              _histogram(lambda lane: lane.stages["prefill"], VLLM_E2E_EDGES)),
    _measured("request_decode_time_seconds", _H, "From the first token to the last.",
              _histogram(lambda lane: lane.stages["decode"], VLLM_E2E_EDGES)),
    _measured("request_inference_time_seconds", _H, "From the grant to the last token.",
              _histogram(lambda lane: lane.inference, VLLM_E2E_EDGES)),
    _measured("request_prompt_tokens", _H, "Tokens of finished requests' prompts.",
              _histogram(lambda lane: lane.prompt_tokens)),
    _measured("request_generation_tokens", _H, "Tokens of finished requests' answers.",
              _histogram(lambda lane: lane.output_tokens)),
    _measured("request_max_num_generation_tokens", _H, "Tokens of the longest of a prompt's answers.",
              _histogram(lambda lane: lane.longest_output_tokens)),
    _measured("request_params_n", _H, "Answers to a prompt that finished requests asked for.",
              _histogram(lambda lane: lane.num_choices)),
    _measured("request_params_max_tokens", _H, "Tokens that finished requests allowed at most.",
              _histogram(lambda lane: lane.max_tokens)),
    _measured("request_prefill_kv_computed_tokens", _H, "Tokens of finished prompts that were not cached.",
              _histogram(lambda lane: lane.computed_prompt_tokens)),
    _summed("kv_cache_usage_perc", _G, "Share of the pages that sequences use, from 0 to 1.", _pages_used),
    _summed("cache_config_info", _G, "Tokens of a page, and pages of all hosts, as labels.", _cache_config),
    _summed("num_preemptions_total", _C, "Sequences that gave way to others.",
            lambda view: view.of_workers("preemptions_total")),
    _summed("iteration_tokens_total", _H, "Tokens of one forward pass of a worker.", _iteration_tokens),
    *_absent(_G, "There are no LoRA adapters.", "lora_requests_info"),
    *_absent(_G, "Workers do not sleep.", "engine_sleep_state"),
    *_absent(_G, "The scheduler does not say why a request waits.", "num_requests_waiting_by_reason"),
    *_absent(_G, "A decode worker fetches nothing: pages change owners.", "num_requests_kv_fetch_by_stage"),
    *_absent(_C, "All pages are in one tier.", "prompt_tokens_cached_by_source_total"),
    *_absent(_C, "There is no cache outside the arena.", "external_prefix_cache_queries_total",
             "external_prefix_cache_hits_total"),
    *_absent(_C, "Weir refuses for other reasons: weir_gateway_entry_refusals_total.", "admission_rejections_total"),
    *_absent(_C, "Logits are not searched for NaN.", "corrupted_requests_total"),
    *_absent(_C, "Models take text alone.", "mm_cache_queries_total", "mm_cache_hits_total"),
    *_absent(_H, "Workers do not say it of each request.", "request_num_preemptions"),
    *_absent(_H, "Pages are not timed.", "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
             "kv_block_reuse_gap_seconds"),
    *_absent(_H, "There is no NIXL.", "nixl_xfer_time_seconds", "nixl_post_time_seconds", "nixl_bytes_transferred",
             "nixl_num_descriptors"),
    *_absent(_C, "There is no NIXL.", "nixl_num_failed_transfers_total", "nixl_num_failed_notifications_total",
             "nixl_num_kv_expired_reqs_total", "nixl_num_notifications_after_expiry_total"),
    *_absent(_C, "There is no speculation.", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
             "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
    *_absent(_C, "Not estimated.", "estimated_flops_per_gpu_total", "estimated_read_bytes_per_gpu_total",
             "estimated_write_bytes_per_gpu_total"),
)  # fmt: skip
