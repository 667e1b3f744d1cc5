"""kill -9 of each process under load: a clear status for every request, soon; nothing leaks; it serves again."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]

NUM_REQUESTS = 12
MAX_HANG_S = 10.0
CLEAR_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run")) as stack:
        yield stack


async def load_across_a_kill(stack: Stack, role: str) -> list[tuple[StreamRecord, float]]:
    """Kills the role's first process amid requests. For each: its record, and the time from the kill to its end."""
    victim = stack.processes(role)[0]
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        loop = asyncio.get_running_loop()

        async def one(number: int) -> tuple[StreamRecord, float]:
            request = greedy_request([500 + number] * (20 + 30 * number), max_tokens=40, ignore_eos=True)
            record = await stream(stub, request, timeout_s=90)
            return record, loop.time()

        tasks = [asyncio.create_task(one(number)) for number in range(NUM_REQUESTS)]
        await asyncio.sleep(2.0)
        stack.kill(victim)
        killed_at = loop.time()
        return [(record, ended_at - killed_at) for record, ended_at in await asyncio.gather(*tasks)]


def serves(stack: Stack) -> bool:
    shown = stack.weir("generate", "--address", stack.grpc_address, "--temperature", "0", "--max-tokens", "3", "Hello")
    return shown.returncode == 0


def is_clean(stack: Stack) -> bool:
    """Every process answers, holds nothing, and finds its books in order."""
    try:
        transfer = stack.metrics(stack.processes("transfer")[0])
        scheduler = stack.metrics(stack.processes("scheduler")[0])
        gateway = stack.metrics(stack.processes("gateway")[0])
        errors = stack.integrity_errors()
    except (grpc.RpcError, IndexError):
        return False
    return (
        errors == []
        and transfer["free_pages"] + transfer["cached_pages"] == transfer["total_pages"]
        and scheduler["reserved_pages"] == 0
        and scheduler["queued"] == 0
        and gateway["requests_in_flight"] == 0
    )


@pytest.mark.parametrize("role", ["decode", "prefill", "transfer", "gateway", "scheduler", "nats"])
async def test_after_kill_9_requests_end_clearly_and_the_system_serves_again(stack: Stack, role: str) -> None:
    wait_until(lambda: serves(stack), timeout_s=30, what="serves before the kill")

    results = await load_across_a_kill(stack, role)

    for record, _ in results:
        assert record.num_terminal_events == 1, record
        assert record.num_index_errors == 0, record
        assert record.code in CLEAR_CODES, record
        if record.code is not grpc.StatusCode.OK:
            assert record.details, record
    late = [(after_s, record) for record, after_s in results if record.code is not grpc.StatusCode.OK]
    assert [(after_s, record) for after_s, record in late if after_s >= MAX_HANG_S] == []

    wait_until(lambda: serves(stack), timeout_s=40, what=f"serves again after {role} was killed")
    wait_until(lambda: is_clean(stack), timeout_s=20, what=f"nothing is left after {role} was killed")
