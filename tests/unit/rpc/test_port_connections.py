"""Connections to a port for clients on which nothing comes: held up to a bound, and not for ever; and calls that come
while nobody can take them."""

import asyncio
import contextlib
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from weir.rpc.channel import CHANNEL_OPTIONS, KEEPALIVE_TIME_MS, make_channel
from weir.rpc.port_guard import PortLimits
from weir.rpc.server import _INTERNAL_OPTIONS, _SERVER_OPTIONS, _public_options, make_server

MAX_CONNECTIONS = 8
HANDSHAKE_S = 1.0


async def test_more_connections_than_the_bound_are_closed_and_those_that_say_nothing_too() -> None:
    limits = PortLimits(1 << 20, max_calls=4, read_timeout_s=HANDSHAKE_S, max_connections=MAX_CONNECTIONS)
    server = make_server(limits=limits)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MAX_CONNECTIONS)]
    try:
        async with asyncio.timeout(30):
            closed = asyncio.gather(*(_until_closed(reader) for reader, _ in opened))
            await closed
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        for _, writer in opened:
            writer.close()
        await server.stop(None)


async def test_a_call_on_which_nothing_comes_is_not_cut_off_for_its_clients_signs_of_life() -> None:
    async def answer_late(request: bytes, context: object) -> bytes:
        await asyncio.sleep(4.6 * KEEPALIVE_TIME_MS / 1000)  # gRPC by itself takes the fourth sign for abuse
        return request

    server = make_server(limits=PortLimits(1 << 20, max_calls=4))
    method: Any = grpc.unary_unary_rpc_method_handler(answer_late)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Late", {"answer": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/test.Late/answer")
            assert await call(b"x", timeout=60) == b"x"
    finally:
        await server.stop(None)


def test_grpc_knows_every_option_that_is_set() -> None:
    """It says nothing of others, and goes by its defaults."""
    options = [*CHANNEL_OPTIONS, *_SERVER_OPTIONS, *_INTERNAL_OPTIONS, *_public_options(PortLimits(1, max_calls=1))]
    spec = find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).read_bytes()
    assert [name for name, _ in options if name.encode() not in library] == []


async def test_a_connection_over_the_bound_is_closed_while_those_before_it_stay() -> None:
    limits = PortLimits(1 << 20, max_calls=4, read_timeout_s=60.0, max_connections=MAX_CONNECTIONS)
    server = make_server(limits=limits)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MAX_CONNECTIONS)]
    try:
        ends = [asyncio.create_task(_until_closed(reader)) for reader, _ in opened]
        async with asyncio.timeout(20):
            while sum(end.done() for end in ends) < MAX_CONNECTIONS:  # noqa: ASYNC110 - whichever they are
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert sum(end.done() for end in ends) == MAX_CONNECTIONS
        for end in ends:
            end.cancel()
    finally:
        for _, writer in opened:
            writer.close()
        await server.stop(None)


async def test_calls_that_come_while_the_server_is_busy_wait_for_it_and_none_is_cancelled() -> None:
    """gRPC by itself would cancel some of those that wait, of more than 1,000."""
    limits = PortLimits(1 << 20, max_calls=1600)
    assert await _codes_of(1600, limits, busy_s=1.0) == {grpc.StatusCode.OK: 1600}
    assert limits.max_pending_s > 60


async def test_calls_wait_for_a_busy_server_only_so_long() -> None:
    limits = PortLimits(1 << 20, max_calls=64, max_pending_s=1)
    assert (await _codes_of(64, limits, busy_s=2.5))[grpc.StatusCode.CANCELLED] > 0


async def _codes_of(num_calls: int, limits: PortLimits, busy_s: float) -> Counter[grpc.StatusCode]:
    """Of calls that come at once, to a server whose loop stands still then."""
    server = make_server(limits=limits)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            calls = [stub.Check.future(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(num_calls)]
            time.sleep(busy_s)  # noqa: ASYNC251 - stands still
            return await asyncio.to_thread(lambda: Counter(call.code() for call in calls))
        finally:
            await server.stop(None)


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 12):
            pass
