"""In whatever state a request is, and however it ends there: one terminal event, its tokens from 0 on without gap or
repeat, and nothing of it left anywhere."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import grpc
import pytest
from tests.chaos.held.scene import TARGET, Client, Ending, Scene
from tests.chaos.held.stack import HeldStack, wait_for

from weir.testing.load import StreamRecord, open_stub
from weir.wire.v1 import inference_pb2, types_pb2

pytestmark = pytest.mark.timeout(240)

TARGET_TOKENS = 300
"""Enough that a Cancel overtakes them once steps go on."""
MANY_TOKENS = 400
"""Two requests with so many have more pages than the arena."""
ENDED_S = 60.0
DEADLINE_MS = 6000
"""Of the request that is to end: by then it is where it is to be held."""
LATE_DEADLINE_MS = 15_000
"""Where it needs some hundred steps before."""
ARRIVED_S = 0.3
"""A Cancel is on its way: it is to find the worker as it is, before its steps go on."""


@pytest.fixture(scope="module")
def whole_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldStack]:
    with HeldStack(tmp_path_factory.mktemp("held")) as stack:
        yield stack


@pytest.fixture
def stack(whole_stack: HeldStack) -> Iterator[HeldStack]:
    """Whole before and after each test."""
    yield whole_stack
    whole_stack.open_gates()
    whole_stack.restart_missing()


# -- the states: each reaches one, and returns the request that is held in it --


async def queued(scene: Scene) -> Client:
    """Behind another one, in a lane that runs one at a time."""
    order = scene.stack.close_gate("decode", num_steps=3)
    scene.others.append(await scene.ask(lane="narrow"))
    await scene.until_held("decode", order)
    target = await scene.ask(lane="narrow", deadline_ms=DEADLINE_MS, max_tokens=TARGET_TOKENS)
    await scene.until_metric("scheduler", "queued", 1)
    return target


async def prefilling(scene: Scene) -> Client:
    """In the first step of its prompt."""
    order = scene.stack.close_gate("prefill")
    target = await scene.ask(deadline_ms=DEADLINE_MS, max_tokens=TARGET_TOKENS)
    await scene.until_held("prefill", order)
    return target


async def waiting_for_decode(scene: Scene) -> Client:
    """Handed to a worker that is amid a step and has not looked yet."""
    order = scene.stack.close_gate("decode", num_steps=3)
    scene.others.append(await scene.ask())
    await scene.until_held("decode", order)
    num_before = scene.stack.metrics("transfer")["handoffs_total"]
    target = await scene.ask(deadline_ms=DEADLINE_MS, max_tokens=TARGET_TOKENS)
    await scene.until_metric("transfer", "handoffs_total", num_before + 1)
    await scene.until_metric("decode", "num_live", 2)
    return target


async def decoding(scene: Scene) -> Client:
    order = scene.stack.close_gate("decode", num_steps=5)
    target = await scene.ask(deadline_ms=DEADLINE_MS, max_tokens=TARGET_TOKENS)
    await scene.until_held("decode", order)
    return target


async def swapped_out(scene: Scene) -> Client:
    """For a more urgent one: together they need more pages than there are."""
    scene.stack.close_gate("decode")  # until both are there
    target = await scene.ask(max_tokens=MANY_TOKENS, deadline_ms=LATE_DEADLINE_MS)
    scene.others.append(await scene.ask(max_tokens=MANY_TOKENS, lane="urgent"))
    await scene.until_metric("decode", "num_live", 2)
    order = scene.stack.close_gate("decode", swapped_seed=target.request.options.sampling.seed)
    await scene.until_held("decode", order)
    metrics = scene.stack.metrics("decode")
    assert metrics["num_running"] == 2
    assert metrics["pages_swapped_out_total"] > metrics["pages_swapped_in_total"]
    return target


async def being_adopted(scene: Scene) -> Client:
    """Its worker is gone, and a successor has it that is in its first step."""
    order = scene.stack.close_gate("decode", num_steps=5)
    target = await scene.ask(deadline_ms=LATE_DEADLINE_MS, max_tokens=TARGET_TOKENS)
    await scene.until_held("decode", order)
    scene.stack.kill("decode")
    await asyncio.to_thread(scene.stack.wait_gone, "decode")
    order = scene.stack.close_gate("decode")
    scene.stack.start("decode")
    await asyncio.to_thread(scene.stack.wait_ready)
    await scene.until_held("decode", order)
    return target


async def draining(scene: Scene) -> Client:
    """Decoding, at a worker that was asked to end."""
    target = await decoding(scene)
    scene.stack.kill("decode", signal.SIGTERM)
    await scene.until(lambda: not scene.stack.is_ready("decode"), "it drains")
    return target


# A state is a function here and, if it is not lost with the decode worker, a line in WORKERS.
STATES: dict[str, Callable[[Scene], Awaitable[Client]]] = {
    "queued": queued,
    "prefilling": prefilling,
    "waiting for decode": waiting_for_decode,
    "decoding": decoding,
    "swapped out": swapped_out,
    "being adopted": being_adopted,
    "draining": draining,
}
WORKERS = {"prefilling": "prefill"}
ENDINGS: tuple[Ending, ...] = (
    "cancel",
    "deadline",
    "deadline, partial",
    "client gone",
    "gateway gone",
    "worker gone",
)
CODES = {
    "cancel": grpc.StatusCode.CANCELLED,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "deadline, partial": grpc.StatusCode.OK,
    "worker gone": grpc.StatusCode.OK,
    "gateway gone": grpc.StatusCode.UNAVAILABLE,
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", STATES)
async def test_it_ends_once_and_leaves_nothing(stack: HeldStack, state: str, ending: Ending) -> None:
    async with AsyncExitStack() as channels:
        scene = Scene(stack, ending, channels)
        target = await STATES[state](scene)
        assert not target.running.done(), f"it ended before it could be ended: {target.running.result()}"
        num_finished = stack.num_finished()

        await end(scene, target, WORKERS.get(state, "decode"))
        await asyncio.sleep(ARRIVED_S)
        stack.open_gates()
        if state == "draining":
            await asyncio.to_thread(stack.wait_gone, "decode")
        await asyncio.to_thread(stack.restart_missing)

        if ending != "client gone":
            check(await asyncio.wait_for(target.running, ENDED_S), target, ending)
        for other in scene.others:
            check(await asyncio.wait_for(other.running, ENDED_S), other, spared(ending))
    await asyncio.to_thread(wait_for, lambda: stack.leftovers() == {}, stack.describe_leftovers, ENDED_S)
    if state != "draining" and ending != "worker gone":  # those counters are gone with their process
        num_others = 0 if ending == "gateway gone" else len(scene.others)
        assert stack.num_finished() - num_finished == num_others, "what nobody wants was computed to its end"


async def end(scene: Scene, target: Client, worker: str) -> None:
    """While the steps still stand still. Whoever is told at once has its answer when this returns."""
    match scene.ending:
        case "cancel":
            channel, stub = open_stub(scene.stack.grpc_address)
            async with channel:
                answer = await stub.Cancel(inference_pb2.CancelRequest(request_id=TARGET), timeout=10)
            assert answer.found
            await asyncio.wait({target.running}, timeout=ENDED_S)
        case "deadline" | "deadline, partial":
            await asyncio.wait({target.running}, timeout=ENDED_S)
        case "client gone":
            assert target.connection is not None
            target.connection.transport.abort()
            target.running.cancel()
            await scene.until_metric("gateway", "requests_in_flight", len(scene.others))
            return
        case "worker gone":
            scene.stack.kill(worker)
            await asyncio.to_thread(scene.stack.wait_gone, worker)
            return
        case "gateway gone":
            num_missed = scene.stack.num_gateways_missed()
            scene.stack.kill("gateway")
            await asyncio.to_thread(scene.stack.wait_gone, "gateway")
            await scene.until(lambda: scene.stack.num_gateways_missed() > num_missed, "the gateway is missed")
            await asyncio.wait({target.running}, timeout=ENDED_S)
    assert target.running.done(), "the client waits for a step that stands still"


def spared(ending: Ending) -> Ending:
    """How it ends for those that happen to be there: only with the gateway are they lost."""
    return "gateway gone" if ending == "gateway gone" else "worker gone"


def check(record: StreamRecord, client: Client, ending: Ending) -> None:
    assert (record.num_terminal_events, record.num_index_errors) == (1, 0), record
    assert record.code is CODES[ending], record
    assert record.token_ids == client.expected[: len(record.token_ids)]
    if ending == "deadline, partial":
        assert record.finish_reasons == [types_pb2.FINISH_REASON_DEADLINE]
    elif record.code is grpc.StatusCode.OK:
        assert record.finish_reasons == [types_pb2.FINISH_REASON_LENGTH]
        assert record.token_ids == client.expected
