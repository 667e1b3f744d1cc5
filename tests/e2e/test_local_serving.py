"""A stack without prefill workers serves, and its tokens are those of the split one."""

import asyncio
from collections.abc import Iterator

import pytest

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

PROMPTS = [[1000 + number] * (3 + 41 * number) for number in range(5)]


@pytest.fixture(scope="module")
def local_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run"), num_prefill=0, num_decode=1) as stack:
        yield stack


async def answers(address: str) -> list[StreamRecord]:
    channel, stub = open_stub(address)
    async with channel:
        requests = [greedy_request(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS]
        return await asyncio.gather(*(stream(stub, request) for request in requests))


async def test_one_worker_serves_alone_and_tokens_are_those_of_the_split_stack(
    local_stack: Stack, stack: Stack
) -> None:
    alone, split = await answers(local_stack.grpc_address), await answers(stack.grpc_address)
    assert [record.token_ids for record in alone] == [record.token_ids for record in split]
    assert [len(record.token_ids) for record in alone] == [12] * len(PROMPTS)
    assert local_stack.processes("prefill") == []
    assert local_stack.metric("decode", "served_locally_total") == len(PROMPTS)
    assert local_stack.metric("transfer", "handoffs_total") == 0
    assert local_stack.integrity_errors() == []
