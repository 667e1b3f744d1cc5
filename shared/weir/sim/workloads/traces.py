"""Traces of requests as workloads: the public ones in their own formats, and Weir's own captures.

| format     | file | columns or keys |
|------------|------|-----------------|
| `azure`    | CSV  | TIMESTAMP, ContextTokens, GeneratedTokens (CC-BY 4.0; Splitwise, ISCA 2024) |
| `mooncake` | JSONL | timestamp (ms), input_length, output_length, hash_ids (Apache-2.0; Mooncake, FAST 2025) |
| `arena`    | CSV  | arrival_s, tenant, prompt_len, output_len (Apache-2.0; VTC, OSDI 2024) |
| `aibrix`   | JSONL | timestamp (ms), requests[] of "Prompt Length", "Output Length" (Apache-2.0) |
| `lengths`  | CSV  | num_prefill_tokens, num_decode_tokens: no times, all come at once (Sarathi-Serve's ShareGPT) |
| `capture`  | JSONL | arrival_s, num_prompt_tokens, num_output_tokens; also a request log |

A request that made no token counts as one of one token: its prompt was prefilled all the same.

A capture is Weir's own format: keys are named as the fields of `SimRequest`, those above are always there. Other keys
are passed over, for a log may say more. Arrivals may be on any clock; reading moves the first to 0.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np

from weir.sim.workloads.trace_file import Record, TraceError, csv_header, csv_records, is_csv, json_records
from weir.sim.workloads.workload import (
    Lengths,
    SimRequest,
    Workload,
    at_rate,
    burst,
    first,
    gamma,
    jittered_within_ticks,
    poisson,
    with_values,
)

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_S = 3.0
"""Its timestamps are rounded down to this; left alone, each tick would be a burst."""
_CSV_FORMATS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "arena": ("arrival_s", "tenant", "prompt_len", "output_len"),
    "lengths": ("num_prefill_tokens", "num_decode_tokens"),
}
_JSON_FORMATS = {
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "aibrix": ("timestamp", "requests"),
    "capture": ("arrival_s", "num_prompt_tokens", "num_output_tokens"),
}
_CAPTURE_NUMBERS = ("deadline_s", "ttft_target_s", "itl_target_s", "predicted_output_tokens")


def read_trace(path: Path, *, max_tokens: int = 0, seed: int = 0) -> Workload:
    """The whole file, by its columns, first arrival at 0. `seed` places requests inside Mooncake's ticks.

    `max_tokens`: what every request asks for at most where the trace does not say; 0: the trace's largest output.
    Raises TraceError.
    """
    trace_format = detect_format(path)
    requests = sorted(_READERS[trace_format](path), key=lambda request: request.arrival_s)
    if not requests:
        raise TraceError(path, 0, "", "has no requests")
    times = np.array([request.arrival_s for request in requests])
    if trace_format == "mooncake":
        times = jittered_within_ticks(times, MOONCAKE_TICK_S, np.random.default_rng(seed))
    asked = max_tokens or max(request.num_output_tokens for request in requests)
    fitted = tuple(
        dataclasses.replace(request, arrival_s=at_s, max_tokens=request.max_tokens or asked)
        for request, at_s in zip(requests, (times - times[0]).tolist(), strict=True)
    )
    for request in fitted:
        if request.num_output_tokens > request.max_tokens:
            problem = f"{request.max_tokens} is below the {request.num_output_tokens} output tokens"
            raise TraceError(path, 0, "max_tokens", f"{problem} of request {request.request_id}")
    return Workload(_stem(path), fitted, MOONCAKE_BLOCK_TOKENS)


def read_lengths(path: Path) -> list[Lengths]:
    """Only the lengths, in the order of arrival. Raises TraceError."""
    return [Lengths(r.num_prompt_tokens, r.num_output_tokens) for r in read_trace(path).requests]


Arrivals = Literal["trace", "poisson", "gamma", "burst"]


@dataclass(frozen=True, slots=True)
class Replay:
    """`num_requests` 0: all. `rate_a_s` 0: the trace's own. `cv` is of gamma arrivals alone."""

    num_requests: int = 0
    rate_a_s: float = 0.0
    arrivals: Arrivals = "trace"
    cv: float = 1.0
    max_tokens: int = 0
    """What each asks for at most; 0: what the trace says, else its largest output."""

    def __post_init__(self) -> None:
        if self.num_requests < 0 or self.max_tokens < 0:
            raise ValueError(f"num_requests {self.num_requests}, max_tokens {self.max_tokens}: must be at least 0")
        if not 0 <= self.rate_a_s < float("inf"):
            raise ValueError(f"rate_a_s {self.rate_a_s}: must be finite and at least 0")
        if self.arrivals not in ("trace", "poisson", "gamma", "burst"):
            raise ValueError(f"arrivals {self.arrivals!r}: must be trace, poisson, gamma or burst")
        if self.arrivals in ("poisson", "gamma") and self.rate_a_s == 0:
            raise ValueError(f"rate_a_s 0: {self.arrivals} arrivals need a rate")

    @property
    def is_random(self) -> bool:
        """Whether a seed makes a difference to every trace."""
        return self.arrivals in ("poisson", "gamma")


def load_workload(path: Path, replay: Replay, seed: int = 0) -> Workload:
    """Raises TraceError if the file cannot be read, ValueError if it has no times of its own and none were asked for.

    With arrivals of another kind the requests stay in the order of the trace.
    """
    if replay.arrivals == "trace" and detect_format(path) == "lengths":
        raise ValueError(f"arrivals 'trace': {path} has lengths alone; name poisson or gamma and a rate, or burst")
    workload = read_trace(path, max_tokens=replay.max_tokens, seed=seed)
    if replay.num_requests:
        workload = first(workload, replay.num_requests)
    if replay.arrivals == "trace":
        return at_rate(workload, replay.rate_a_s) if replay.rate_a_s else workload
    num, source = len(workload.requests), np.random.default_rng(seed)
    if replay.arrivals == "burst":
        times = burst(num)
    elif replay.arrivals == "poisson":
        times = poisson(replay.rate_a_s, num, source)
    else:
        times = gamma(replay.rate_a_s, replay.cv, num, source)
    return with_values(workload, arrival_s=times.tolist())


def detect_format(path: Path) -> str:
    """By the columns of its header, or the keys of its first line. Raises TraceError, naming what is known."""
    formats: Mapping[str, tuple[str, ...]]
    if is_csv(path):
        formats, line, found = _CSV_FORMATS, 1, csv_header(path)
    else:
        formats = _JSON_FORMATS
        first = next(json_records(path), None)
        line, found = (first.line, list(first.fields)) if first is not None else (0, [])
    for name, fields in formats.items():
        if set(fields) <= set(found):
            return name
    known = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in formats.items())
    raise TraceError(path, line, "", f"has {', '.join(found) or 'nothing'}; known are {known}")


def _azure(path: Path) -> Iterator[SimRequest]:
    began: datetime | None = None
    for record in csv_records(path):
        at = _timestamp(record, "TIMESTAMP")
        began = began or at
        yield _request(record, (at - began).total_seconds(), "ContextTokens", "GeneratedTokens")


def _timestamp(record: Record, field: str) -> datetime:
    text = record.text(field)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise record.error(field, f"{text!r} is not a time such as 2023-11-16 18:17:03.9799600") from None
    # Of 2023 without a zone, of 2024 with +00:00.
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _mooncake(path: Path) -> Iterator[SimRequest]:
    for record in json_records(path):
        at_s = record.number("timestamp", at_least=0) / 1e3
        request = _request(record, at_s, "input_length", "output_length")
        blocks = record.ids("hash_ids")
        if len(blocks) > -(-request.num_prompt_tokens // MOONCAKE_BLOCK_TOKENS):
            problem = f"{len(blocks)} blocks of {MOONCAKE_BLOCK_TOKENS} are more than input_length"
            raise record.error("hash_ids", f"{problem} {request.num_prompt_tokens}")
        yield dataclasses.replace(request, prefix_blocks=blocks)


def _arena(path: Path) -> Iterator[SimRequest]:
    for record in csv_records(path):
        request = _request(record, record.number("arrival_s", at_least=0), "prompt_len", "output_len")
        yield dataclasses.replace(request, tenant=f"tenant{record.text('tenant')}")


def _aibrix(path: Path) -> Iterator[SimRequest]:
    for record in json_records(path):
        at_s = record.number("timestamp", at_least=0) / 1e3
        for number, child in enumerate(record.children("requests")):
            request = _request(child, at_s, "Prompt Length", "Output Length")
            yield dataclasses.replace(request, request_id=f"{request.request_id}-{number}")


def _lengths(path: Path) -> Iterator[SimRequest]:
    for record in csv_records(path):
        yield _request(record, 0.0, "num_prefill_tokens", "num_decode_tokens")


def _capture(path: Path) -> Iterator[SimRequest]:
    return (_captured(record) for record in json_records(path))


def _captured(record: Record) -> SimRequest:
    """`max_tokens` is 0 where the record does not say."""
    known = {field for field, value in record.fields.items() if value is not None}
    return SimRequest(
        request_id=record.text("request_id") if "request_id" in known else f"line-{record.line}",
        arrival_s=record.number("arrival_s"),
        num_prompt_tokens=record.count("num_prompt_tokens"),
        num_output_tokens=max(1, record.count("num_output_tokens", at_least=0)),
        max_tokens=record.count("max_tokens", at_least=0) if "max_tokens" in known else 0,
        lane=record.text("lane") if "lane" in known else "",
        tenant=record.text("tenant") if "tenant" in known else "",
        prefix_blocks=record.ids("prefix_blocks") if "prefix_blocks" in known else (),
        output_score=record.number("output_score") if "output_score" in known else None,
        **{field: record.number(field, at_least=0) for field in _CAPTURE_NUMBERS if field in known},
    )


def _request(record: Record, arrival_s: float, prompt: str, output: str) -> SimRequest:
    num_output = max(1, record.count(output, at_least=0))
    return SimRequest(f"{_stem(record.path)}-{record.line}", arrival_s, record.count(prompt), num_output, 0)


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


_READERS: Mapping[str, Callable[[Path], Iterator[SimRequest]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "arena": _arena,
    "aibrix": _aibrix,
    "lengths": _lengths,
    "capture": _capture,
}
