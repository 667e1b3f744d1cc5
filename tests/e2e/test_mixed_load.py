"""Many requests at once, some cancelled at random: each ends once, and nothing is left."""

import asyncio
import random

import grpc
import pytest

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]

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


def is_idle(stack: Stack) -> bool:
    """Nothing held anywhere: arena, scheduler, gateway."""
    transfer, scheduler, gateway = (
        stack.metrics(stack.processes(role)[0]) for role in ("transfer", "scheduler", "gateway")
    )
    return (
        transfer["free_pages"] + transfer["cached_pages"] == transfer["total_pages"]
        and transfer["free_slots"] == transfer["total_slots"]
        and scheduler["queued"] == 0
        and scheduler["granted"] == 0
        and scheduler["reserved_pages"] == 0
        and gateway["requests_in_flight"] == 0
    )


async def test_200_concurrent_requests_with_random_cancellations_end_once_and_leave_nothing(stack: Stack) -> None:
    records = await run_mixed_load(stack.grpc_address, seed=20)

    assert [record for record in records if record.num_terminal_events != 1] == []
    assert [record for record in records if record.num_index_errors] == []
    unexpected = [r for r in records if r.code is not grpc.StatusCode.OK and r.code not in ENDED_BY_CLIENT]
    assert unexpected == []
    assert sum(record.code is grpc.StatusCode.CANCELLED for record in records) > 20
    assert sum(record.code is grpc.StatusCode.OK for record in records) > 100

    wait_until(lambda: is_idle(stack), timeout_s=15, what="arena, queues and books are empty")
    assert stack.integrity_errors() == []
    gateway = stack.metrics(stack.processes("gateway")[0])
    ended = sum(gateway[f"{end}_total"] for end in ("finished", "cancelled", "failed", "refused"))
    assert gateway["accepted_total"] == ended
    for role in ("gateway", "scheduler"):
        assert stack.metric(role, "bus_pending") == 0
