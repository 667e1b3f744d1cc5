"""Two schedulers: when the leader dies the other one leads, and nothing that was accepted is lost."""

import asyncio
from pathlib import Path

import grpc
import pytest

from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import ProcessView, Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

NUM_QUEUED = 40
"""More than run at a time, so that some wait in the scheduler's queue when it dies."""


def leaders(stack: Stack) -> list[ProcessView]:
    return [process for process in stack.processes("scheduler") if is_leader(stack, process)]


def is_leader(stack: Stack, process: ProcessView) -> bool:
    try:
        return stack.metrics(process)["is_leader"] == 1
    except grpc.RpcError:
        return False


async def test_a_standby_takes_over_what_waits_and_what_runs(tmp_path: Path) -> None:
    with Stack(tmp_path, flags=("--schedulers", "2")) as stack:
        (leader,) = leaders(stack)
        channel, stub = open_stub(stack.grpc_address)
        async with channel:
            request = greedy_request([7] * 30, max_tokens=30, ignore_eos=True)
            running = [asyncio.create_task(stream(stub, request)) for _ in range(NUM_QUEUED)]
            await asyncio.sleep(1.0)
            stack.kill(leader)
            late = await stream(stub, request)
            records = [*await asyncio.gather(*running), late]
        assert {(record.code, len(record.token_ids), record.num_index_errors) for record in records} == {
            (grpc.StatusCode.OK, 30, 0)
        }
        (follower,) = leaders(stack)
        assert follower.name != leader.name
        wait_until(lambda: stack.has_restarted(leader), timeout_s=30, what="the killed one stands by")
        assert [process.name for process in leaders(stack)] == [follower.name]
        assert stack.integrity_errors() == []
