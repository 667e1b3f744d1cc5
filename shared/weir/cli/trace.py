"""`weir trace`: one request's waterfall, from what its gateway remembers of it. No collector is needed."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from weir.cli import EXIT_USAGE, options
from weir.cli.console import error_line, fail, stdout
from weir.cli.scheduling import AdminKey
from weir.core.errors import WeirError

if TYPE_CHECKING:
    from weir.client.recent_requests import Order, RecentRequestsClient
    from weir.telemetry.request_record import RequestPhase, RequestRecord

MIN_WIDTH, MAX_WIDTH = 72, 120
_SHORTEST_WHOLE_MS = 1e-6
_CAUSE_CHARS = 30
_HEAD = f"{'phase':<14}{'start ms':>11}{'ms':>11}  "


def trace(
    request_id: Annotated[
        str, typer.Argument(help="A request's id, as in its answer, or what its client called it.")
    ] = "",
    last: Annotated[bool, typer.Option("--last", help="The newest request.")] = False,
    slowest: Annotated[bool, typer.Option("--slowest", help="The slowest of those that are remembered.")] = False,
    gateway: Annotated[
        list[str] | None,
        typer.Option(help="http://HOST:PORT of a gateway that `weir up` did not start here; several times."),
    ] = None,
    admin_key: AdminKey = "",
    ca: options.Ca = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Show where one of the last requests spent its time, and what it waited for.

    \b
    weir trace --last
    weir trace --slowest --json
    """
    if sum((bool(request_id), last, slowest)) != 1:
        fail("name one request: its id, --last or --slowest", code=EXIT_USAGE)
    urls, key = options.find_gateways(gateway or [], admin_key, instance, grpc_port, runtime_dir)
    from weir.client.recent_requests import RecentRequestsClient

    with options.usable_ca():
        client = RecentRequestsClient(urls, admin_key=key, ca=ca)
    with client:
        record = _ask(client, request_id, "newest" if last else "slowest")
    if as_json:
        stdout.out(json.dumps(asdict(record), indent=1), highlight=False)
        return
    for line in waterfall(record, min(max(stdout.width, MIN_WIDTH), MAX_WIDTH)):
        stdout.print(line, markup=False, soft_wrap=True)


def waterfall(record: "RequestRecord", width: int) -> Iterator[str]:
    """No line is longer than `width`, which is at least MIN_WIDTH."""
    summary = record.summary
    yield from (_clipped(line, width) for line in _head(record))
    bar_width = width - len(_HEAD) - _CAUSE_CHARS - 2
    yield f"{_HEAD}{'':<{bar_width}}  spent on"
    for phase in record.phases:
        bar = _bar(phase.start_ms, phase.duration_ms, summary.duration_ms, bar_width)
        name = phase.name if phase.dispatch == 1 else f"{phase.name} #{phase.dispatch}"
        yield _clipped(f"{_times(name, phase.start_ms, phase.duration_ms)}{bar}  {phase.cause}", width)
        yield from (_clipped(line, width) for line in _details(phase))
    longest = f"longest: {summary.longest_phase}, {summary.longest_phase_ms:.1f} ms of {summary.duration_ms:.1f} ms"
    yield _clipped(f"{longest}: {summary.cause}", width)
    for event in record.events:
        what = f"{event.name} after {event.num_output_tokens} tokens"
        yield _clipped(f"{event.at_ms:.1f} ms: {what}{event.detail and ': '}{event.detail}", width)


def _head(record: "RequestRecord") -> Iterator[str]:
    summary = record.summary
    named = f" ({summary.client_id})" if summary.client_id else ""
    yield f"request {summary.request_id}{named}, {_outcome(record)}"
    digest = f" {summary.model_digest[:16]}" if summary.model_digest else ""
    yield f"{summary.operation} by {summary.model}{digest}, lane {summary.lane}, tenant {summary.tenant}"
    first_ms = summary.time_to_first_token_ms
    first = "" if first_ms is None else f", first token after {first_ms:.1f} ms"
    cached = f" ({summary.num_cached_tokens} cached)" if summary.num_cached_tokens else ""
    tokens = f"{summary.num_prompt_tokens} prompt tokens{cached}, {summary.num_output_tokens} of the answer"
    yield f"{summary.duration_ms:.1f} ms{first}; {tokens}"
    if summary.trace_id:
        yield f"trace {summary.trace_id}"


def _outcome(record: "RequestRecord") -> str:
    summary = record.summary
    if summary.error_type:
        return f"{summary.life}: {summary.error_type}: {record.error}"
    return f"{summary.life} ({summary.finish_reason})" if summary.finish_reason else summary.life


def _details(phase: "RequestPhase") -> Iterator[str]:
    if phase.worker_id:
        yield f"  at {phase.worker_id}"
    for share in phase.shares:
        yield _times(f"  {share.name}", None, share.duration_ms)


def _times(name: str, start_ms: float | None, duration_ms: float) -> str:
    start = "" if start_ms is None else f"{start_ms:.1f}"
    return f"{name:<14}{start:>11}{duration_ms:>11.1f}  "


def _bar(start_ms: float, duration_ms: float, total_ms: float, width: int) -> str:
    """Of the phase in the whole; the shortest still has a cell of its own."""
    whole_ms = max(total_ms, start_ms + duration_ms, _SHORTEST_WHOLE_MS)
    first = min(int(start_ms / whole_ms * width), width - 1)
    last = min(max(first + 1, int((start_ms + duration_ms) / whole_ms * width + 1e-6)), width)
    return f"{'█' * (last - first):>{last}}".ljust(width)


def _clipped(line: str, width: int) -> str:
    """What clients name a request may be anything: a terminal is sent no control characters of theirs."""
    shown = "".join(char if char.isprintable() else "?" for char in line)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def _ask(client: "RecentRequestsClient", request_id: str, order: "Order") -> "RequestRecord":
    try:
        return client.find(request_id) if request_id else client.first(order)
    except WeirError as error:
        fail(error_line(error))
