"""One simulated run as tables for a terminal and as a dictionary for JSON."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from weir.sim.results.fairness import jain_index, widest_gap
from weir.sim.results.metrics import SimResult, Slos, Summary, by_lane, by_tenant, gap_percentile_s, summarize

MAX_TENANTS_SHOWN = 20

_MILLISECONDS = 1e3
_LATENCY_HEADINGS = ("TTFT p50", "TTFT p99", "TPOT", "TPOT p99", "gap p99", "a token")
"""TPOT and the last one are means; the last is of the whole latency over the output tokens."""


def as_tables(result: SimResult, slos: Slos | None = None) -> list[Table]:
    """Requests and latencies of the whole run, a row a lane, a row a tenant where there are several."""
    lanes, tenants = by_lane(result, slos), by_tenant(result, slos)
    tables = _pair("requests", {"all": summarize(result, slos), **(lanes if len(lanes) > 1 else {})})
    if len(tenants) > 1:
        most_first = sorted(tenants.items(), key=lambda item: (-item[1].num_offered, item[0]))
        title = (
            f"tenants (the {MAX_TENANTS_SHOWN} with most of {len(tenants)})"
            if len(tenants) > MAX_TENANTS_SHOWN
            else "tenants"
        )
        tables += _pair(title, dict(most_first[:MAX_TENANTS_SHOWN]))
    tables.append(_whole(result))
    return tables


def as_dict(result: SimResult, slos: Slos | None = None) -> dict[str, Any]:
    """Flat figures under `all`, `lanes` and `tenants`; what is not known (a mean of nothing) is null."""
    return {
        "duration_s": result.duration_s,
        "all": finite(summarize(result, slos).as_dict()),
        "lanes": {name: finite(summary.as_dict()) for name, summary in by_lane(result, slos).items()},
        "tenants": {name: finite(summary.as_dict()) for name, summary in by_tenant(result, slos).items()},
        "p50_itl_s": _finite(gap_percentile_s(result, 50)),
        "p99_itl_s": _finite(gap_percentile_s(result, 99)),
        "widest_tenant_gap": widest_gap(result).service,
        "tenant_service_jain": jain_index(last_service(result)),
        "max_queued": max((length for _, length in result.queue_lengths), default=0),
        "refusals": refusals(result),
        "counters": dict(result.counters),
    }


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has neither NaN nor infinity: both become null."""
    return {name: _finite(value) for name, value in metrics.items()}


def last_service(result: SimResult) -> list[float]:
    """What each tenant had had at the end, by name."""
    return [service[-1][1] for _, service in sorted(result.tenant_service.items()) if service]


def refusals(result: SimResult) -> dict[str, int]:
    """reason -> requests that were refused or given up for it, warm-up included; the most frequent first."""
    counts = Counter(outcome.refusal for outcome in result.outcomes if outcome.refusal)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _pair(title: str, summaries: Mapping[str, Summary]) -> list[Table]:
    """Two tables, for one is wider than a terminal of 80 columns."""
    return [
        _table(title, ("offered", "served", "refused", "attained", "evicted"), _counts, summaries),
        _table(f"{title}: latencies, ms", _LATENCY_HEADINGS, _latencies, summaries),
    ]


def _table(
    title: str, headings: Sequence[str], cells: Callable[[Summary], Sequence[str]], summaries: Mapping[str, Summary]
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for heading in headings:
        # Where there is little room names are folded, but no figure is cut.
        table.add_column(heading, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        table.add_row(name or "(default)", *cells(summary))
    return table


def _counts(summary: Summary) -> Sequence[str]:
    counts = (summary.num_offered, summary.num_finished, summary.num_refused)
    return (*map(str, counts), f"{summary.attainment:.1%}", f"{summary.preempted_share:.1%}")


def _latencies(summary: Summary) -> Sequence[str]:
    """As `_LATENCY_HEADINGS`."""
    seconds = (
        summary.p50_ttft_s,
        summary.p99_ttft_s,
        summary.mean_tpot_s,
        summary.p99_tpot_s,
        summary.p99_worst_gap_s,
        summary.mean_normalized_s,
    )
    return [_number(value * _MILLISECONDS) for value in seconds]


def _whole(result: SimResult) -> Table:
    summary = summarize(result)
    table = Table(title="run", title_justify="left", show_header=False)
    rows = {
        "simulated time": f"{result.duration_s:.1f} s",
        "offered": f"{_number(summary.offered_a_s)} requests/s",
        "served": f"{_number(summary.finished_a_s)} requests/s",
        "output": f"{_number(summary.output_tokens_a_s)} tokens/s",
        "gaps between tokens": f"p50 {_number(gap_percentile_s(result, 50) * _MILLISECONDS)} ms, "
        f"p99 {_number(gap_percentile_s(result, 99) * _MILLISECONDS)} ms",
        "prompt tokens cached": _share(summary.cached_share),
        "served by one worker": _share(summary.local_share),
        "longest queue": f"{max((length for _, length in result.queue_lengths), default=0)} requests",
    }
    rows |= {f"refused: {reason}": f"{num} requests" for reason, num in refusals(result).items()}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
