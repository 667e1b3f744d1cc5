"""Bodies of a tenant that has its share, or waits for its turn."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.unit.gateway.test_access import CLOSED, KEY_A
from tests.unit.gateway.test_tenants_at_the_frontends import BODY
from tests.unit.gateway.world import FAST, World, open_world
from tests.unit.rpc.test_body_budget import A, B

from weir.rpc.port_guard import PortLimits

GATEWAY: Any = {"rules": CLOSED, "port_limits": PortLimits(max_message_bytes=1 << 20, max_calls=96)}
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY_A}\r\n"


@asynccontextmanager
async def sent(world: World, raw: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
    writer.write(raw)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_a_body_that_is_there_whole_is_read_though_the_share_is_full_now() -> None:
    body = json.dumps(BODY).encode()
    chunked = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n"
    async with open_world(**GATEWAY, max_bodies_bytes=10 << 20) as world, sent(world, chunked) as (reader, writer):
        await world.until(lambda: world.bodies.num_bytes == len(body), "all of it is there, but its end")
        held = [(7 << 20, A), (1 << 20, B)]
        for num_bytes, caller in held:
            await world.bodies.take(num_bytes, caller)
        left = (10 << 20) - world.bodies.num_bytes
        held.append((left, B._replace(has_peers=False)))
        await world.bodies.take(*held[-1])
        writer.write(b"0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"200"
        for num_bytes, caller in held:
            world.bodies.give_back(num_bytes, caller)


@asynccontextmanager
async def busy(world: World) -> AsyncIterator[None]:
    """The thread that a may have is at something else meanwhile."""
    may_end, threads = threading.Event(), world.gateway.processor.threads
    running = asyncio.create_task(threads.run(A, lambda: may_end.wait(20), is_short=False))
    try:
        yield
    finally:
        may_end.set()
        await running


def large(num_bytes: int) -> bytes:
    body = json.dumps(BODY).encode().ljust(num_bytes)
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def test_a_body_that_waits_is_kept_once() -> None:
    raw = large(6 << 20)
    async with open_world(**GATEWAY) as world, busy(world):
        tracemalloc.start()
        try:
            async with sent(world, raw):
                await world.until(lambda: world.gateway.processor.threads.num_waiting == 1, "it waits")
                assert tracemalloc.get_traced_memory()[0] < 1.5 * len(raw)
        finally:
            tracemalloc.stop()


async def test_a_client_that_has_left_keeps_no_turn_and_no_room() -> None:
    async with open_world(**GATEWAY) as world, busy(world):
        threads = world.gateway.processor.threads
        async with sent(world, large(1 << 20)):
            await world.until(lambda: threads.num_waiting == 1, "it waits")
            assert world.bodies.num_bytes == 1 << 20
        await world.until(lambda: (threads.num_waiting, world.bodies.num_bytes) == (0, 0), "it is gone")


async def test_a_body_waits_for_its_turn_for_so_long() -> None:
    settings = replace(FAST, limits=replace(FAST.limits, prepare_wait_s=0.5))
    async with open_world(settings, **GATEWAY) as world, busy(world), sent(world, large(1 << 20)) as (reader, _):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 429")
        assert b"\nretry-after: 1\r" in head.lower()
        assert (world.gateway.processor.threads.num_waiting, world.bodies.num_bytes) == (0, 0)
