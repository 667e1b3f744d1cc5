"""A sweep: one load at several rates or concurrencies, on one server or several, as a curve of latency over throughput.

Every point is a file of its own, written once it is measured whole: a sweep that was broken off goes on where it was.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from weir.bench.serving.arrivals import ArrivalPlan
from weir.bench.serving.config import LoadConfig
from weir.bench.serving.figures import more_figures, summarize
from weir.bench.serving.load import make_jobs
from weir.bench.serving.records import Point, ServerCurve
from weir.bench.serving.serve import Run, lateness_warning, measure, print_errors

MAX_POINTS = 64
MAX_SERVERS = 8
_FORM = 1
"""Of a point's file."""

Axis = Literal["request_rate", "max_concurrency"]


@dataclass(frozen=True, slots=True)
class Server:
    """One side of a sweep. `model` empty: the load's."""

    name: str
    base_url: str
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> "Server":
        """Of `NAME=URL` or `NAME=URL#MODEL`; `grpc://HOST:PORT` is asked over gRPC. Raises ValueError."""
        name, equals, rest = text.partition("=")
        url, _, model = rest.partition("#")
        if not (equals and name) or not all(part.isalnum() or part in "-_." for part in name):
            raise ValueError(f"server {text!r}: must be NAME=URL or NAME=URL#MODEL, the name of letters, digits, - _ .")
        if not url.startswith(("http://", "https://", "grpc://")):
            raise ValueError(f"server {text!r}: must be NAME=URL with http://, https:// or grpc://")
        return cls(name, url.strip(), model)

    def asked(self, load: LoadConfig) -> LoadConfig:
        """The load, on this server."""
        model, url = self.model or load.model, self.base_url
        if url.startswith("grpc://"):
            backend: Literal["grpc", "grpc-chat"] = "grpc-chat" if load.is_chat else "grpc"
            return replace(load, base_url=url.removeprefix("grpc://"), backend=backend, endpoint="", model=model)
        if load.is_grpc and url.startswith("http"):
            return replace(load, base_url=url, backend="openai-chat" if load.is_chat else "openai", model=model)
        return replace(load, base_url=url, model=model)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is run: each value of `axis` on each server, in turns, into files of `folder`."""

    run: Run
    servers: tuple[Server, ...]
    axis: Axis
    values: tuple[float, ...]
    folder: Path

    def __post_init__(self) -> None:
        names = [server.name for server in self.servers]
        if not 1 <= len(names) <= MAX_SERVERS or len(set(names)) != len(names):
            raise ValueError(f"server {', '.join(names)}: must be 1 to {MAX_SERVERS}, each name once")
        if not 1 <= len(self.values) <= MAX_POINTS or len(set(self.values)) != len(self.values):
            raise ValueError(f"sweep over {len(self.values)} values: must be 1 to {MAX_POINTS}, each once")
        if self.axis == "request_rate" and self.run.load.dataset.has_times:
            raise ValueError("sweep-request-rates: the trace has times of its own; --no-self-timed takes lengths alone")

    def load_at(self, server: Server, value: float) -> LoadConfig:
        load = server.asked(self.run.load)
        if self.axis == "max_concurrency":
            return replace(load, max_concurrency=int(value))
        arrivals = load.arrivals
        return replace(load, arrivals=ArrivalPlan(value, arrivals.burstiness, arrivals.burst_size))

    def file_of(self, server: Server, value: float) -> Path:
        return self.folder / f"{server.name}-{self.axis.replace('_', '-')}-{value:g}.json"


def parse_values(flag: str, text: str, *, is_whole: bool) -> tuple[float, ...]:
    """Of `1,2,4`. Raises ValueError naming the flag and the part."""
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf") or (is_whole and value != int(value)):
            raise ValueError(f"{flag} {text!r}: {part!r} must be a {'whole ' * is_whole}number over 0")
        values.append(value)
    return tuple(values)


def main(sweep: Sweep, *, json_output: bool) -> int:
    """Measures what is not there yet, and draws all. Returns 1 if a request failed.

    Raises ValueError for what cannot be measured, or a file that is of another load.
    """
    missing = [
        (server, value)
        for number, value in enumerate(sweep.values)
        for server in (reversed(sweep.servers) if number % 2 else sweep.servers)
        if try_read(sweep, server, value) is None
    ]
    sweep.folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} points to measure of {len(sweep.values) * len(sweep.servers)}", file=sys.stderr)
    for server, value in missing:
        try:
            point = _measured(sweep, server, value)
        except RuntimeError as error:
            print(f"error: {server.name} at {value:g}: {error}", file=sys.stderr)
            return 1
        if point.figures["completed"]:
            write_point(sweep, server, value, point)
        else:
            print(f"{server.name} at {value:g}: nothing was served; it is not kept", file=sys.stderr)
    curves = read_curves(sweep)
    written = draw(curves, sweep)
    if json_output:
        print(json.dumps({curve.name: [dict(point.figures) for point in curve.points] for curve in curves}))
    else:
        print(table(curves, sweep.axis))
        print("\n".join(map(str, written)))
    num_points = sum(len(curve.points) for curve in curves)
    has_failed = any(point.figures["failed"] for curve in curves for point in curve.points)
    return 1 if has_failed or num_points < len(sweep.values) * len(sweep.servers) else 0


def read_curves(sweep: Sweep) -> list[ServerCurve]:
    """Of the files that are there. Raises ValueError."""
    curves = []
    for server in sweep.servers:
        points = [try_read(sweep, server, value) for value in sorted(sweep.values)]
        curves.append(ServerCurve(server.name, tuple(point for point in points if point is not None)))
    return curves


def draw(curves: Sequence[ServerCurve], sweep: Sweep) -> list[Path]:
    """`curve.png` and `curve.html` of the folder; nothing where there is no point."""
    if not any(curve.points for curve in curves):
        return []
    from weir.bench.serving.curves import page, pictures  # noqa: PLC0415 - matplotlib only where needed

    drawn = pictures(curves, sweep.axis)
    png, html = sweep.folder / "curve.png", sweep.folder / "curve.html"
    png.write_bytes(drawn.png)
    html.write_text(page(curves, sweep.axis, drawn.svg))
    return [png, html]


_COLUMNS = {
    "request_throughput": "req/s",
    "request_goodput": "good/s",
    "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT p50",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "TPOT p50",
    "p99_tpot_ms": "p99",
    "p99_e2el_ms": "E2EL p99",
    "p99_client_lateness_ms": "late p99",
    "failed": "failed",
}


def table(curves: Sequence[ServerCurve], axis: Axis) -> str:
    """A row a point; times in ms."""
    width = max(12, *(len(curve.name) + 2 for curve in curves))
    title = "rate" if axis == "request_rate" else "at a time"
    lines = [f"{'':<{width}}{title:>10}" + "".join(f"{name:>10}" for name in _COLUMNS.values())]
    for curve in curves:
        for point in curve.points:
            cells = [point.figures.get(key) for key in _COLUMNS]
            shown = "".join(f"{'-' if cell is None else format(cell, '.1f'):>10}" for cell in cells)
            lines.append(f"{curve.name:<{width}}{point.value:>10g}{shown}")
    return "\n".join(lines)


def _measured(sweep: Sweep, server: Server, value: float) -> Point:
    run = replace(sweep.run, load=sweep.load_at(server, value))
    records, duration_s = asyncio.run(measure(run, make_jobs(run.load)))
    figures = {**summarize(records, duration_s), **more_figures(records, duration_s, run.reporting)}
    print_errors(records)
    if warning := lateness_warning(figures):
        print(f"{server.name} at {value:g}: {warning}", file=sys.stderr)
    return Point(value, figures)


def try_read(sweep: Sweep, server: Server, value: float) -> Point | None:
    """None: not measured yet. Raises ValueError if the file is of another load, or none of ours."""
    path = sweep.file_of(server, value)
    try:
        content = json.loads(path.read_text())
        if content["form"] != _FORM:
            raise ValueError(f"form {content['form']}, not {_FORM}")
        load, figures = content["load"], content["figures"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"result-dir: {path} is no point of a sweep: {error}; remove it") from error
    if load != (wanted := _fingerprint(sweep, server, value)):
        changed = ", ".join(key for key in wanted if load.get(key) != wanted[key])
        raise ValueError(f"result-dir: {path} is of another load ({changed}); name another folder, or remove it")
    return Point(value, figures)


def write_point(sweep: Sweep, server: Server, value: float, point: Point) -> None:
    """All of it or nothing: the name is given when the content is there."""
    path = sweep.file_of(server, value)
    content = {"form": _FORM, "load": _fingerprint(sweep, server, value), "figures": dict(point.figures)}
    half = path.with_suffix(".part")
    half.write_text(json.dumps(content, indent=2) + "\n")
    half.replace(path)


def _fingerprint(sweep: Sweep, server: Server, value: float) -> Mapping[str, str]:
    """What must be the same for a point to be the same; keys and headers say who asks, not what."""
    load, reporting = sweep.load_at(server, value), sweep.run.reporting
    return {
        "server": load.base_url,
        "backend": f"{load.backend} {load.path}",
        "model": load.model,
        "dataset": repr(load.dataset),
        "arrivals": repr(load.arrivals),
        "concurrency": str(load.max_concurrency),
        "num_prompts": str(load.num_prompts),
        "seed": str(load.seed),
        "options": json.dumps(
            [load.ignore_eos, load.temperature, load.sends_texts, load.timeout_s, dict(load.extra_body)], sort_keys=True
        ),
        "mixes": f"{dict(load.lanes.shares)} {dict(load.tenants.shares)}",
        "warm_ups": str(sweep.run.num_warmups),
        "reporting": f"{dict(reporting.goodput_ms)} {reporting.percentile_metrics} {reporting.percentiles}",
    }
