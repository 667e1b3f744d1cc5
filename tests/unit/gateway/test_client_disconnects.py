"""Clients that disconnect, cancel, or run out of time, in every phase: nothing stays behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry.context import Context
from tests.chaos.relay import Relay
from tests.unit.gateway.fake_scheduler import CALLER
from tests.unit.gateway.fake_workers import update
from tests.unit.gateway.world import FAST, World, open_world

from weir.core.errors import DeadlineExceeded
from weir.core.options import GenerateOptions
from weir.testing.load import greedy_request, stream
from weir.wire.v1 import inference_pb2_grpc
from weir_gateway.frontends.event_stream import EventStream, StreamSettings
from weir_gateway.requests.client_request import GRPC_NAMES, ClientRequest, Operation, Text

PATIENT = replace(
    FAST,
    port=replace(FAST.port, outage_s=60.0),
    driver=replace(FAST.driver, no_progress_s=60.0),
    connections=replace(FAST.connections, lost_after_s=60.0),
)
"""Nothing but its deadline ends a request."""
CANCELLED, EXPIRED = grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED
PHASES = ("submitting", "queued", "connecting", "prefilling", "decoding")


def hold_in(world: World, phase: str) -> Callable[[], bool]:
    """Sets the world up so that the next request stays in `phase`; returns whether it is there."""
    scheduler, pair = world.scheduler, world.pair
    match phase:
        case "submitting":
            scheduler.is_silent = True
            return lambda: len(scheduler.submits) > 0
        case "queued":
            scheduler.grants_at_once = False
            return lambda: any(held.requests for held in scheduler.helds)
        case "connecting":
            world.decode.refuses_streams = True
            return lambda: world.prefill.num_streams > 0
        case "prefilling":
            pair.stops_after = 0
            return lambda: len(pair.starts) > 0
        case "decoding":
            pair.stops_after = 4
            return lambda: len(pair.starts) > 0
    raise ValueError(phase)


async def assert_end_reached_all(world: World, phase: str) -> None:
    """The scheduler and, if they can know of the request, both workers."""
    scheduler = world.scheduler
    scheduler.is_silent = False
    await world.until_idle()
    if phase in ("submitting", "queued"):
        assert {cancel.request_id for cancel in scheduler.cancels} == {scheduler.submits[0].request_id}
        assert scheduler.finishes == []
    else:
        assert [finish.request_id for finish in scheduler.finishes] == [scheduler.submits[0].request_id]
    if phase in ("prefilling", "decoding"):
        for worker in (world.prefill, world.decode):
            await world.until(lambda w=worker: w.named("cancel"), f"{worker.worker_id} got the cancel")  # type: ignore[misc]
            assert [cancel.request_id for cancel in worker.named("cancel")] == [scheduler.submits[0].request_id]
    await asyncio.sleep(0.1)
    assert all(held.requests == () for held in scheduler.helds[-1:])


@pytest.mark.parametrize("phase", PHASES)
async def test_a_grpc_client_that_leaves_frees_everything(world: World, phase: str) -> None:
    is_there = hold_in(world, phase)
    running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9)))
    await world.until(is_there, f"the request is {phase}")
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await assert_end_reached_all(world, phase)
    assert world.metric("cancelled_total") == 1


async def check_deadline(phase: str, ask: Callable[[World, float], Coroutine[Any, Any, None]]) -> None:
    """`ask` returns when the deadline of its request has passed. The longer deadlines are for a machine on which the
    shortest passes before the request is in its phase."""
    for deadline_s in (0.3, 3.0, 30.0):
        async with open_world(PATIENT) as world:
            is_there = hold_in(world, phase)
            running = asyncio.create_task(ask(world, deadline_s))
            await world.until(lambda: is_there() or running.done(), f"the request is {phase}", timeout_s=60)  # noqa: B023
            was_there = is_there()
            await running
            if was_there:
                await assert_end_reached_all(world, phase)
                assert world.metric("cancelled_total") == 1
                return
    raise AssertionError(f"not {phase} within {deadline_s} s")


@pytest.mark.parametrize("phase", PHASES)
async def test_a_deadline_ends_the_request_and_frees_everything(phase: str) -> None:
    async def ask(world: World, deadline_s: float) -> None:
        record = await stream(world.stub, greedy_request("x", max_tokens=9), timeout_s=deadline_s)
        assert record.code is EXPIRED

    await check_deadline(phase, ask)


@pytest.mark.parametrize("is_stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("phase", PHASES)
async def test_an_http_client_that_leaves_frees_everything(world: World, phase: str, is_stream: bool) -> None:
    is_there = hold_in(world, phase)
    body = {"prompt": "x", "max_tokens": 9, "stream": is_stream}

    async def ask() -> None:
        async with world.http_client() as client:
            await client.post("/v1/completions", json=body)

    running = asyncio.create_task(ask())
    await world.until(is_there, f"the request is {phase}")
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await assert_end_reached_all(world, phase)
    assert world.metric("cancelled_total") == 1


@pytest.mark.parametrize("phase", PHASES)
async def test_a_deadline_holds_without_a_frontend_that_enforces_it(phase: str) -> None:
    client_request = ClientRequest(Operation.TEXT_COMPLETION, Text("x"), GRPC_NAMES, GenerateOptions(max_tokens=9))

    async def ask(world: World, deadline_s: float) -> None:
        with await world.gateway.processor.open(client_request, CALLER, Context(), deadline_s) as opened:
            ending = await asyncio.wait_for(opened.ended, deadline_s + 20)
        assert isinstance(ending.error, DeadlineExceeded)

    await check_deadline(phase, ask)


async def test_the_moment_in_which_a_request_ends_is_no_breach_of_integrity(world: World) -> None:
    world.pair.stops_after = 4
    running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9, request_id="mine")))
    await world.until(lambda: world.pair.starts, "started")
    assert world.gateway.processor.cancel(CALLER, "mine")
    while not running.done():
        assert world.gateway.describe().integrity_errors == ()
        await asyncio.sleep(0)
    await running


async def test_a_client_that_cancels_at_once_leaves_nothing(world: World) -> None:
    for _ in range(20):
        running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9)))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await world.until_idle()


async def test_a_deadline_is_passed_on_to_the_scheduler_and_shrinks_while_the_request_waits(world: World) -> None:
    world.scheduler.grants_at_once = False
    running = asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=9), timeout_s=60))

    def deadlines() -> list[int]:
        return [held.requests[0].submit.deadline_ms for held in world.scheduler.helds if held.requests]

    await world.until(lambda: len(set(deadlines())) > 1, "it is listed again later")
    # gRPC sends a deadline in three digits, rounded up, and counts it from when it last looked at a clock.
    assert 0 < deadlines()[-1] < deadlines()[0] <= world.scheduler.submits[0].deadline_ms <= 60_100
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.until_idle()


@asynccontextmanager
async def blocked_write(send_timeout_s: float) -> AsyncIterator[tuple[World, Any]]:
    """A gateway whose client has stopped reading, so that it waits in a write; and the client's call."""
    # A fixed, small flow-control window, so that writes have to wait for the reader.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with (
        open_world(send_timeout_s=send_timeout_s, max_context=300_000) as world,
        grpc.aio.insecure_channel(world.grpc_address, options=options) as channel,
    ):
        world.pair.stops_after = 1
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(greedy_request("x", max_tokens=200_000))
        await anext(aiter(call))
        [request_id] = world.pair.starts
        for start in range(1, 200_000, 20_000):
            world.decode.send(update(request_id, start, [120] * min(20_000, 200_000 - start)))
            await asyncio.sleep(0.02)
        yield world, call


async def test_a_grpc_client_that_never_reads_is_given_up() -> None:
    async with blocked_write(send_timeout_s=0.3) as (world, call):
        await world.until(lambda: world.metric("requests_open") == 0, "given up")
        assert world.metric("cancelled_total") == 1
        await world.until(lambda: world.decode.named("cancel"), "the worker got the cancel")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            _ = [response async for response in call]
        assert ended.value.code() is CANCELLED
        assert "has not read" in (ended.value.details() or "")


async def test_a_grpc_client_that_leaves_without_reading_frees_everything() -> None:
    async with blocked_write(send_timeout_s=60) as (world, call):
        assert world.metric("requests_in_flight") == 1
        call.cancel()
        await world.until_idle()
        assert world.metric("cancelled_total") == 1


async def test_an_http_client_that_never_reads_is_given_up() -> None:
    num_left = 0

    def leave() -> None:
        nonlocal num_left
        num_left += 1

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body") == b"data: 2\n\n":
            await never()

    response = EventStream(events(), leave, StreamSettings(send_timeout_s=0.05), {})
    await asyncio.wait_for(response({"type": "http"}, never, send), 5)
    assert num_left > 0


async def test_a_grpc_client_whose_network_is_gone_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.rpc.server._CLIENT_KEEPALIVE_TIMEOUT_MS", 500)
    async with open_world(PATIENT) as world:
        is_there = hold_in(world, "decoding")
        host, _, port = world.grpc_address.rpartition(":")
        with Relay(host, int(port)) as relay:
            async with grpc.aio.insecure_channel(relay.address) as channel:  # which asks for no signs of life itself
                call = inference_pb2_grpc.InferenceStub(channel).Generate(greedy_request("x", max_tokens=64))
                await world.until(is_there, "it is being decoded")
                relay.cut()
                await world.until_idle()
                assert world.metric("cancelled_total") == 1
                call.cancel()
