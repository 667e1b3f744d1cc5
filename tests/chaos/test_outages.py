"""What the scheduler had accepted waits for it: queued requests, and one that has lost its worker, outlive an outage of
the only scheduler, or of NATS, that is longer than a new request would wait."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack

import grpc
import pytest
from tests.chaos.held.scene import Scene
from tests.chaos.held.stack import HeldStack, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(180)]

OUTAGE_S = float(os.environ.get("WEIR_TEST_OUTAGE_S", "10"))
NUM_QUEUED = 6


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldStack]:
    with HeldStack(tmp_path_factory.mktemp("held")) as stack:
        yield stack


@pytest.mark.parametrize("away", ["scheduler", "nats"])
async def test_what_waits_outlives_the_outage(stack: HeldStack, away: str) -> None:
    async with AsyncExitStack() as channels:
        scene = Scene(stack, "worker gone", channels)
        order = stack.close_gate("decode", num_steps=3)
        clients = [await scene.ask(lane="narrow")]
        await scene.until_held("decode", order)
        clients += [await scene.ask(lane="narrow") for _ in range(NUM_QUEUED)]
        await scene.until_metric("scheduler", "queued", NUM_QUEUED)

        if away == "nats":
            stack.kill_nats()
        else:
            stack.kill("scheduler")
        stack.kill("decode")  # so that the first request needs another one
        await asyncio.to_thread(stack.wait_gone, "decode")
        stack.open_gates()
        stack.start("decode")
        await asyncio.sleep(OUTAGE_S)
        # What was decoded needs no scheduler to be adopted, only the registry.
        waiting = clients if away == "nats" else clients[1:]
        assert [client.running.done() for client in waiting] == [False] * len(waiting)

        if away == "nats":
            stack.start_nats()
        await asyncio.to_thread(stack.restart_missing)
        for client in clients:
            record = await asyncio.wait_for(client.running, 60)
            assert (record.code, record.num_terminal_events, record.num_index_errors) == (grpc.StatusCode.OK, 1, 0)
            assert record.token_ids == client.expected
    await asyncio.to_thread(wait_for, lambda: stack.leftovers() == {}, stack.describe_leftovers, 30.0)
