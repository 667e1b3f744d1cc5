"""What a log line holds."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from weir.runtime.logs import setup_logging


@pytest.fixture(autouse=True)
def restored_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def log_lines(log_format: str, level: str = "info") -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    setup_logging("decode", "decode-0-abc", level=level, log_format=log_format, stream=stream)
    return stream, logging.getLogger("weir.test")


def test_a_json_line_holds_process_extras_trace_and_exception() -> None:
    stream, logger = log_lines("json")
    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("s") as span:
        try:
            raise ValueError("seven")
        except ValueError:
            logger.exception("failed with %d", 7, extra={"request_id": "r1"})
    line = json.loads(stream.getvalue())
    assert line["message"] == "failed with 7"
    assert (line["level"], line["role"], line["process_id"]) == ("error", "decode", "decode-0-abc")
    assert line["request_id"] == "r1"
    assert line["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert "ValueError: seven" in line["exception"]


def test_a_text_line_holds_the_same() -> None:
    stream, logger = log_lines("text")
    logger.warning("slow", extra={"request_id": "r1"})
    assert stream.getvalue().endswith("WARNING decode-0-abc weir.test: slow request_id=r1\n")


def test_lines_below_the_level_and_chatter_of_libraries_are_left_out() -> None:
    stream, logger = log_lines("text", level="warning")
    logger.info("unheard")
    stream2, _ = log_lines("text")
    logging.getLogger("nats.aio.client").info("unheard")
    assert stream.getvalue() == stream2.getvalue() == ""


def test_no_text_from_outside_looks_like_a_line_of_its_own_or_steers_a_terminal() -> None:
    stream, logger = log_lines("text")
    evil = "x\n2026-01-01 INFO decode-0-abc forged\r\x1b[2J\x00\x7f\x85\x9b\u2028ü\tend"
    logger.warning("refused %s", evil, extra={"model": evil})
    try:
        raise ValueError(evil)
    except ValueError:
        logger.exception("failed")
    written = stream.getvalue()
    shown = "x\\n2026-01-01 INFO decode-0-abc forged\\r\\x1b[2J\\x00\\x7f\\x85\\x9b\\u2028ü\\tend"
    assert written.splitlines()[0].endswith(f"weir.test: refused {shown} model={shown}")
    assert not any(line.startswith("2026-01-01") for line in written.splitlines())
    assert all(character == "\n" or character.isprintable() for character in written)
    assert "  Traceback (most recent call last):" in written.splitlines()
    assert written.count("forged") == 3
