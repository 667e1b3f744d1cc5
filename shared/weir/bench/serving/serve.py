"""`weir bench serve`: flags, printed block and JSON keys of `vllm bench serve`, for any OpenAI-style server.

TPOT is (latency - TTFT) / (output tokens - 1); ITL is the gap between two chunks.
"""

import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from weir.bench.serving.load import LoadConfig, ServedRequest, run_load

_WIDTH = 50
_METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}
_METRICS["e2el"] = "End-to-end Latency"
_GROUPS: Mapping[str, Callable[[ServedRequest], str]] = {
    "lanes": lambda record: record.lane,
    "tenants": lambda record: record.tenant,
}
_GROUP_COLUMNS = {
    "completed": "done",
    "failed": "failed",
    "refused": "refused",
    "output_throughput": "tok/s",
    "mean_ttft_ms": "mean TTFT",
    "median_ttft_ms": "median",
    "p99_ttft_ms": "p99",
    "median_itl_ms": "med. ITL",
    "p99_itl_ms": "p99",
    "p99_e2el_ms": "p99 E2EL",
}
_COUNTS = frozenset({"completed", "failed", "refused"})
_GROUP_WIDTH = 112
_REFUSED_STATUSES = frozenset({429, 503})
_MAX_ERRORS_SHOWN = 10


def main(config: LoadConfig, *, json_output: bool, result_path: Path | None) -> int:
    """Runs the load and prints the result. Returns 1 if any request failed."""
    records, duration_s = asyncio.run(run_load(config))
    result = summarize(records, duration_s)
    groups = summarize_groups(records, duration_s)
    if result_path is not None:
        result_path.write_text(json.dumps({**result, **groups}, indent=2) + "\n")
    print(json.dumps({**result, **groups}) if json_output else block(result, config, groups))
    errors = sorted({record.error for record in records if record.error})
    for error in errors[:_MAX_ERRORS_SHOWN]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > _MAX_ERRORS_SHOWN:
        print(f"failed: {len(errors) - _MAX_ERRORS_SHOWN} more kinds of error", file=sys.stderr)
    return 1 if result["failed"] else 0


def summarize_groups(records: Sequence[ServedRequest], duration_s: float) -> dict[str, dict[str, dict[str, float]]]:
    """The same figures of each lane and of each tenant, where requests named any.

    `refused` of the failed: asked at once to come later (429 or 503).
    """
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for key, name_of in _GROUPS.items():
        names = sorted({name_of(record) for record in records} - {""})
        if names:
            groups[key] = {
                name: _summarize_group([record for record in records if name_of(record) == name], duration_s)
                for name in names
            }
    return groups


def _summarize_group(records: Sequence[ServedRequest], duration_s: float) -> dict[str, float]:
    refused = sum(record.status in _REFUSED_STATUSES for record in records)
    return {**summarize(records, duration_s), "refused": float(refused)}


def summarize(records: Sequence[ServedRequest], duration_s: float) -> dict[str, float]:
    """The keys of `vllm bench serve`; latencies in ms."""
    done = [record for record in records if not record.error]
    num_output = sum(record.output_len for record in done)
    num_input = sum(record.input_len for record in done)
    result: dict[str, float] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    series = {
        "ttft": [record.ttft_s for record in done],
        "tpot": [
            (record.latency_s - record.ttft_s) / (record.output_len - 1) for record in done if record.output_len > 1
        ],
        "itl": [gap for record in done for gap in record.gaps_s],
        "e2el": [record.latency_s for record in done],
    }
    for name, values_s in series.items():
        result |= {f"{key}_{name}_ms": 1000 * value for key, value in _statistics(values_s).items()}
    return result


def _statistics(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("mean", "median", "std", "p99"), 0.0)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "std": statistics.pstdev(ordered),
        "p99": p99(ordered),
    }


def p99(values: Iterable[float]) -> float:
    """The nearest of the values, of which there must be one."""
    ordered = sorted(values)
    return ordered[round(0.99 * (len(ordered) - 1))]


def block(
    result: dict[str, float], config: LoadConfig, groups: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
) -> str:
    """The printed block, with a row a lane and a tenant where there are any."""
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        _row("Successful requests:", f"{result['completed']:.0f}"),
        _row("Failed requests:", f"{result['failed']:.0f}"),
        _row("Maximum request concurrency:", str(config.max_concurrency)),
        _row("Request rate configured (RPS):", f"{config.request_rate:.2f}"),
        _row("Benchmark duration (s):", f"{result['duration']:.2f}"),
        _row("Total input tokens:", f"{result['total_input_tokens']:.0f}"),
        _row("Total generated tokens:", f"{result['total_output_tokens']:.0f}"),
        _row("Request throughput (req/s):", f"{result['request_throughput']:.2f}"),
        _row("Output token throughput (tok/s):", f"{result['output_throughput']:.2f}"),
        _row("Total token throughput (tok/s):", f"{result['total_token_throughput']:.2f}"),
    ]
    for name, title in _METRICS.items():
        lines.append(f"{title:-^{_WIDTH}}")
        label = name.upper()
        lines.extend(
            _row(f"{key.capitalize()} {label} (ms):", f"{result[f'{key}_{name}_ms']:.2f}")
            for key in ("mean", "median", "p99")
        )
    for key, rows in (groups or {}).items():
        lines.append(f"{f' {key.capitalize()} (ms) ':-^{_GROUP_WIDTH}}")
        lines.extend(_group_rows(rows))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _group_rows(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    width = max(12, *(len(name) + 2 for name in rows))
    header = f"{'':<{width}}" + "".join(f"{title:>10}" for title in _GROUP_COLUMNS.values())
    return [header] + [
        f"{name:<{width}}" + "".join(f"{figures[key]:>10.{0 if key in _COUNTS else 1}f}" for key in _GROUP_COLUMNS)
        for name, figures in rows.items()
    ]


def _row(label: str, value: str) -> str:
    return f"{label:<40}{value:<10}"
