"""Long bodies come in small pieces, and those of one tenant one after the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tests.unit.gateway.test_access import KEY_A
from tests.unit.gateway.test_tenants_at_the_frontends import BODY, bearer
from tests.unit.gateway.test_tenants_that_attack import GATEWAY, check_served, half_sent_bodies
from tests.unit.gateway.world import open_world
from tests.unit.rpc.test_body_budget import A, B

from weir.core.clock import SystemClock
from weir_gateway.frontends.http_body import MAX_INLINE_BYTES, PieceTurns
from weir_gateway.frontends.http_server import HttpServer, HttpSettings
from weir_gateway.tenant_threads import TenantThreads
from weir_gateway.work_shares import WorkShares

MOST_BYTES = 48 << 10
"""Of one body in one pass: a read, and what was too little to stop before it."""


@asynccontextmanager
async def open_turns(work_s: float) -> AsyncIterator[PieceTurns]:
    """A has had so much, and B has asked for something."""
    threads = TenantThreads(2, "pieces", WorkShares(0.25, 0.1, SystemClock()))
    threads.note(B)
    threads.charge(A, work_s)
    try:
        yield PieceTurns(threads)
    finally:
        threads.close()


async def test_a_body_is_read_in_small_pieces_and_no_further_than_it_is_wanted() -> None:
    pieces: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False
        while not is_whole:
            await asyncio.sleep(0.02)  # in which all of it is there
            message = await receive()
            pieces.append(len(message["body"]))
            is_whole = not message["more_body"]
        await PlainTextResponse("read")(scope, receive, send)

    server = HttpServer(app, HttpSettings(), pytest.fail)
    await server.start()
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"http://127.0.0.1:{server.port}/", content=b"x" * (1 << 20))
    await server.stop()
    assert answer.text == "read"
    assert sum(pieces) == 1 << 20
    assert max(pieces) <= MOST_BYTES


@pytest.mark.parametrize("work_s", [0.0, 0.15], ids=["within the share", "when there is some again"])
async def test_in_each_pass_of_the_event_loop_one_of_a_tenant_goes_on(work_s: float) -> None:
    async with open_turns(work_s) as turns:
        waiting = [asyncio.create_task(turns.wait(A)) for _ in range(8)]
        num_done, most = 0, 0
        while num_done < len(waiting):
            await asyncio.sleep(0)
            now_done = sum(task.done() for task in waiting)
            most, num_done = max(most, now_done - num_done), now_done
        assert most == 1


async def test_nobody_waits_for_a_piece_of_another_tenant_or_without_peers() -> None:
    async with open_turns(100.0) as turns:
        waiting = asyncio.create_task(turns.wait(A))
        for caller in (B, A._replace(has_peers=False)):
            async with asyncio.timeout(5):
                await turns.wait(caller)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_long_bodies_that_waited_for_the_share_of_their_tenant_are_not_read_at_once() -> None:
    num, num_bytes = 24, 400_000
    async with open_world(**GATEWAY) as world, world.http_client(timeout=60) as http:
        await check_served(world, http)
        world.gateway.processor.threads.charge(A, 0.6)
        async with half_sent_bodies(world, num, num_bytes):
            await world.until(lambda: world.bodies.num_bytes > num * MAX_INLINE_BYTES, "all have begun")
            await asyncio.sleep(0.3)  # and none is let go on yet
            most = 0
            while (before := world.bodies.num_bytes) < num * num_bytes:
                await asyncio.sleep(0)
                most = max(most, world.bodies.num_bytes - before)
            assert most <= 3 * MOST_BYTES


async def test_a_body_that_never_ends_keeps_no_other_of_its_tenant_from_coming() -> None:
    long = {**BODY, "user": "u" * 1_000_000}
    async with (
        open_world(**GATEWAY) as world,
        world.http_client(timeout=60) as http,
        half_sent_bodies(world, 8, 200_000),
    ):
        await world.until(lambda: world.bodies.num_bytes == 8 * 200_000, "all that is sent of them is there")
        await check_served(world, http)
        assert (await http.post("/v1/completions", json=long, headers=bearer(KEY_A))).status_code == 200
