"""Structured logs on stderr: one line a record, as text for people or as JSON for machines."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from opentelemetry import trace

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
# These say at INFO what Weir's own lines say already.
_CHATTY_LOGGERS = ("nats", "grpc", "uvicorn", "asyncio", "httpx")

_ESCAPES = {
    code: chr(code).encode("unicode_escape").decode() for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}
"""Of control characters, and of what else ends a line."""


class _Formatter(logging.Formatter):
    """Knows the process; subclasses decide how a line looks. `extra=` fields of a record are kept."""

    def __init__(self, role: str, process_id: str) -> None:
        super().__init__()
        self._process = {"role": role, "process_id": process_id}

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), **self._process}
        fields |= {"logger": record.name, "message": record.getMessage()}
        span_context = trace.get_current_span().get_span_context()
        if span_context.is_valid:
            fields["trace_id"] = trace.format_trace_id(span_context.trace_id)
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return fields


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields_of(record), default=str, ensure_ascii=False)


class TextFormatter(_Formatter):
    """`time LEVEL process logger: message key=value`, a traceback on the lines after it, indented.

    Control characters are escaped, so that no text from outside can look like a line of its own or steer a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields_of(record)
        moment, level, _role, process_id = (fields.pop(name) for name in ("time", "level", "role", "process_id"))
        name, message, exception = fields.pop("logger"), fields.pop("message"), fields.pop("exception", None)
        extras = "".join(f" {key}={value}" for key, value in fields.items())
        line = f"{moment} {level.upper():<7} {process_id} {name}: {message}{extras}".translate(_ESCAPES)
        if not exception:
            return line
        return "\n".join([line, *(f"  {part.translate(_ESCAPES)}" for part in exception.split("\n"))])


def setup_logging(
    role: str, process_id: str, *, level: str = "info", log_format: str = "text", stream: TextIO | None = None
) -> None:
    """Replaces the root logger's handlers by one that writes to `stream` (default: stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter((JsonFormatter if log_format == "json" else TextFormatter)(role, process_id))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
