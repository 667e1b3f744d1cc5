"""More is promised than the arena holds: sequences are preempted, and their clients do not notice."""

import asyncio
import random
import re
from collections.abc import Iterator

import grpc
import pytest

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import types_pb2

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

NUM_REQUESTS = 16
MAX_TOKENS = 72
PAGE_BYTES = 30 * 2 * 3 * 16 * 64 * 2
NUM_PAGES = 36
WORDS = types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_REGEX, source="([a-z]{3},){100}")


@pytest.fixture(scope="module")
def small_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Of 36 pages 32 may be reserved, and with the overcommit 96: room for six of this test's requests; 16 come."""
    environ = {
        "WEIR_PAGE_OVERCOMMIT": "3",
        "WEIR_MAX_CONTEXT_TOKENS": "256",
        "WEIR_MAX_STALL_S": "120",  # prompts wait for pages, and this machine may be slow
        "WEIR_MAX_PREEMPTIONS": "20",
    }
    flags = ("--arena-bytes", str(NUM_PAGES * PAGE_BYTES + (4 << 20)))
    with Stack(tmp_path_factory.mktemp("run"), flags=flags, environ=environ) as stack:
        yield stack


def prompts() -> list[list[int]]:
    random_source = random.Random(7)
    return [
        [random_source.randrange(100, 40_000) for _ in range(random_source.randint(4, 20))] for _ in range(NUM_REQUESTS)
    ]


async def serve(address: str, at_a_time: int) -> list[StreamRecord]:
    channel, stub = open_stub(address)
    places = asyncio.Semaphore(at_a_time)

    async def one(number: int, ids: list[int], lane: str) -> StreamRecord:
        is_held = number % 4 == 1  # to a grammar, which the answer does not come to the end of
        request = greedy_request(ids, max_tokens=MAX_TOKENS, ignore_eos=not is_held, lane=lane)
        if is_held:
            request.options.sampling.grammar.CopyFrom(WORDS)
        async with places:
            return await stream(stub, request, timeout_s=240)

    lanes = ["interactive", "standard", "batch"]
    async with channel:
        return await asyncio.gather(*(one(number, ids, lanes[number % 3]) for number, ids in enumerate(prompts())))


async def test_with_overcommit_requests_are_preempted_and_all_end_with_the_tokens_they_have_alone(
    small_stack: Stack,
) -> None:
    alone = await serve(small_stack.grpc_address, at_a_time=3)
    assert [(record.code, record.details) for record in alone] == [(grpc.StatusCode.OK, "")] * NUM_REQUESTS
    # On a busy machine the pages of who has ended may come back late, for the next one to lack them.
    num_alone = small_stack.metric("decode", "preemptions_total")

    together = await serve(small_stack.grpc_address, at_a_time=NUM_REQUESTS)
    assert [(record.code, record.details) for record in together] == [(grpc.StatusCode.OK, "")] * NUM_REQUESTS
    assert [record.num_index_errors for record in together] == [0] * NUM_REQUESTS
    assert [record.token_ids for record in together] == [record.token_ids for record in alone]

    assert all(re.fullmatch("([a-z]{3},)*[a-z]{0,3}", record.text) for record in together[1::4])

    decode = small_stack.metrics(small_stack.processes("decode")[0])
    assert decode["preemptions_total"] > num_alone
    assert decode["pages_swapped_out_total"] == decode["pages_swapped_in_total"]
    assert decode["swap_failures_total"] == 0
    num_served = decode["taken_over_total"] + decode["served_locally_total"]
    assert decode["preemption_rate"] == decode["preemptions_total"] / num_served
    wait_until(small_stack.is_idle, timeout_s=90, what="all pages are back")
