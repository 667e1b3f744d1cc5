"""The prefix cache end to end: what one request computed, the next one finds, with the same tokens."""

import asyncio

import pytest

from weir.kv.geometry import PAGE_TOKENS
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = pytest.mark.stack

COUNTED = ("prompt_tokens_computed_total", "prompt_tokens_cached_total")


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return [1000 + (seed * 7919 + index * 31) % 40_000 for index in range(num_tokens)]


def is_settled(stack: Stack) -> bool:
    metrics = stack.metrics(stack.processes("transfer")[0])
    return metrics["free_pages"] + metrics["cached_pages"] == metrics["total_pages"] and not metrics["prefix_pending"]


async def run(stack: Stack, prompts: list[list[int]], max_tokens: int) -> tuple[list[StreamRecord], dict[str, float]]:
    """All prompts at once; what came out, and what was computed and found for them."""
    before = {name: stack.metric("prefill", name) for name in COUNTED}
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        requests = [greedy_request(ids, max_tokens=max_tokens, ignore_eos=True) for ids in prompts]
        records = await asyncio.gather(*(stream(stub, request) for request in requests))
    assert all(len(record.token_ids) == max_tokens for record in records), records
    wait_until(lambda: is_settled(stack), timeout_s=20, what="every page is free or cached")
    return list(records), {name: stack.metric("prefill", name) - before[name] for name in COUNTED}


async def test_the_second_turn_of_a_chat_computes_only_what_is_new(stack: Stack) -> None:
    first = prompt(1, 200)
    (answer,), _ = await run(stack, [first], max_tokens=40)
    second = first + answer.token_ids + prompt(2, 30)

    (hit,), counted = await run(stack, [second], max_tokens=12)

    assert counted["prompt_tokens_computed_total"] <= 30 + PAGE_TOKENS
    assert sum(counted.values()) == len(second)
    (again,), counted = await run(stack, [second], max_tokens=12)
    assert again.token_ids == hit.token_ids
    assert counted["prompt_tokens_computed_total"] <= PAGE_TOKENS


async def test_requests_with_one_new_prefix_at_the_same_time_compute_it_once(stack: Stack) -> None:
    shared = prompt(3, 20 * PAGE_TOKENS)
    prompts = [shared + prompt(100 + number, 20) for number in range(8)]

    records, counted = await run(stack, prompts, max_tokens=4)

    assert counted["prompt_tokens_computed_total"] == len(shared) + 8 * 20
    assert counted["prompt_tokens_cached_total"] == 7 * len(shared)
    alone, _ = await run(stack, prompts[:1], max_tokens=4)
    assert alone[0].token_ids == records[0].token_ids


async def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_page(stack: Stack) -> None:
    whole = prompt(4, 8 * PAGE_TOKENS)
    (first,), _ = await run(stack, [whole], max_tokens=6)

    (second,), counted = await run(stack, [whole], max_tokens=6)

    assert second.token_ids == first.token_ids
    assert counted["prompt_tokens_computed_total"] == PAGE_TOKENS


@pytest.mark.parametrize("end", ["cancelled", "finished"])
async def test_what_a_request_computed_before_its_end_serves_the_next(stack: Stack, end: str) -> None:
    ids = prompt(5 if end == "cancelled" else 6, 10 * PAGE_TOKENS + 3)
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        request = greedy_request(ids, max_tokens=200 if end == "cancelled" else 24, ignore_eos=True)
        await stream(stub, request, cancel_after_tokens=20 if end == "cancelled" else None)
    wait_until(lambda: is_settled(stack), timeout_s=20, what="the pages of the ended request are cached")

    _, counted = await run(stack, [ids], max_tokens=2)

    assert counted["prompt_tokens_cached_total"] == 10 * PAGE_TOKENS
