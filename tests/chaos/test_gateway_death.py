"""kill -9 of one of two gateways: a client that sends its request again under its key, to the other one, gets what it
lacks from the sequence that runs on meanwhile, and the whole is what it would have been."""

import asyncio
import signal
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
MAX_TOKENS = 120
KILLED_AT = 8
GATEWAY_MISSED_S = 25.0
"""By the workers: 5 s, and what a busy machine takes."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # However slow the machine: what can be claimed is not computed again.
    environ = {"WEIR_CLAIM_WAIT_S": "30"}
    with Stack(tmp_path_factory.mktemp("run"), flags=("--gateways", "2"), environ=environ) as stack:
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
        request.options.sampling.logprobs = 2
    return request


def with_stop(request: inference_pb2.GenerateRequest, text: str) -> inference_pb2.GenerateRequest:
    """It stops amid this text, beyond its middle."""
    start = next(at for at in range(len(text) // 2, len(text) - 6) if text.find(text[at : at + 6]) == at)
    request.options.stop_conditions.stop.append(text[start : start + 6])
    return request


def addresses_of(stack: Stack) -> list[str]:
    return [process.address for process in stack.processes("gateway")]


async def amid_the_kill(
    stack: Stack, clients: Sequence[Callable[[Resumed], Coroutine[Any, Any, Resumed]]]
) -> list[Resumed]:
    """The first gateway is killed when all of them have tokens, and one has some."""
    victim = (await asyncio.to_thread(stack.processes, "gateway"))[0]
    seen = [Resumed() for _ in clients]
    running = [asyncio.create_task(client(one)) for client, one in zip(clients, seen, strict=True)]
    async with asyncio.timeout(120):
        while min(one.num_had for one in seen) == 0 or max(one.num_had for one in seen) < KILLED_AT:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # what they have has no event
    stack.kill(victim)
    results = await asyncio.gather(*running)
    await asyncio.to_thread(lambda: wait_until(lambda: stack.has_restarted(victim), timeout_s=90, what="it is back"))
    return list(results)


async def read_to_end(call: "grpc.aio.UnaryStreamCall[Any, Any]") -> None:
    """What was sent comes before the end. Raises AioRpcError if that is an error."""
    while await call.read() is not grpc.aio.EOF:
        pass


def computed_tokens(stack: Stack) -> dict[str, float]:
    """What workers have computed of prompts, and of sequences once more."""
    names = ("prompt_tokens_computed_total", "tokens_recomputed_total")
    return {name: sum(stack.metric(role, name) for role in ("prefill", "decode")) for name in names}


async def test_grpc_streams_go_on_at_the_other_gateway_where_they_broke_and_nothing_is_computed_again(
    stack: Stack,
) -> None:
    addresses = addresses_of(stack)
    assert len(addresses) == 2
    requests = [request_of(number, "") for number in range(NUM_STREAMS)]
    channel, stub = open_stub(addresses[1])
    async with channel:
        whole = await asyncio.gather(*(stream(stub, request) for request in requests))
        stopped = [1, 5]
        for number in stopped:
            with_stop(requests[number], whole[number].text)
        records = await asyncio.gather(*(stream(stub, request) for request in requests))
    undisturbed = [as_resumed(record) for record in records]
    assert all(len(undisturbed[number].token_ids) < MAX_TOKENS for number in stopped), "a text stops them"
    for number, request in enumerate(requests):
        request.options.idempotency_key = f"grpc-{number}"
    survivor = stack.processes("gateway")[1]
    before, submitted = await asyncio.to_thread(stack.metrics, survivor), stack.metric_of_leader("submitted_total")
    names = ("claims_total", "claims_in_vain_total")

    results = await amid_the_kill(stack, [partial(stream_grpc, addresses, request) for request in requests])

    for number, (seen, expected) in enumerate(zip(results, undisturbed, strict=True)):
        assert seen.token_ids == expected.token_ids, (number, seen.errors)
        assert (seen.text, seen.finish_reasons) == (expected.text, expected.finish_reasons), number
        assert seen.num_index_errors == 0, number
    broken = [seen for seen in results if seen.broken_at]
    assert any(0 < seen.broken_at[0] < MAX_TOKENS for seen in broken), "some broke amid their tokens"
    # The killed one has begun to count anew: whom the survivor sends away at first may come to it.
    claimed, in_vain = [await asyncio.to_thread(stack.metric, "gateway", name) - before[name] for name in names]
    assert (claimed, in_vain) == (len(broken), 0)
    assert stack.metric_of_leader("submitted_total") == submitted + NUM_STREAMS, "none was submitted again"
    waited_ms = sorted(round(1000 * wait_s) for seen in results for wait_s in seen.waited_s)
    print(f"from the second send to the first new token, ms: {waited_ms}")  # noqa: T201 - shown by pytest -s
    wait_until(stack.is_idle, timeout_s=90, what="nothing is left")


@pytest.mark.long
async def test_what_has_a_key_is_kept_for_a_while_and_all_else_is_freed(stack: Stack) -> None:
    addresses, long = addresses_of(stack), 1300
    requests = [request_of(number, f"kept-{number}" if number < 2 else "") for number in range(4)]
    for request in requests:
        request.options.stop_conditions.max_tokens = long
    victim, survivor = stack.processes("gateway")
    channel, stub = open_stub(addresses[0])
    async with channel:
        calls = [stub.Generate(request, timeout=120) for request in requests]
        had = [await call.read() for call in calls]
        assert all(isinstance(response, inference_pb2.GenerateResponse) and response.token_ids for response in had)
        stack.kill(victim)

    def is_left_to_claim() -> bool:
        (worker,) = stack.processes("decode")
        metrics = stack.metrics(worker)
        return metrics["num_unclaimed"] == 2 >= metrics["num_live"]  # they may end before they are asked for

    await asyncio.to_thread(lambda: wait_until(is_left_to_claim, timeout_s=GATEWAY_MISSED_S, what="two are left"))
    computed, claims = computed_tokens(stack), stack.metrics(survivor)["claims_total"]
    again = await asyncio.gather(*(stream_grpc([addresses[1]], request) for request in requests[:2]))
    assert stack.metrics(survivor)["claims_total"] == claims + 2
    assert computed_tokens(stack) == computed
    channel, stub = open_stub(addresses[1])
    async with channel:
        for request in requests[:2]:
            request.options.idempotency_key = ""
        whole = await asyncio.gather(*(stream(stub, request) for request in requests[:2]))
    assert [seen.token_ids for seen in again] == [record.token_ids for record in whole]
    await asyncio.to_thread(lambda: wait_until(lambda: stack.has_restarted(victim), timeout_s=90, what="it is back"))
    wait_until(stack.is_idle, timeout_s=90, what="nothing is left")


@pytest.mark.long
async def test_a_gateway_that_stood_still_meanwhile_does_not_disturb_the_one_that_goes_on(stack: Stack) -> None:
    addresses = addresses_of(stack)
    frozen, survivor = stack.processes("gateway")
    request, claims = request_of(1, "frozen"), stack.metrics(survivor)["claims_total"]
    request.options.stop_conditions.max_tokens = 400
    channel, stub = open_stub(addresses[0])
    async with channel:
        call = stub.Generate(request, timeout=120)
        assert isinstance(await call.read(), inference_pb2.GenerateResponse)
        stack.kill(frozen, signal.SIGSTOP)
        try:
            seen = Resumed()
            going_on = asyncio.create_task(stream_grpc([addresses[1]], request, seen))
            async with asyncio.timeout(60):
                while seen.num_had == 0:  # noqa: ASYNC110 - what it has has no event
                    await asyncio.sleep(0.01)
        finally:
            stack.kill(frozen, signal.SIGCONT)
        await going_on
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await read_to_end(call)
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE, "it is told"
    assert stack.metrics(survivor)["claims_total"] == claims + 1
    channel, stub = open_stub(addresses[1])
    async with channel:
        request.options.idempotency_key = ""
        assert seen.token_ids == (await stream(stub, request)).token_ids
    wait_until(stack.is_idle, timeout_s=90, what="nothing is left")


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
    wait_until(stack.is_idle, timeout_s=90, what="nothing is left")


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
