"""Clients that go away, cancel, or run out of time, in every phase: nothing stays behind."""

import asyncio

import grpc
import httpx
import pytest
from tests.unit.gateway.phases import PHASES, assert_everybody_was_told, hold_in
from tests.unit.gateway.world import FAST, World, open_world

from weir.testing.load import greedy_request, stream

CANCELLED, EXPIRED = grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("phase", PHASES)
async def test_a_grpc_client_that_leaves_frees_everything(world: World, phase: str) -> None:
    is_there = hold_in(world, phase)
    running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9)))
    await world.until(is_there, f"the request is {phase}")
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await assert_everybody_was_told(world, phase)
    assert world.metric("cancelled_total") == 1


@pytest.mark.parametrize("phase", PHASES)
async def test_a_deadline_ends_the_request_and_frees_everything(world: World, phase: str) -> None:
    is_there = hold_in(world, phase)
    running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9), timeout_s=0.3))
    await world.until(is_there, f"the request is {phase}")
    record = await running
    assert record.code is EXPIRED
    await assert_everybody_was_told(world, phase)
    assert world.metric("cancelled_total") == 1


@pytest.mark.parametrize("is_stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("phase", PHASES)
async def test_an_http_client_that_leaves_frees_everything(world: World, phase: str, is_stream: bool) -> None:
    is_there = hold_in(world, phase)
    body = {"prompt": "x", "max_tokens": 9, "stream": is_stream}

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=world.http_url) as client:
            await client.post("/v1/completions", json=body)

    running = asyncio.create_task(ask())
    await world.until(is_there, f"the request is {phase}")
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await assert_everybody_was_told(world, phase)
    assert world.metric("cancelled_total") == 1


async def test_a_client_that_cancels_at_once_leaves_nothing(world: World) -> None:
    for _ in range(20):
        running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9)))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await world.until_idle()


async def test_a_deadline_is_passed_on_to_the_scheduler_and_shrinks_while_the_request_waits(world: World) -> None:
    world.scheduler.grants_at_once = False
    running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9), timeout_s=0.6))
    await running
    deadlines = [held.requests[0].submit.deadline_ms for held in world.scheduler.helds if held.requests]
    assert 0 < deadlines[-1] < deadlines[0] <= 600
    await world.until_idle()


async def test_a_client_that_never_reads_is_given_up() -> None:
    async with open_world(FAST, unread_s=0.3) as world:
        world.pair.answer = list(b"x" * 400)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.http_url.rsplit(":", 1)[1]))
        del reader
        body = b'{"prompt": "x", "max_tokens": 400, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock = writer.get_extra_info("socket")
        assert sock is not None
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head.encode() + body)
        await world.until(lambda: world.metric("finished_total") == 1, "the answer is complete")
        await world.until_idle()
        writer.close()
