"""Many requests at once, some cancelled at random: each ends once, and nothing is left."""

import asyncio
import random

import grpc
import pytest

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(240)]

NUM_REQUESTS = 200
ENDED_BY_CLIENT = {grpc.StatusCode.CANCELLED}


async def run_mixed_load(address: str, seed: int) -> list[StreamRecord]:
    """Prompts of 1 to 64 tokens, 1 to 16 tokens out; a third is cancelled, by tokens or by time."""
    random_source = random.Random(seed)
    channel, stub = open_stub(address)

    async def one(number: int) -> StreamRecord:
        ids = [random_source.randrange(100, 40_000) for _ in range(random_source.randint(1, 64))]
        request = greedy_request(
            ids,
            max_tokens=random_source.randint(1, 16),
            ignore_eos=True,
            lane=random_source.choice(["interactive", "standard", "batch"]),
        )
        kind = random_source.random()
        return await stream(
            stub,
            request,
            cancel_after_tokens=random_source.randint(1, 8) if kind < 1 / 6 else None,
            cancel_after_s=random_source.uniform(0, 8) if 1 / 6 <= kind < 1 / 3 else None,
        )

    async with channel:
        return await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))


async def test_200_concurrent_requests_with_random_cancellations_end_once_and_leave_nothing(stack: Stack) -> None:
    records = await run_mixed_load(stack.grpc_address, seed=20)

    assert [record for record in records if record.num_terminal_events != 1] == []
    assert [record for record in records if record.num_index_errors] == []
    unexpected = [r for r in records if r.code is not grpc.StatusCode.OK and r.code not in ENDED_BY_CLIENT]
    assert unexpected == []
    assert sum(record.code is grpc.StatusCode.CANCELLED for record in records) > 20
    assert sum(record.code is grpc.StatusCode.OK for record in records) > 100

    wait_until(stack.is_idle, timeout_s=90, what="arena, queues and books are empty")
    gateway, scheduler = (stack.processes(role)[0] for role in ("gateway", "scheduler"))
    counted = stack.metrics(gateway)
    ended = sum(counted[f"{end}_total"] for end in ("finished", "cancelled", "failed", "refused"))
    assert counted["accepted_total"] == ended
    for process in (gateway, scheduler):
        wait_until(
            lambda process=process: stack.metrics(process)["bus_pending"] == 0,  # type: ignore[misc]
            timeout_s=30,
            what=f"{process.name} has taken all messages",
        )
