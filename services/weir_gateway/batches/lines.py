"""The input file of a batch, line by line, as OpenAI has it. Pure."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weir_gateway.json_sizes import try_find_size_problem

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

_MAX_CUSTOM_ID_CHARS = 512
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request. `number`: of its line in the file, from 1, empty ones counted. `body`: JSON."""

    number: int
    custom_id: str
    body: str


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request. `custom_id` is empty where it has none that can be told; `param`: the wrong field."""

    number: int
    custom_id: str
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class LineBounds:
    """More lines than `max_lines` are no batch; a longer line than `max_line_bytes` is a bad one."""

    max_lines: int = 50_000
    max_line_bytes: int = 1 << 20


class TooManyLines(Exception):
    """The file has more than the bound."""


def read_lines(parts: Iterable[bytes], endpoint: str, bounds: LineBounds) -> Iterator[BatchLine | BadLine]:
    """In order. The first line with a `custom_id` has it; later ones with the same are bad. Raises TooManyLines."""
    seen: set[str] = set()
    num_lines = 0
    for number, raw in enumerate(_split(parts, bounds.max_line_bytes), 1):
        if raw is not None and not raw.strip():
            continue
        num_lines += 1
        if num_lines > bounds.max_lines:
            raise TooManyLines
        if raw is None:
            limit = f"is longer than {bounds.max_line_bytes} bytes; make it shorter"
            yield BadLine(number, "", "line_too_long", f"line {number} {limit}")
            continue
        line = _read_line(number, raw, endpoint)
        if isinstance(line, BatchLine):
            if line.custom_id in seen:
                problem = f"custom_id {_cut(line.custom_id)!r} is that of an earlier line; give each line its own"
                line = _bad(number, line.custom_id, "duplicate_custom_id", problem, "custom_id")
            else:
                seen.add(line.custom_id)
        yield line


def _read_line(number: int, raw: bytes, endpoint: str) -> BatchLine | BadLine:
    too_many = try_find_size_problem(raw)
    if too_many is not None:
        return _bad(number, "", "invalid_json_line", too_many, None)
    try:
        entry = json.loads(raw)
        return _read_entry(number, entry, endpoint)
    except (ValueError, RecursionError) as error:
        return _bad(number, "", "invalid_json_line", f"not JSON: {_cut(str(error))}", None)


def _read_entry(number: int, entry: object, endpoint: str) -> BatchLine | BadLine:
    if not isinstance(entry, dict):
        return _bad(number, "", "invalid_json_line", "is no JSON object", None)
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_CUSTOM_ID_CHARS:
        problem = f"custom_id must be a text of 1 to {_MAX_CUSTOM_ID_CHARS} characters"
        return _bad(number, "", "missing_required_parameter", problem, "custom_id")
    if _is_torn(custom_id):
        return _bad(number, "", "invalid_custom_id", "custom_id has half a surrogate pair, or a NUL", "custom_id")
    return _read_request(number, custom_id, entry, endpoint)


def _read_request(number: int, custom_id: str, entry: dict[str, Any], endpoint: str) -> BatchLine | BadLine:
    if entry.get("method", "POST") != "POST":
        return _bad(number, custom_id, "invalid_method", "method must be POST", "method")
    if entry.get("url") != endpoint:
        problem = f"url must be {endpoint}, the endpoint of the batch, and is {_cut(repr(entry.get('url')))}"
        return _bad(number, custom_id, "invalid_url", problem, "url")
    body = entry.get("body")
    if not isinstance(body, dict):
        return _bad(number, custom_id, "missing_required_parameter", "body must be a JSON object", "body")
    if body.get("stream"):
        return _bad(
            number, custom_id, "invalid_request", "body.stream: a batch has whole answers; leave it out", "body"
        )
    return BatchLine(number, custom_id, json.dumps(body))


def _bad(number: int, custom_id: str, code: str, problem: str, param: str | None) -> BadLine:
    return BadLine(number, custom_id, code, f"line {number}: {problem}", param)


def _is_torn(text: str) -> bool:
    """No database takes it, and no UTF-8 file."""
    return "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)


def _split(parts: Iterable[bytes], max_bytes: int) -> Iterator[bytes | None]:
    """At \\n, wherever the parts end; None for a line that is too long, of which no more is held."""
    held, is_too_long = bytearray(), False
    for part in parts:
        first, *others = part.split(b"\n")
        pieces = [first, *others]
        for index, piece in enumerate(pieces):
            held += piece
            if len(held) > max_bytes:
                held.clear()
                is_too_long = True
            if index + 1 < len(pieces):
                yield None if is_too_long else bytes(held)
                held.clear()
                is_too_long = False
    if held or is_too_long:
        yield None if is_too_long else bytes(held)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"
