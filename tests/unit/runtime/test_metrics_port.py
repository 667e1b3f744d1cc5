"""The page of one process on a port of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from weir.core.addresses import LOOPBACK
from weir.core.errors import Unavailable
from weir.runtime.metrics_port import MetricsPort, PortBounds
from weir.telemetry.catalog.histograms import HAND_OFF
from weir.telemetry.described import Described, HistogramFigure, families_of
from weir.telemetry.families import Family
from weir.telemetry.histogram import Histogram


def described() -> Described:
    histogram = Histogram((0.5,))
    histogram.observe(0.25, 3)
    figures = [HistogramFigure(HAND_OFF.name, histogram.value())]
    return Described("prefill", "prefill-0-aa", {"steps_total": 4.0, "num_running": 2.0}, figures)


def families() -> list[Family]:
    return families_of(described())


@pytest.fixture
async def port() -> AsyncIterator[int]:
    served = MetricsPort(LOOPBACK, 0, families)
    await served.start()
    yield served.port
    await served.stop()


async def asked(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: x", *headers, "", "")).encode()


async def test_it_says_what_the_process_says_of_itself(port: int) -> None:
    head, _, body = (await asked(port, get("/metrics?x=1"))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    found = {sample.name: sample for metric in parse_text(body.decode()) for sample in metric.samples}
    assert found["weir_worker_steps_total"].value == 4.0
    assert found["weir_worker_sequences_running"].labels == {"role": "prefill", "process": "prefill-0-aa"}
    assert found["weir_hand_off_seconds_count"].value == 3.0


async def test_it_speaks_openmetrics_with_those_who_do(port: int) -> None:
    answer = await asked(port, get("/metrics", "accept: application/openmetrics-text; version=1.0.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/openmetrics-text" in head
    assert len(list(parse_openmetrics(body.decode()))) == 3


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (get("/"), b"404 Not Found"),
        (get("/metrics/"), b"404 Not Found"),
        (get("/metrics").replace(b"GET", b"POST"), b"405 Method Not Allowed"),
        (b"no HTTP at all\r\n\r\n", b"400 Bad Request"),
        (get("/metrics", "x: " + "y" * 20_000), b"431 Request Header Fields Too Large"),
    ],
)
async def test_all_else_is_refused(port: int, data: bytes, status: bytes) -> None:
    assert (await asked(port, data)).startswith(b"HTTP/1.1 " + status)


async def test_probes_are_told_that_it_lives_and_whether_it_serves() -> None:
    answers = iter([False, True])
    served = MetricsPort(LOOPBACK, 0, None, is_ready=lambda: next(answers))
    await served.start()
    try:
        assert (await asked(served.port, get("/live"))).startswith(b"HTTP/1.1 200 OK")
        assert (await asked(served.port, get("/ready"))).startswith(b"HTTP/1.1 503 Service Unavailable")
        assert (await asked(served.port, get("/ready"))).startswith(b"HTTP/1.1 200 OK")
        assert (await asked(served.port, get("/metrics"))).startswith(b"HTTP/1.1 404 Not Found")
    finally:
        await served.stop()


async def test_a_port_in_use_is_named(port: int) -> None:
    with pytest.raises(Unavailable, match=rf"nothing can be served on {LOOPBACK}:{port} .*--metrics-port"):
        await MetricsPort(LOOPBACK, port, families).start()


NUM_LARGE_BYTES = 32 << 20
"""More than the sockets between two processes hold."""


def large() -> Described:
    return Described("gateway", "g", {f'tenant_finished_total{{tenant="{"x" * NUM_LARGE_BYTES}"}}': 1.0})


@asynccontextmanager
async def bounded(bounds: PortBounds) -> AsyncIterator[MetricsPort]:
    served = MetricsPort(LOOPBACK, 0, lambda: families_of(large()), bounds)
    await served.start()
    try:
        async with asyncio.timeout(30):
            yield served
    finally:
        await served.stop()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def stalled(port: int) -> AsyncIterator[asyncio.StreamReader]:
    """Of a client that has asked, and does not read what it is sent."""
    async with connected(port) as (reader, writer):
        writer.write(get("/metrics"))
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        yield reader


async def rest_of(reader: asyncio.StreamReader) -> int:
    """Bytes until the connection ends, however it does."""
    num_bytes = 0
    try:
        while data := await reader.read(1 << 20):
            num_bytes += len(data)
    except ConnectionResetError:
        pass
    return num_bytes


async def num_sent(port: int) -> int:
    async with connected(port) as (reader, writer):
        writer.write(get("/metrics"))
        return await rest_of(reader)


async def test_a_client_that_does_not_read_has_its_place_until_it_is_cut_off() -> None:
    async with bounded(PortBounds(max_connections=1, send_timeout_s=0.2)) as served, stalled(served.port) as reader:
        while not await num_sent(served.port):
            pass
        assert await rest_of(reader) < NUM_LARGE_BYTES


async def test_more_connections_than_there_may_be_are_closed_at_once() -> None:
    bounds = PortBounds(max_connections=2, send_timeout_s=60.0)
    async with bounded(bounds) as served, stalled(served.port) as one, stalled(served.port):
        assert await num_sent(served.port) == 0
        assert await rest_of(one) > NUM_LARGE_BYTES
        async with stalled(served.port):
            assert await num_sent(served.port) == 0


async def test_who_does_not_ask_in_time_is_cut_off() -> None:
    async with bounded(PortBounds(head_timeout_s=0.05)) as served, connected(served.port) as (reader, writer):
        writer.write(get("/metrics")[:-2])
        assert await rest_of(reader) == 0


async def test_the_end_cuts_off_who_is_being_answered() -> None:
    async with bounded(PortBounds(send_timeout_s=60.0)) as served, stalled(served.port) as reader:
        await served.stop()
        assert await rest_of(reader) < NUM_LARGE_BYTES
