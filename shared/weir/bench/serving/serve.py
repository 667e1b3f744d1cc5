"""`weir bench serve`: flags, printed block and JSON keys of `vllm bench serve`, over HTTP or Weir's gRPC.

What the figures are is said in `figures`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isinf
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from weir.bench.serving.config import LoadConfig
from weir.bench.serving.figures import (
    METRICS,
    NO_TARGETS,
    Reporting,
    more_figures,
    percentile_word,
    summarize,
    summarize_groups,
)
from weir.bench.serving.load import make_jobs, run_jobs, wait_ready, warm_up
from weir.bench.serving.records import BenchRequest, ServedRequest

Result = dict[str, object]

_WIDTH = 50
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
_MAX_ERRORS_SHOWN = 10
_LATE_SHARE = 0.1
"""Of the mean time to the first token: a client later than this measures itself."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: the load, what comes before it, and what is made of it."""

    load: LoadConfig
    reporting: Reporting = NO_TARGETS
    num_warmups: int = 0
    ready_timeout_s: float = 0.0
    """0: the server is there."""
    shows_progress: bool = True


@dataclass(frozen=True, slots=True)
class Saving:
    """Where the result goes. `path` empty: nowhere. `metadata`: more keys of it."""

    path: Path | None = None
    is_detailed: bool = False
    label: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


def main(run: Run, saving: Saving, *, json_output: bool) -> int:
    """Runs the load and prints the result. Returns 1 if any request failed. Raises ValueError for what cannot be."""
    jobs = make_jobs(run.load)
    if saving.path is not None:
        _check_writable(saving.path)
    try:
        records, duration_s = asyncio.run(measure(run, jobs))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    groups = summarize_groups(records, duration_s)
    figures = {**summarize(records, duration_s), **more_figures(records, duration_s, run.reporting)}
    result: Result = {**described(run.load, saving), **figures, **groups}
    if saving.path is not None:
        details = detailed(records) if saving.is_detailed else {}
        saving.path.write_text(json.dumps({**result, **details}, indent=2) + "\n")
    print(json.dumps(result) if json_output else block(figures, run.load, groups, run.reporting))
    print_errors(records)
    if warning := lateness_warning(figures):
        print(warning, file=sys.stderr)
    return 1 if figures["failed"] else 0


def _check_writable(path: Path) -> None:
    """Before anything is measured. Raises ValueError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"result-filename {path}: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"result-filename {path}: cannot be written")


async def measure(run: Run, jobs: Sequence[BenchRequest]) -> tuple[list[ServedRequest], float]:
    """Raises RuntimeError if the server does not become ready, or a request to warm it up fails."""
    if run.ready_timeout_s:
        await wait_ready(run.load, run.ready_timeout_s)
    await warm_up(run.load, run.num_warmups)
    with progress_bar(sum(job.num_turns for job in jobs), is_wanted=run.shows_progress) as advance:
        return await run_jobs(run.load, jobs, on_done=advance)


class progress_bar:  # noqa: N801 - a context manager, used as a function is
    """Counts records on stderr, and how many of them failed. Where that is no terminal it shows nothing."""

    def __init__(self, num: int, *, is_wanted: bool = True, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._num = num
        self._num_failed = 0
        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        is_shown = is_wanted and console.is_terminal
        self._progress = Progress(*columns, *times, console=console, transient=True, disable=not is_shown)

    def __enter__(self) -> Callable[[ServedRequest], None]:
        self._progress.start()
        self._task = self._progress.add_task("", total=self._num, failed="")
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _advance(self, record: ServedRequest) -> None:
        self._num_failed += bool(record.error)
        self._progress.update(self._task, advance=1, failed=f"{self._num_failed} failed" * bool(self._num_failed))


def print_errors(records: Sequence[ServedRequest]) -> None:
    """Each kind once, to stderr."""
    errors = sorted({record.error for record in records if record.error})
    for error in errors[:_MAX_ERRORS_SHOWN]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > _MAX_ERRORS_SHOWN:
        print(f"failed: {len(errors) - _MAX_ERRORS_SHOWN} more kinds of error", file=sys.stderr)


def lateness_warning(figures: Mapping[str, float | int | None]) -> str:
    """Empty where the client kept its times."""
    late_ms, ttft_ms = figures["p99_client_lateness_ms"] or 0.0, figures["mean_ttft_ms"] or 0.0
    if not figures["completed"] or late_ms <= _LATE_SHARE * ttft_ms:
        return ""
    return (
        f"warning: this client was late (p99 {late_ms:.1f} ms of a mean TTFT of {ttft_ms:.1f} ms), and its lateness is"
        " in the latencies: ask for less at a time, or run it on a machine of its own"
    )


def described(load: LoadConfig, saving: Saving) -> Result:
    """The keys that say what was run. JSON knows no infinity: a rate without end is `inf`."""
    rate, ramp_up = load.arrivals.request_rate, load.arrivals.ramp_up
    result: Result = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": load.backend,
        "backend": load.backend,
        "label": saving.label or None,
        "model_id": load.model,
        "tokenizer_id": None,
        "num_prompts": load.num_prompts,
        **saving.metadata,
        "request_rate": "inf" if isinf(rate) else rate,
        "burstiness": "inf" if isinf(load.arrivals.burstiness) else load.arrivals.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    if ramp_up is not None:
        result |= {
            "ramp_up_strategy": ramp_up.strategy,
            "ramp_up_start_rps": ramp_up.start_rps,
            "ramp_up_end_rps": ramp_up.end_rps,
        }
    return result


def detailed(records: Sequence[ServedRequest]) -> Result:
    """A list of each figure, an entry a request."""
    return {
        "input_lens": [record.input_len for record in records],
        "output_lens": [record.output_len for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.gaps_s for record in records],
        "latencies": [record.latency_s for record in records],
        "start_times": [record.started_s for record in records],
        "queue_times": [record.queued_s for record in records],
        "client_latenesses": [record.late_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def result_name(load: LoadConfig, label: str) -> str:
    """As vLLM names its files."""
    arrivals = load.arrivals
    rate = f"{arrivals.request_rate:g}qps"
    if arrivals.ramp_up is not None:
        ramp_up = arrivals.ramp_up
        rate = f"ramp-up-{ramp_up.strategy}-{ramp_up.start_rps:g}qps-{ramp_up.end_rps:g}qps"
    concurrency = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    model, date = load.model.split("/")[-1], datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{label or load.backend}-{rate}{concurrency}-{model}-{date}.json"


def block(
    result: Mapping[str, float | int | None],
    config: LoadConfig,
    groups: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    reporting: Reporting = NO_TARGETS,
) -> str:
    """The printed block, with a row a lane and a tenant where there are any."""
    rows: list[tuple[str, object, str]] = [
        ("Successful requests:", result["completed"], ".0f"),
        ("Failed requests:", result["failed"], ".0f"),
        ("Maximum request concurrency:", config.max_concurrency, "d"),
        ("Request rate configured (RPS):", config.arrivals.request_rate, ".2f"),
        ("Benchmark duration (s):", result["duration"], ".2f"),
        ("Total input tokens:", result["total_input_tokens"], ".0f"),
        ("Total generated tokens:", result["total_output_tokens"], ".0f"),
        ("Request throughput (req/s):", result["request_throughput"], ".2f"),
        ("Request goodput (req/s):", result.get("request_goodput"), ".2f"),
        ("Output token throughput (tok/s):", result["output_throughput"], ".2f"),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"], ".2f"),
        ("Peak concurrent requests:", result["max_concurrent_requests"], ".2f"),
        ("Total token throughput (tok/s):", result["total_token_throughput"], ".2f"),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [_row(label, format(value, form)) for label, value, form in rows if value is not None]
    for name in reporting.percentile_metrics:
        lines.append(f"{METRICS[name]:-^{_WIDTH}}")
        keys = ["mean", "median", *(f"p{percentile_word(p)}" for p in reporting.percentiles)]
        lines += [_row(f"{key.capitalize()} {name.upper()} (ms):", f"{result[f'{key}_{name}_ms']:.2f}") for key in keys]
    lines += _client_rows(result)
    for key, named in (groups or {}).items():
        lines.append(f"{f' {key.capitalize()} (ms) ':-^{_GROUP_WIDTH}}")
        lines.extend(_group_rows(named))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _client_rows(result: Mapping[str, float | int | None]) -> list[str]:
    """What this process delayed: its lateness, and the wait for room where there was one."""
    lines = []
    for name, title in (("client_lateness", "Client Lateness"), ("client_queue_time", "Client-side Queueing")):
        if result.get(f"max_{name}_ms"):
            label = name.replace("_", " ").title()
            lines.append(f"{title:-^{_WIDTH}}")
            lines += [
                _row(f"{key.capitalize()} {label} (ms):", f"{result[f'{key}_{name}_ms']:.2f}")
                for key in ("mean", "p99", "max")
            ]
    return lines


def _group_rows(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    width = max(12, *(len(name) + 2 for name in rows))
    header = f"{'':<{width}}" + "".join(f"{title:>10}" for title in _GROUP_COLUMNS.values())
    return [header] + [
        f"{name:<{width}}" + "".join(f"{figures[key]:>10.{0 if key in _COUNTS else 1}f}" for key in _GROUP_COLUMNS)
        for name, figures in rows.items()
    ]


def _row(label: str, value: str) -> str:
    return f"{label:<40}{value:<10}"
