"""A stack without prefill workers serves, and its tokens are those of the split one; it books by past lengths."""

import asyncio
import re
from collections.abc import Iterator

import pytest

from weir.kv.geometry import PAGE_TOKENS
from weir.scheduling.memory_fit import NUM_PAST
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import types_pb2

pytestmark = pytest.mark.stack

LONGEST = 8000
NUM_AT_ONCE = 8
PROMPTS = [[1000 + number] * (3 + 41 * number) for number in range(5)]
HELD = (1, 4)
"""Of the prompts: their answers are held to a grammar, whose end they do not reach."""
WORD = types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_REGEX, source="[a-z]{400}")


@pytest.fixture(scope="module")
def local_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environ = {"WEIR_MEMORY_FIT": "past-future"}
    flags = ("--arena-bytes", str(1 << 30))
    with Stack(tmp_path_factory.mktemp("run"), num_prefill=0, num_decode=1, flags=flags, environ=environ) as stack:
        yield stack


async def answers(address: str) -> list[StreamRecord]:
    channel, stub = open_stub(address)
    async with channel:
        requests = [
            greedy_request(prompt, max_tokens=12, ignore_eos=number not in HELD)
            for number, prompt in enumerate(PROMPTS)
        ]
        for number in HELD:
            requests[number].options.sampling.grammar.CopyFrom(WORD)
        return await asyncio.gather(*(stream(stub, request) for request in requests))


async def test_one_worker_serves_alone_and_tokens_are_those_of_the_split_stack(
    local_stack: Stack, stack: Stack
) -> None:
    alone, split = await answers(local_stack.grpc_address), await answers(stack.grpc_address)
    assert [record.token_ids for record in alone] == [record.token_ids for record in split]
    assert [len(record.token_ids) for record in alone] == [12] * len(PROMPTS)
    assert all(re.fullmatch("[a-z]+", alone[number].text) for number in HELD)
    assert local_stack.processes("prefill") == []
    assert local_stack.metric("decode", "served_locally_total") == len(PROMPTS)
    assert local_stack.metric("transfer", "handoffs_total") == 0
    assert local_stack.integrity_errors() == []


async def test_after_many_short_answers_more_requests_run_at_once_than_would_fit_with_their_longest(
    local_stack: Stack,
) -> None:
    scheduler = local_stack.processes("scheduler")[0]
    total_pages = local_stack.metric("transfer", "total_pages")
    channel, stub = open_stub(local_stack.grpc_address)
    async with channel:
        for _ in range(NUM_PAST // 50):
            short = [greedy_request([2000 + number], max_tokens=1) for number in range(50)]
            records = await asyncio.gather(*(stream(stub, request) for request in short))
            assert {record.num_terminal_events for record in records} == {1}
        long = [greedy_request([3000 + number], max_tokens=LONGEST, ignore_eos=True) for number in range(NUM_AT_ONCE)]
        running = [asyncio.create_task(stream(stub, request)) for request in long]
        assert total_pages < NUM_AT_ONCE * LONGEST / PAGE_TOKENS
        await asyncio.to_thread(
            wait_until,
            lambda: local_stack.metrics(scheduler)["reserved_pages"] > total_pages,
            timeout_s=30,
            what="more is reserved than there is",
        )
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    wait_until(lambda: local_stack.metrics(scheduler)["granted"] == 0, timeout_s=20, what="all are cancelled")
    assert local_stack.integrity_errors() == []
