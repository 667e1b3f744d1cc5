"""A whole stack at one moment, as operators see it: what the console and `weir top` show.

Rates are of the last seconds; None where nobody had looked before. What is of requests is of the gateway that is asked.
"""

from dataclasses import dataclass
from typing import Literal

from weir.telemetry.histogram import HistogramValue

LatencyName = Literal["time_to_first_token", "inter_token", "time_per_output_token", "queue", "end_to_end"]


@dataclass(frozen=True, slots=True)
class GatewayView:
    """The gateway that is asked."""

    process_id: str
    version: str
    num_open: int
    """Requests that it serves now."""
    num_waiting: int
    """Of these, those that wait for the scheduler to take them."""
    num_connections: int
    num_watchers: int
    """Connections over which a snapshot is sent every second."""
    num_accepted: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_refused: int
    """By the scheduler, or on arrival."""
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler that leads."""

    process_id: str
    epoch: int
    num_queued: int
    num_granted: int
    num_prefilling: int
    num_reserved_pages: int
    num_workers: int
    num_gateways: int


@dataclass(frozen=True, slots=True)
class LaneView:
    """One lane. Queues are of all gateways, tokens of the one that is asked."""

    lane: str
    num_queued: int
    num_in_flight: int
    oldest_wait_s: float
    num_granted: int
    grants_per_s: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant's requests at the gateway that is asked."""

    tenant: str
    num_accepted: int
    num_finished: int
    num_refused: int
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker of the registry."""

    worker_id: str
    role: str
    model: str
    address: str
    host_id: str
    duty: Literal["serving", "draining", "drained", "silent"]
    """`silent`: it is registered, and does not answer; then all figures are those of the registry, or 0."""
    num_running: int
    num_waiting: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_used_pages: int
    num_preemptions: int
    num_failed_steps: int
    steps_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class ArenaView:
    """One arena that can be reached from the gateway, by its transfer service."""

    process_id: str
    num_pages: int
    num_free: int
    num_leased: int
    num_orphaned: int
    num_cached: int
    """Sealed prefixes that nobody uses now."""
    num_shared: int
    """Sealed prefixes that sequences use."""
    num_leases: int
    num_hand_offs: int
    prefix_hit_ratio: float | None
    """Since its start; None: no prompt has been looked up."""


@dataclass(frozen=True, slots=True)
class LatencyView:
    """Percentiles of one latency in one lane. `num`: values behind them."""

    name: LatencyName
    model: str
    lane: str
    num: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """All of it."""

    at_s: float
    """Unix time."""
    latency_window_s: float | None
    """The latencies are of so many seconds; None: since the gateway's start."""
    gateway: GatewayView
    scheduler: SchedulerView | None
    """None: none leads, or it does not answer."""
    lanes: tuple[LaneView, ...]
    tenants: tuple[TenantView, ...]
    """Those with the most tokens."""
    workers: tuple[WorkerFigures, ...]
    arenas: tuple[ArenaView, ...]
    latencies: tuple[LatencyView, ...]


def percentile_of(value: HistogramValue, share: float) -> float | None:
    """As Prometheus' histogram_quantile: straight lines within buckets, and the last edge for what is above it. None:
    there are no values."""
    num = value.num
    if num == 0:
        return None
    wanted, before, low = share * num, 0, 0.0
    for edge, count in zip(value.edges, value.counts, strict=False):  # the last bucket has no edge
        if count and before + count >= wanted:
            return low + (edge - low) * max(0.0, wanted - before) / count
        before, low = before + count, edge
    return value.edges[-1]
