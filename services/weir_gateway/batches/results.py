"""Lines of a batch's output and error files, as OpenAI has them. Pure."""

import json
from typing import Any

from weir_gateway.batches.lines import BadLine
from weir_gateway.batches.records import ClaimedLine, LineResult


def answered(line: ClaimedLine, status: int, request_id: str, body: bytes) -> LineResult:
    """`body`: the JSON that the same request over HTTP is answered with. It is not read."""
    head = _dump({"id": _id_of(line.batch_id, line.number), "custom_id": line.custom_id})[:-1]
    response = f'{{"status_code": {status}, "request_id": {_dump(request_id)}, "body": {body.decode()}}}'
    return LineResult(status != 200, f'{head}, "response": {response}, "error": null}}')


def given_up(line: ClaimedLine, code: str, message: str) -> LineResult:
    return ended_line_result(line.batch_id, line.number, line.custom_id, code, message)


def ended_line_result(batch_id: str, number: int, custom_id: str, code: str, message: str) -> LineResult:
    """Of a line that has no answer, and will have none."""
    return _error(batch_id, number, custom_id, {"code": code, "message": message})


def bad_line_result(batch_id: str, line: BadLine) -> LineResult:
    """Names the line by its number, which may be all that it has."""
    error = {"code": line.code, "message": line.message, "line": line.number, "param": line.param}
    return _error(batch_id, line.number, line.custom_id or None, error)


def _error(batch_id: str, number: int, custom_id: str | None, error: dict[str, Any]) -> LineResult:
    entry = {"id": _id_of(batch_id, number), "custom_id": custom_id, "response": None, "error": error}
    return LineResult(is_error=True, content=_dump(entry))


def _id_of(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
