"""kill -9 of one of two gateways: a client that sends its request again under its key, to the other one, gets what it
lacks, and the whole is what it would have been."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
import httpx
import pytest
from tests.chaos.resuming import Resumed, as_resumed, stream_grpc, stream_sse

from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

NUM_STREAMS = 6
MAX_TOKENS = 60
KILLED_AT = 8


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run"), flags=("--gateways", "2")) as stack:
        yield stack


def request_of(number: int, key: str) -> inference_pb2.GenerateRequest:
    """Greedy and seeded ones, with penalties, stop strings and log-probabilities."""
    request = greedy_request([500 + number] * (20 + 20 * number), max_tokens=MAX_TOKENS, ignore_eos=True)
    request.options.idempotency_key = key
    if number % 2:
        request.options.sampling.temperature = 0.9
        request.options.sampling.seed = number
        request.options.sampling.presence_penalty = 0.5
    if number % 4 == 3:
        request.options.stop_conditions.stop.append("zzzz")
        request.options.sampling.logprobs = 2
    return request


def addresses_of(stack: Stack) -> list[str]:
    return [process.address for process in stack.processes("gateway")]


async def amid_the_kill(
    stack: Stack, clients: Sequence[Callable[[Resumed], Coroutine[Any, Any, Resumed]]]
) -> list[Resumed]:
    """The first gateway is killed when one of them has some tokens."""
    victim = (await asyncio.to_thread(stack.processes, "gateway"))[0]
    seen = [Resumed() for _ in clients]
    running = [asyncio.create_task(client(one)) for client, one in zip(clients, seen, strict=True)]
    async with asyncio.timeout(120):
        while max(one.num_had for one in seen) < KILLED_AT:  # noqa: ASYNC110 - what they have has no event
            await asyncio.sleep(0.01)
    stack.kill(victim)
    results = await asyncio.gather(*running)
    await asyncio.to_thread(lambda: wait_until(lambda: stack.has_restarted(victim), timeout_s=40, what="it is back"))
    return list(results)


def is_clean(stack: Stack) -> bool:
    try:
        transfer = stack.metrics(stack.processes("transfer")[0])
        scheduler = stack.metrics(stack.processes("scheduler")[0])
        in_flight = stack.metric("gateway", "requests_in_flight")
    except (grpc.RpcError, IndexError):
        return False
    is_free = transfer["free_pages"] + transfer["cached_pages"] == transfer["total_pages"]
    is_idle = scheduler["reserved_pages"] == 0 and scheduler["queued"] == 0 and in_flight == 0
    return is_free and is_idle and stack.integrity_errors() == []


async def test_grpc_streams_go_on_at_the_other_gateway_where_they_broke(stack: Stack) -> None:
    addresses = addresses_of(stack)
    assert len(addresses) == 2
    channel, stub = open_stub(addresses[1])
    async with channel:
        records = await asyncio.gather(*(stream(stub, request_of(number, "")) for number in range(NUM_STREAMS)))
    undisturbed = [as_resumed(record) for record in records]

    results = await amid_the_kill(
        stack, [partial(stream_grpc, addresses, request_of(number, f"grpc-{number}")) for number in range(NUM_STREAMS)]
    )

    for number, (seen, expected) in enumerate(zip(results, undisturbed, strict=True)):
        assert seen.token_ids == expected.token_ids, (number, seen.errors)
        assert (seen.text, seen.finish_reasons) == (expected.text, expected.finish_reasons), number
        assert seen.num_index_errors == 0, number
    assert any(0 < count < MAX_TOKENS for seen in results for count in seen.broken_at), "some broke amid their tokens"
    wait_until(lambda: is_clean(stack), timeout_s=30, what="nothing is left")


async def test_events_go_on_after_the_last_event_id(stack: Stack) -> None:
    urls = await asyncio.to_thread(stack.http_urls)
    assert len(urls) == 2
    body: dict[str, object] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 7}
    bodies = [{**body, "prompt": [600 + number] * (20 + 20 * number)} for number in range(NUM_STREAMS)]
    async with httpx.AsyncClient(base_url=urls[1], timeout=120) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))
    whole = [answer.json()["choices"][0]["text"] for answer in answers]

    results = await amid_the_kill(
        stack, [partial(stream_sse, urls, one, f"sse-{number}") for number, one in enumerate(bodies)]
    )

    for seen, text in zip(results, whole, strict=True):
        assert (seen.text, seen.finish_reasons) == (text, ["length"]), seen.errors
    assert any(0 < count < MAX_TOKENS for seen in results for count in seen.broken_at), "some broke amid their tokens"
    wait_until(lambda: is_clean(stack), timeout_s=30, what="nothing is left")


async def test_another_body_under_a_key_is_refused_by_either_gateway(stack: Stack) -> None:
    addresses, urls = addresses_of(stack), await asyncio.to_thread(stack.http_urls)
    request = request_of(0, "taken")
    assert (await stream_grpc([addresses[0]], request)).errors == []

    request.options.stop_conditions.max_tokens = MAX_TOKENS + 1
    for address in addresses:
        (error,) = (await stream_grpc([address], request)).errors
        assert error.startswith("ALREADY_EXISTS: options.idempotency_key")
    async with httpx.AsyncClient(timeout=60) as client:
        for url in urls:
            headers = {"Idempotency-Key": "taken"}
            answer = await client.post(f"{url}/v1/completions", json={"prompt": "Hello"}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (409, "Idempotency-Key")


async def test_a_sampled_request_without_a_seed_has_the_same_tokens_wherever_it_is_sent_again(stack: Stack) -> None:
    request = request_of(0, "unseeded")
    request.options.sampling.temperature = 1.2
    first, second = [await stream_grpc([address], request) for address in addresses_of(stack)]
    assert first.errors == second.errors == []
    assert first.token_ids == second.token_ids
    assert first.finish_reasons == second.finish_reasons
    request.options.idempotency_key = "unseeded-too"
    other = await stream_grpc(addresses_of(stack), request)
    assert other.token_ids != first.token_ids, "the key makes the seed"
