"""Two schedulers: when the leader dies the other one leads, and nothing that was accepted is lost."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import ProcessView, Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(180)]

NUM_QUEUED = 40
"""More than run at a time, so that some wait in the scheduler's queue when it dies."""


def leader_of(stack: Stack, look_up: Callable[[], list[ProcessView]]) -> ProcessView:
    """Once one alone of these schedulers leads."""
    found: list[ProcessView] = []

    def is_one() -> bool:
        found[:] = [process for process in look_up() if is_leader(stack, process)]
        return len(found) == 1

    wait_until(is_one, timeout_s=60, what="one scheduler leads")
    return found[0]


def is_leader(stack: Stack, process: ProcessView) -> bool:
    try:
        return stack.metrics(process)["is_leader"] == 1
    except grpc.RpcError:
        return False


async def test_a_standby_takes_over_what_waits_and_what_runs(tmp_path: Path) -> None:
    with Stack(tmp_path, flags=("--schedulers", "2")) as stack:
        before = stack.processes("scheduler")
        channel, stub = open_stub(stack.grpc_address)
        async with channel:
            request = greedy_request([7] * 30, max_tokens=30, ignore_eos=True)
            running = [asyncio.create_task(stream(stub, request)) for _ in range(NUM_QUEUED)]
            await asyncio.sleep(1.0)
            # Not before: one that stood still for a moment leads no more.
            leader = await asyncio.to_thread(leader_of, stack, lambda: before)
            stack.kill(leader)
            late = await stream(stub, request)
            records = [*await asyncio.gather(*running), late]
        assert {(record.code, len(record.token_ids), record.num_index_errors) for record in records} == {
            (grpc.StatusCode.OK, 30, 0)
        }
        follower = leader_of(stack, lambda: stack.processes("scheduler"))
        wait_until(lambda: stack.has_restarted(leader), timeout_s=60, what="the killed one is back")
        if stack.metrics(follower)["depositions_total"] == 0:
            assert follower.name != leader.name
            assert leader_of(stack, lambda: stack.processes("scheduler")).name == follower.name, (
                "the killed one stands by"
            )
        assert stack.integrity_errors() == []
