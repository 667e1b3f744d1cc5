"""Several tenants at a port for clients: what one of them holds leaves room for the others."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.unit.rpc.test_port_guard import LIMITS, Port, open_port, until

from weir.core.errors import Overloaded, QuotaExceeded
from weir.rpc.server import MAX_METADATA_BYTES

A, B = (("x-api-key", "a"),), (("x-api-key", "b"),)
MANY = replace(LIMITS, max_calls=64, read_timeout_s=20.0)


@asynccontextmanager
async def stalled(port: Port, num: int, expected: int) -> AsyncIterator[list["asyncio.Task[bytes]"]]:
    """So many calls of a, which never send their message; `expected` of them are being read."""
    never = asyncio.Event()
    calls = [asyncio.create_task(port.call(b"x", sends=never, metadata=A)) for _ in range(num)]
    await until(lambda: port.bodies.num_bytes == expected * LIMITS.max_message_bytes)
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_messages_that_never_come_keep_no_other_tenant_waiting() -> None:
    async with open_port(MANY, max_bodies_bytes=1_000_000) as port, stalled(port, 64, 8) as calls:
        took_s = []
        for _ in range(20):
            began_s = asyncio.get_running_loop().time()
            assert await port.call(b"hello", metadata=B) == b"hello"
            took_s.append(asyncio.get_running_loop().time() - began_s)
        assert max(took_s) < MANY.read_timeout_s / 4, "a short wait for room, and no time-out of what a has sent"
        await until(lambda: sum(call.done() for call in calls) == 56)
        errors = [call.exception() for call in calls if call.done()]
        assert {type(error) for error in errors} == {QuotaExceeded}
        assert {error.tenant for error in errors if isinstance(error, QuotaExceeded)} == {"a"}
        what = {word for error in errors for word in ("places for requests", "bytes for bodies") if word in str(error)}
        assert len(what) == 2, "some have a share of calls, the others no room for what they would send"


async def test_open_calls_of_a_tenant_leave_a_part_of_them_for_others() -> None:
    async with open_port(replace(MANY, max_calls=10)) as port, asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(port.call(b"wait", metadata=A))
        await until(lambda: port.num_waiting == 8)
        with pytest.raises(
            QuotaExceeded, match=r"tenant a: it has 8 of the \d+ places for requests at this port, which is its share"
        ):
            await port.call(b"x", metadata=A)
        tasks.create_task(port.call(b"wait", metadata=B))
        await until(lambda: port.num_waiting == 9)
        assert await port.call(b"x", metadata=B) == b"x", "a second one is sure"
        port.go_on.set()


async def test_headers_of_a_call_are_bounded_and_the_refusal_says_so() -> None:
    async with open_port() as port:
        for _ in range(4):
            assert await port.call(b"x", metadata=(*A, ("note", "x" * (MAX_METADATA_BYTES - 800)))) == b"x"
        for note in ("x" * (MAX_METADATA_BYTES - 500), "x" * 1_000_000):
            for _ in range(4):  # never by chance
                with pytest.raises(Overloaded, match=rf"metadata size exceeds hard limit .* vs\. {MAX_METADATA_BYTES}"):
                    await port.call(b"x", metadata=(*A, ("note", note)))
        assert await port.call(b"x", metadata=A) == b"x"


async def test_headers_that_only_unpacked_are_large_are_refused_too() -> None:
    async with open_port() as port:
        host, _, number = port.address.rpartition(":")
        received = await asyncio.to_thread(_send_bomb, host, int(number))
        assert b"grpc-status" in received, "an answer, and not a connection that breaks"
        assert await port.call(b"x", metadata=A) == b"x"
    assert port.parsed == [1, 3]


def _send_bomb(host: str, port: int) -> bytes:
    """What is answered to one frame of headers: one of 4,000 bytes, and 12,000 references to it, which are 48 MB."""
    literals = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/test.Keyed/unary_unary"),
        (b"te", b"trailers"),
    )
    block = b"".join(bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in literals)
    block += bytes((0x40, 4)) + b"bomb" + b"\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 12_000
    frame = len(block).to_bytes(3, "big") + bytes((1, 4, 0, 0, 0, 1)) + block
    received = b""
    with socket.create_connection((host, port), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)) + frame)
        try:
            while b"grpc-status" not in received and (part := connection.recv(65536)):
                received += part
        except TimeoutError:
            pass
    return received
