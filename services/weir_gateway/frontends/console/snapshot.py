"""The snapshot of a stack, made of what its processes say of themselves. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import weir
from weir.bus.messages import WorkerRecord
from weir.telemetry.catalog.histograms import E2E, ITL, STAGE, TPOT, TTFT
from weir.telemetry.described import Described
from weir.telemetry.histogram import HistogramValue
from weir.telemetry.stack_snapshot import (
    ArenaView,
    GatewayView,
    LaneView,
    LatencyName,
    LatencyView,
    SchedulerView,
    StackSnapshot,
    TenantView,
    WorkerFigures,
    percentile_of,
)

MAX_TENANTS = 50
MAX_LATENCIES = 250
_LABELLED = re.compile(r'(\w+)\{(?:lane|tenant)="(.*)"\}', re.DOTALL)
_LATENCIES: Mapping[str, LatencyName] = {
    TTFT.name: "time_to_first_token",
    ITL.name: "inter_token",
    TPOT.name: "time_per_output_token",
    STAGE.name: "queue",
    E2E.name: "end_to_end",
}
_MS_PER_S = 1e3

LatencyKey = tuple[LatencyName, str, str]
"""Name, model, lane."""


@dataclass(frozen=True, slots=True)
class StackFigures:
    """What was heard of all processes at one moment. `now_s` of a clock that never goes back."""

    now_s: float
    at_s: float
    gateway: Described
    registered: Sequence[WorkerRecord] = ()
    """Workers, whether or not they answered."""
    workers: Mapping[str, Described] = field(default_factory=dict)
    """By worker id; those that answered."""
    others: Sequence[Described] = ()
    lanes: Sequence[str] = ()
    """All, from the most to the least urgent."""
    num_watchers: int = 0

    @property
    def latencies(self) -> dict[LatencyKey, HistogramValue]:
        found: dict[LatencyKey, HistogramValue] = {}
        for figure in self.gateway.histograms:
            name, labels = _LATENCIES.get(figure.name), dict(figure.labels)
            if name is not None and labels.get("stage", "queue") == "queue":
                found[name, labels.get("model", ""), labels.get("lane", "")] = figure.value
        return found


def snapshot_of(now: StackFigures, recent: StackFigures | None, past: StackFigures | None) -> StackSnapshot:
    """`recent`: some seconds before, for rates; `past`: further back, for percentiles."""
    rates = _Rates(now, recent)
    scheduler = next((one for one in now.others if one.role == "scheduler"), None)
    workers = tuple(_worker(record, now.workers.get(record.worker_id), rates) for record in now.registered)
    return StackSnapshot(
        at_s=round(now.at_s, 3),
        latency_window_s=None if past is None else round(now.now_s - past.now_s, 1),
        gateway=_gateway(now, rates),
        scheduler=None if scheduler is None else _scheduler(scheduler),
        lanes=_lanes(now, scheduler, rates),
        tenants=_tenants(now.gateway, rates),
        workers=tuple(sorted(workers, key=lambda worker: (worker.model, worker.role, worker.worker_id))),
        arenas=tuple(_arena(one) for one in now.others if one.role == "transfer"),
        latencies=_latencies(now, past),
    )


class _Rates:
    """Of counters, by the figures of some seconds before."""

    def __init__(self, now: StackFigures, recent: StackFigures | None) -> None:
        self._elapsed_s = 0.0 if recent is None else now.now_s - recent.now_s
        self._before: dict[str, Described] = {}
        if recent is not None:
            for one in (recent.gateway, *recent.workers.values(), *recent.others):
                self._before[one.process_id] = one

    def of(self, process: Described, *names: str) -> float | None:
        """Of the sum of these counters. None: the process was not heard before."""
        before = self._before.get(process.process_id)
        if before is None or self._elapsed_s <= 0:
            return None
        gained = sum(process.metrics.get(name, 0.0) - before.metrics.get(name, 0.0) for name in names)
        return round(max(0.0, gained) / self._elapsed_s, 2)  # a worker in its other role counts from 0 again


def _gateway(now: StackFigures, rates: _Rates) -> GatewayView:
    gateway = now.gateway
    return GatewayView(
        process_id=gateway.process_id,
        version=weir.__version__,
        num_open=_whole(gateway, "requests_open"),
        num_waiting=_whole(gateway, "entry_waiting"),
        num_connections=_whole(gateway, "http_connections"),
        num_watchers=now.num_watchers,
        num_accepted=_whole(gateway, "accepted_total"),
        num_finished=_whole(gateway, "finished_total"),
        num_failed=_whole(gateway, "failed_total"),
        num_cancelled=_whole(gateway, "cancelled_total"),
        num_refused=_whole(gateway, "refused_total") + _whole(gateway, "entry_refused_total"),
        requests_per_s=rates.of(gateway, "accepted_total"),
        prompt_tokens_per_s=rates.of(gateway, "prompt_tokens_total"),
        output_tokens_per_s=rates.of(gateway, "output_tokens_total"),
    )


def _scheduler(scheduler: Described) -> SchedulerView:
    return SchedulerView(
        process_id=scheduler.process_id,
        epoch=_whole(scheduler, "epoch"),
        num_queued=_whole(scheduler, "queued"),
        num_granted=_whole(scheduler, "granted"),
        num_prefilling=_whole(scheduler, "prefills_in_flight"),
        num_reserved_pages=_whole(scheduler, "reserved_pages"),
        num_workers=_whole(scheduler, "workers"),
        num_gateways=_whole(scheduler, "gateways"),
    )


def _lanes(now: StackFigures, scheduler: Described | None, rates: _Rates) -> tuple[LaneView, ...]:
    """Those that the scheduler knows, the most urgent first."""
    if scheduler is None:
        return ()
    places = {lane: place for place, lane in enumerate(now.lanes)}
    known = _labels(scheduler.metrics, "lane_in_flight")
    views = []
    for lane in sorted(known, key=lambda name: (places.get(name, len(places)), name)):
        granted = f"granted_{lane}_total"
        view = LaneView(
            lane=lane,
            num_queued=_whole(scheduler, f"queued_{lane}"),
            num_in_flight=_whole(scheduler, f'lane_in_flight{{lane="{lane}"}}'),
            oldest_wait_s=round(scheduler.metrics.get(f'lane_oldest_wait_s{{lane="{lane}"}}', 0.0), 3),
            num_granted=_whole(scheduler, granted),
            grants_per_s=rates.of(scheduler, granted),
            output_tokens_per_s=rates.of(now.gateway, f'lane_output_tokens_total{{lane="{lane}"}}'),
        )
        views.append(view)
    return tuple(views)


def _tenants(gateway: Described, rates: _Rates) -> tuple[TenantView, ...]:
    def number(name: str, tenant: str) -> int:
        return _whole(gateway, f'tenant_{name}{{tenant="{tenant}"}}')

    views = [
        TenantView(
            tenant=tenant,
            num_accepted=number("accepted_total", tenant),
            num_finished=number("finished_total", tenant),
            num_refused=number("refused_total", tenant),
            num_prompt_tokens=number("prompt_tokens_total", tenant),
            num_output_tokens=number("output_tokens_total", tenant),
            output_tokens_per_s=rates.of(gateway, f'tenant_output_tokens_total{{tenant="{tenant}"}}'),
        )
        for tenant in _labels(gateway.metrics, "tenant_accepted_total", "tenant_refused_total")
    ]
    views.sort(key=lambda view: (-(view.num_prompt_tokens + view.num_output_tokens), view.tenant))
    return tuple(views[:MAX_TENANTS])


def _worker(record: WorkerRecord, described: Described | None, rates: _Rates) -> WorkerFigures:
    heard = described or Described(record.role, record.worker_id, {})
    duty = "drained" if record.is_drained else "draining" if record.is_draining else "serving"
    return WorkerFigures(
        worker_id=record.worker_id,
        role=record.role,
        model=record.model,
        address=record.address,
        host_id=record.host_id,
        duty=duty if described is not None else "silent",  # type: ignore[arg-type]  # one of the three
        num_running=int(heard.metrics.get("num_running", record.num_running)),
        num_waiting=int(heard.metrics.get("num_waiting", record.num_waiting)),
        max_num_seqs=record.max_num_seqs,
        max_num_batched_tokens=record.max_num_batched_tokens,
        num_used_pages=_whole(heard, "num_used_pages"),
        num_preemptions=_whole(heard, "preemptions_total"),
        num_failed_steps=_whole(heard, "failed_steps_total"),
        steps_per_s=rates.of(heard, "steps_total"),
        prompt_tokens_per_s=rates.of(heard, "prompt_tokens_computed_total"),
        output_tokens_per_s=rates.of(heard, "output_tokens_computed_total"),
    )


def _arena(transfer: Described) -> ArenaView:
    num_hits = transfer.metrics.get("prefix_hit_pages_total", 0.0)
    num_asked = num_hits + transfer.metrics.get("prefix_missed_pages_total", 0.0)
    return ArenaView(
        process_id=transfer.process_id,
        num_pages=_whole(transfer, "total_pages"),
        num_free=_whole(transfer, "free_pages"),
        num_leased=_whole(transfer, "leased_pages"),
        num_orphaned=_whole(transfer, "orphaned_pages"),
        num_cached=_whole(transfer, "cached_pages"),
        num_shared=_whole(transfer, "shared_pages"),
        num_leases=_whole(transfer, "leases"),
        num_hand_offs=_whole(transfer, "handoffs_total"),
        prefix_hit_ratio=round(num_hits / num_asked, 4) if num_asked else None,
    )


def _latencies(now: StackFigures, past: StackFigures | None) -> tuple[LatencyView, ...]:
    before = {} if past is None else past.latencies
    names, lanes = list(_LATENCIES.values()), {lane: place for place, lane in enumerate(now.lanes)}
    in_order = sorted(
        now.latencies.items(),
        key=lambda one: (one[0][1], lanes.get(one[0][2], len(lanes)), one[0][2], names.index(one[0][0])),
    )
    views = []
    for (name, model, lane), value in in_order:
        known = before.get((name, model, lane))
        since = value if known is None or known.edges != value.edges else _gained(value, known)
        p50, p90, p99 = (percentile_of(since, share) for share in (0.5, 0.9, 0.99))
        views.append(LatencyView(name, model, lane, since.num, _ms(p50), _ms(p90), _ms(p99)))
    return tuple(views[:MAX_LATENCIES])


def _gained(value: HistogramValue, before: HistogramValue) -> HistogramValue:
    counts = tuple(max(0, new - old) for new, old in zip(value.counts, before.counts, strict=True))
    return HistogramValue(value.edges, counts, value.total - before.total)


def _labels(metrics: Iterable[str], *names: str) -> list[str]:
    """Of the series of these names, in their order."""
    found = (_LABELLED.fullmatch(name) for name in metrics)
    return list(dict.fromkeys(match[2] for match in found if match is not None and match[1] in names))


def _whole(process: Described, name: str) -> int:
    return int(process.metrics.get(name, 0.0))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * _MS_PER_S, 3)
