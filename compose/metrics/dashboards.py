"""Writes Grafana's dashboards from one description: `python3 compose/metrics/dashboards.py`.

The files in grafana/dashboards are what it writes, and a test compares them: change this file, not those.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
JAEGER = {"type": "jaeger", "uid": "jaeger"}
_COLUMNS = 24
_LANE = '{lane=~"$lane"}'


@dataclass(frozen=True)
class Query:
    """One expression of a panel. `may_be_empty`: where nothing of the kind has happened, or there is no GPU."""

    expression: str
    legend: str = ""
    may_be_empty: bool = False
    has_exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """`unit` in Grafana's words; `kind` is the panel's type."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 7


@dataclass(frozen=True)
class Dashboard:
    """`name` is of the file and the address."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[dict[str, Any], ...] = ()


def _panel(title: str, unit: str, *queries: tuple[str, str], may_be_empty: bool = False) -> Panel:
    return Panel(title, unit, tuple(Query(text, legend, may_be_empty) for text, legend in queries))


def _number(title: str, unit: str, expression: str, *, may_be_empty: bool = False) -> Panel:
    return Panel(title, unit, (Query(expression, "", may_be_empty),), kind="stat", width=4, height=4)


def _rate(name: str, by: str = "", labels: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped}(rate({name}{labels}[$__rate_interval]))"


def _mean(histogram: str, by: str = "") -> str:
    return f"{_rate(f'{histogram}_sum', by)} / ({_rate(f'{histogram}_count', by)} > 0)"


def _quantile(quantile: float, name: str, by: str, labels: str) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{name}_bucket', f'{by}, le' if by else 'le', labels)})"


def _percentiles(title: str, name: str, labels: str, by: str = "lane") -> Panel:
    """Half, 95 and 99 of a hundred; with the traces of single requests where the histogram has them."""
    queries = (
        Query(_quantile(quantile, name, by, labels), f"{{{{{by}}}}} p{quantile * 100:g}", has_exemplars=quantile > 0.9)
        for quantile in (0.5, 0.95, 0.99)
    )
    return Panel(title, "s", tuple(queries))


STACK = Dashboard(
    "weir-stack",
    "Weir: the stack",
    (
        _number("Leader", "none", "sum(weir_scheduler_is_leader)"),
        _number("Workers", "none", "max(weir_scheduler_workers)"),
        _number("Requests in flight", "none", "sum(weir_gateway_requests_in_flight)"),
        _number("Requests that wait", "none", "sum(weir_scheduler_requests_queued)"),
        _number("Bad requests, one hour", "percentunit", "weir:requests_bad:ratio_rate1h"),
        _number("Alerts", "none", 'count(ALERTS{alertname=~"Weir.*",alertstate="firing"})', may_be_empty=True),
        _panel(
            "Requests by how they ended",
            "reqps",
            *(
                (_rate(f"weir_gateway_requests_{end}_total"), end)
                for end in ("finished", "cancelled", "failed", "refused", "rejected")
            ),
        ),
        _panel("Refused on arrival", "reqps", (_rate("weir_gateway_entry_refused_total"), "refused")),
        _panel(
            "Tokens of workers",
            "none",
            (_rate("weir_worker_prompt_tokens_computed_total", "role"), "{{role}} prompt, computed"),
            (_rate("weir_worker_prompt_tokens_cached_total", "role"), "{{role}} prompt, cached"),
            (_rate("weir_worker_tokens_generated_total", "role"), "{{role}} output"),
        ),
        _panel("Workers' time that is computed in", "percentunit", ("weir:worker_busy:ratio_rate30m", "{{process}}")),
        _panel(
            "A step's time",
            "s",
            *((_quantile(one, "weir_step_seconds", "role", ""), f"{{{{role}}}} p{one * 100:g}") for one in (0.5, 0.99)),
        ),
        _panel(
            "A step's time by its sequences, p50",
            "s",
            (_quantile(0.5, "weir_step_seconds", "sequences", '{role="decode"}'), "{{sequences}} sequences"),
        ),
        Panel(
            "Sequences of a step",
            "none",
            (Query(_rate("weir_step_sequences_bucket", "le", '{role="decode"}'), "{{le}}"),),
            kind="heatmap",
        ),
        _panel(
            "Sequences",
            "none",
            ("sum by (process) (weir_worker_sequences_running)", "{{process}} running"),
            ("sum by (process) (weir_worker_sequences_waiting)", "{{process}} waiting"),
        ),
        _panel(
            "Pages",
            "none",
            ("sum(weir_arena_leased_pages)", "leased"),
            ("sum(weir_arena_cached_pages)", "cached"),
            ("sum(weir_arena_free_pages)", "free"),
            ("sum(weir_arena_orphaned_pages)", "orphaned"),
        ),
        _panel("Pages of a sequence", "none", ("weir:kv_pages_per_sequence", "pages"), may_be_empty=True),
        _panel("Prefix cache, share of pages found", "percentunit", ("weir:prefix_hits:ratio_rate15m", "found")),
        _panel("Preemptions, of sequences", "percentunit", ("weir:preemptions:ratio_rate15m", "preempted")),
        _panel("Retries, of requests", "percentunit", ("weir:retries:ratio_rate15m", "computed again")),
        _panel("Rows computed in vain", "percentunit", ("weir:wasted_rows:ratio_rate15m", "in vain")),
        _panel("A token's cost", "s", ("weir:worker_seconds_per_token:rate5m", "worker seconds")),
        _panel(
            "Hand-offs",
            "s",
            *((_quantile(one, "weir_hand_off_seconds", "", ""), f"p{one * 100:g}") for one in (0.5, 0.99)),
        ),
        _panel(
            "GPUs",
            "percentunit",
            ("weir_worker_gpu_utilization_ratio", "{{process}} work"),
            ("weir_worker_gpu_memory_used_bytes / weir_worker_gpu_memory_bytes", "{{process}} memory"),
            may_be_empty=True,
        ),
        _panel(
            "Messages of NATS",
            "none",
            (_rate("weir_process_bus_received_total", "role"), "{{role}} received"),
            (_rate("weir_process_bus_dropped_total", "role"), "{{role}} dropped"),
        ),
    ),
)

LANES = Dashboard(
    "weir-lanes",
    "Weir: lanes and tenants",
    (
        _percentiles("Time to the first token", "weir_time_to_first_token_seconds", _LANE),
        _percentiles("Between tokens", "weir_inter_token_latency_seconds", _LANE),
        _percentiles("Wait in the queue", "weir_stage_seconds", '{stage="queue",lane=~"$lane"}'),
        _panel("Requests that wait", "none", (f"sum by (lane) (weir_lane_requests_queued{_LANE})", "{{lane}}")),
        _panel("The oldest wait", "s", (f"max by (lane) (weir_lane_oldest_wait_seconds{_LANE})", "{{lane}}")),
        _panel("Requests that run", "none", (f"sum by (lane) (weir_lane_requests_in_flight{_LANE})", "{{lane}}")),
        _panel("Grants", "reqps", (_rate("weir_lane_grants_total", "lane", _LANE), "{{lane}}")),
        _panel("Output tokens of lanes", "none", (f"weir:lane_output_tokens:rate5m{_LANE}", "{{lane}}")),
        _panel("Batch formation, p99", "s", (f"weir:batch_formation_seconds:p99_rate10m{_LANE}", "{{lane}}")),
        _panel("Output tokens of tenants", "none", ("weir:tenant_output_tokens:rate5m", "{{tenant}}")),
        _panel("Requests of tenants", "reqps", (_rate("weir_tenant_requests_accepted_total", "tenant"), "{{tenant}}")),
        _panel(
            "Refused, by tenant",
            "reqps",
            (_rate("weir_tenant_requests_refused_total", "tenant"), "{{tenant}}"),
            may_be_empty=True,
        ),
        _panel(
            "Refused, by reason",
            "reqps",
            (_rate("weir_gateway_entry_refusals_total", "reason"), "on arrival: {{reason}}"),
            (_rate("weir_scheduler_refusals_total", "reason"), "by the scheduler: {{reason}}"),
            (_rate("weir_scheduler_revocations_total", "reason"), "while it waited: {{reason}}"),
            may_be_empty=True,
        ),
    ),
    (
        {
            "name": "lane",
            "label": "lane",
            "type": "query",
            "datasource": PROMETHEUS,
            "query": "label_values(weir_lane_requests_queued, lane)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ),
)

REQUEST = Dashboard(
    "weir-request",
    "Weir: one request",
    (
        Panel("The trace", "none", (), kind="traces", width=24, height=14),
        _percentiles("From arrival to the last token: choose a point's trace", "weir_request_seconds", ""),
        _percentiles("Stages: choose a point's trace", "weir_stage_seconds", "", by="stage"),
        _panel(
            "Where the time goes: a request's mean",
            "s",
            (
                _mean("weir_stage_seconds", "stage"),
                "{{stage}}",
            ),
        ),
        _panel(
            "Tokens of a request, mean",
            "none",
            (
                _mean("weir_request_prompt_tokens"),
                "prompt",
            ),
            (
                _mean("weir_request_output_tokens"),
                "output",
            ),
        ),
        _percentiles("A token of an answer, on average", "weir_time_per_output_token_seconds", ""),
    ),
    ({"name": "trace_id", "label": "trace", "type": "textbox", "query": "", "current": {"text": "", "value": ""}},),
)
DASHBOARDS = (STACK, LANES, REQUEST)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana reads."""
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["weir"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(dashboard.variables)},
        "annotations": {"list": []},
        "links": [{"type": "dashboards", "tags": ["weir"], "title": "Weir", "asDropdown": False, "keepTime": True}],
        "panels": list(_placed(dashboard.panels)),
    }


def _placed(panels: tuple[Panel, ...]) -> Iterator[dict[str, Any]]:
    """From the left, a row after the other."""
    x, y, row_height = 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > _COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        yield _shown(panel, number) | {"gridPos": place}
        x, row_height = x + panel.width, max(row_height, panel.height)


def _shown(panel: Panel, number: int) -> dict[str, Any]:
    is_trace = panel.kind == "traces"
    targets = [_target(query, number, panel.kind) for number, query in enumerate(panel.queries)]
    return {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": JAEGER if is_trace else PROMETHEUS,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [{"refId": "A", "datasource": JAEGER, "query": "$trace_id"}] if is_trace else targets,
    }


def _target(query: Query, number: int, kind: str) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + number),
        "datasource": PROMETHEUS,
        "expr": query.expression,
        "legendFormat": query.legend,
        "exemplar": query.has_exemplars,
        "format": "heatmap" if kind == "heatmap" else "time_series",
        "instant": kind == "stat",
        "range": kind != "stat",
    }


def text_of(dashboard: Dashboard) -> str:
    """Of the dashboard's file."""
    return json.dumps(document(dashboard), indent=1) + "\n"


def write() -> None:
    """All files anew."""
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(text_of(dashboard))


if __name__ == "__main__":
    write()
