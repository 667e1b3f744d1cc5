"""kill -9 of each process under load: no stream loses a token, but for those of a killed gateway, which end with a
clear status, soon; nothing leaks; it serves again."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import ProcessView, Stack, wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]

NUM_REQUESTS = 12
MAX_HANG_S = 10.0
MAX_PAUSE_S = 60.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run")) as stack:
        yield stack


def request_of(number: int) -> inference_pb2.GenerateRequest:
    """Greedy and seeded ones, short and long prompts."""
    request = greedy_request([500 + number] * (20 + 30 * number), max_tokens=60, ignore_eos=True)
    if number % 2:
        request.options.sampling.temperature = 0.9
        request.options.sampling.seed = number
        request.options.sampling.presence_penalty = 0.5
    return request


async def load(stack: Stack, victim: ProcessView | None = None) -> list[tuple[StreamRecord, float]]:
    """All requests at once; amid them the victim is killed. For each: its record, and the time from then to its end."""
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        loop = asyncio.get_running_loop()
        killed_at = loop.time()

        async def one(number: int) -> tuple[StreamRecord, float]:
            record = await stream(stub, request_of(number), timeout_s=120)
            return record, loop.time()

        tasks = [asyncio.create_task(one(number)) for number in range(NUM_REQUESTS)]
        if victim is not None:
            await asyncio.sleep(1.5)
            stack.kill(victim)
            killed_at = loop.time()
        return [(record, ended_at - killed_at) for record, ended_at in await asyncio.gather(*tasks)]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[list[int]]:
    """The tokens of each request."""
    wait_until(lambda: serves(stack), timeout_s=90, what="serves")
    return [record.token_ids for record, _ in asyncio.run(load(stack))]


def serves(stack: Stack) -> bool:
    shown = stack.weir("generate", "--address", stack.grpc_address, "--temperature", "0", "--max-tokens", "3", "Hello")
    return shown.returncode == 0


@pytest.mark.parametrize("role", ["decode", "prefill", "transfer", "scheduler", "nats"])
async def test_kill_9_costs_no_stream_a_token(stack: Stack, undisturbed: list[list[int]], role: str) -> None:
    wait_until(lambda: serves(stack), timeout_s=90, what="serves before the kill")

    results = await load(stack, stack.processes(role)[0])

    assert [record for record, _ in results if record.code is not grpc.StatusCode.OK] == []
    for (record, after_s), token_ids in zip(results, undisturbed, strict=True):
        assert (record.num_terminal_events, record.num_index_errors) == (1, 0), record
        assert record.token_ids == token_ids
        assert after_s < MAX_PAUSE_S
    recovers(stack, role)


async def test_streams_of_a_killed_gateway_end_with_a_clear_status(stack: Stack) -> None:
    wait_until(lambda: serves(stack), timeout_s=90, what="serves before the kill")

    results = await load(stack, stack.processes("gateway")[0])

    for record, after_s in results:
        assert record.num_terminal_events == 1, record
        assert record.num_index_errors == 0, record
        if record.code is not grpc.StatusCode.OK:
            assert record.code is grpc.StatusCode.UNAVAILABLE
            assert record.details, record
            assert after_s < MAX_HANG_S
    recovers(stack, "gateway")


def recovers(stack: Stack, role: str) -> None:
    wait_until(lambda: serves(stack), timeout_s=90, what=f"serves again after {role} was killed")
    wait_until(stack.is_idle, timeout_s=90, what=f"nothing is left after {role} was killed")
