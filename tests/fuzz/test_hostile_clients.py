"""Clients that send a byte at a time, headers without end, or a little that becomes much: each is refused or
bounded, and others are served meanwhile. Over real sockets, to a whole gateway."""

import asyncio
import contextlib
import gzip
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import httpx
import pytest

from tests.fuzz.target import ROOT, forget_peak, peak_bytes
from tests.unit.gateway.world import FAST, World, open_world
from weir.rpc.port_guard import PortLimits
from weir.testing.load import greedy_request, stream

TIMEOUT_S = 1.5
NUM_SLOW = 20
MESSAGE_BYTES = 4 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, CONTINUATION = 1, 4, 9
END_HEADERS = 4
MAX_GROWTH_BYTES = 160 << 20
"""A tenth of what the bombs below would make."""


@pytest.fixture
async def world() -> AsyncIterator[World]:
    http = replace(FAST.http, head_timeout_s=TIMEOUT_S, body_timeout_s=TIMEOUT_S)
    limits = PortLimits(max_message_bytes=MESSAGE_BYTES, max_calls=96, read_timeout_s=TIMEOUT_S)
    async with open_world(replace(FAST, http=http), port_limits=limits) as opened:
        yield opened


@contextlib.asynccontextmanager
async def others_are_served(world: World) -> AsyncIterator[None]:
    """Before, meanwhile over both ports, and afterwards."""
    ended = asyncio.Event()
    served = 0

    async def ask() -> None:
        nonlocal served
        async with httpx.AsyncClient(base_url=world.http_url, timeout=30) as client:
            while not ended.is_set() or not served:
                answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 64})
                assert answer.status_code == 200
                assert (await stream(world.stub, greedy_request("y", max_tokens=64))).text == "hello world"
                served += 1

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask())
        try:
            yield
        finally:
            ended.set()
    assert served


async def drip(port: int, data: bytes) -> bytes:
    """A byte at a time, until the other side closes; what it said before that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.ensure_future(reader.read())
    with contextlib.suppress(ConnectionError):
        for byte in data * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.wait([reading], timeout=0.02)
            if reading.done():
                break
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        return await reading
    return b""


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def grpc_port(world: World) -> int:
    return int(world.grpc_address.rpartition(":")[2])


BODY_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "answer"), [(b"GET /health HTTP/1.1\r\nX: y", b""), (b'{"prompt": "x"', b"HTTP/1.1 408")]
)
async def test_heads_and_bodies_that_come_a_byte_at_a_time_are_ended(world: World, data: bytes, answer: bytes) -> None:
    async def slow() -> bytes:
        if not answer:
            return await drip(world.gateway.http_port, data)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
        writer.write(BODY_HEAD)
        reading = asyncio.ensure_future(reader.read(200))
        while not reading.done():
            writer.write(data[:1])
            await asyncio.wait([reading], timeout=0.02)
        writer.transport.abort()
        return await reading

    async with others_are_served(world), asyncio.timeout(60):
        said = await asyncio.gather(*(slow() for _ in range(NUM_SLOW)))
    assert {one[: len(answer)] for one in said} == {answer}


@pytest.mark.parametrize("begun", [b"", PREFACE + frame(SETTINGS, 0, 0, b"")[:5]], ids=["preface", "settings"])
async def test_http2_that_comes_a_byte_at_a_time_is_ended(world: World, begun: bytes) -> None:
    async def slow() -> bytes:
        return await drip(grpc_port(world), begun or PREFACE)

    async with others_are_served(world), asyncio.timeout(60):
        await asyncio.gather(*(slow() for _ in range(NUM_SLOW)))


async def grown(act: Callable[[], Awaitable[object]]) -> int:
    """How much more memory than before this process had at a time."""
    forget_peak()
    before = peak_bytes()
    await act()
    return peak_bytes() - before


def header_block(name: bytes, value: bytes, num_repeats: int) -> bytes:
    """HPACK: one literal that goes into the dynamic table, then its index over and over (RFC 7541, 6.2.1 and 6.1)."""
    length = bytes([0x7F]) + _hpack_rest(len(value) - 127)
    return b"\x40" + bytes([len(name)]) + name + length + value + b"\xbe" * num_repeats


def _hpack_rest(number: int) -> bytes:
    parts = []
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


BOMBS = {
    "an index of 4 kB 400,000 times": header_block(b"x", b"a" * 3900, 400_000),
    "a thousand fields of a name": b"".join(b"\x00\x01x\x0a" + b"a" * 10 for _ in range(100_000)),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
async def test_headers_that_unpack_to_gigabytes_are_refused(world: World, bomb: bytes) -> None:
    parts = [bomb[start : start + 16_000] for start in range(0, len(bomb), 16_000)]
    frames = frame(HEADERS, 0, 1, parts[0]) + b"".join(frame(CONTINUATION, 0, 1, part) for part in parts[1:])

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", grpc_port(world))
        with contextlib.suppress(ConnectionError):
            writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + frames + frame(CONTINUATION, END_HEADERS, 1, b""))
            await writer.drain()
            await asyncio.wait_for(reader.read(1 << 16), 20)
            writer.close()

    async with others_are_served(world), asyncio.timeout(60):
        assert await grown(lambda: asyncio.gather(*(send() for _ in range(8)))) < MAX_GROWTH_BYTES


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"X-Many: a\r\n" * 20_000, b"400"),
        (b"X-Long: " + b"a" * 200_000 + b"\r\n", b"400"),
        (b"Content-Length: 2\r\nContent-Length: 3\r\n", b"400"),
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"400"),
        (b"Content-Length: 99999999999999999999999\r\n", b"400"),
        (b"Content-Length: 9999999999\r\n", b"413"),
        (b"Transfer-Encoding: gzip\r\n", b"400"),
    ],
)
async def test_heads_that_are_too_much_or_say_two_things_are_refused(
    world: World, fields: bytes, status: bytes
) -> None:
    async with others_are_served(world), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + fields + b"\r\n{}")
        head = b""
        with contextlib.suppress(ConnectionError):  # what was sent behind it may reset it
            head = await reader.read(200)
        writer.transport.abort()
    assert not head or head.split(b" ")[1] == status


async def test_a_packed_body_is_no_json_and_is_not_unpacked(world: World) -> None:
    body = gzip.compress(b'{"prompt": "' + bytes(1 << 30 >> 2) + b'"}', 1)

    async def send() -> None:
        async with httpx.AsyncClient(base_url=world.http_url, timeout=30) as client:
            headers = {"content-encoding": "gzip", "content-type": "application/json"}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == 400

    async with others_are_served(world):
        assert await grown(send) < MAX_GROWTH_BYTES


PACKED_CLIENT = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1], compression=grpc.Compression.Gzip,
                                options=[("grpc.max_send_message_length", -1)])
try:
    list(channel.unary_stream("/weir.v1.Inference/Generate")(bytes(1 << 29), timeout=60))
except grpc.RpcError as error:
    print(error.code().name)
"""


async def test_a_packed_message_of_grpc_is_refused_before_it_is_large(world: World) -> None:
    async def send() -> None:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PACKED_CLIENT, world.grpc_address, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await client.communicate()
        assert said.split() in ([b"RESOURCE_EXHAUSTED"], [b"UNIMPLEMENTED"])

    async with others_are_served(world), asyncio.timeout(120):
        assert await grown(send) < MAX_GROWTH_BYTES
