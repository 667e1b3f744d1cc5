"""At its deadline a request ends with what there is, if its client asked for that."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import grpc
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.world import World

from weir.bus.messages import Outcome
from weir.client import AsyncWeirClient, FinishReason, GenerateOptions
from weir.testing.load import StreamRecord, greedy_request, stream
from weir.wire.v1 import inference_pb2, types_pb2

AnswerT = TypeVar("AnswerT")

DEADLINE = types_pb2.FINISH_REASON_DEADLINE
A_MINUTE_S, A_MINUTE_MS = 60, 60_000
BODY: dict[str, Any] = {"prompt": "Say hello", "max_tokens": 11, "temperature": 0, "partial_at_deadline": True}


def partial_request(deadline_ms: int = 0, **options: Any) -> inference_pb2.GenerateRequest:
    request = greedy_request("Say hello", max_tokens=11)
    request.options.MergeFrom(inference_pb2.RequestOptions(partial_at_deadline=True, **options))
    if deadline_ms:
        request.options.deadline_ms = deadline_ms
    return request


async def at_deadline(
    world: World, asking: Coroutine[Any, Any, AnswerT], *, num_tokens: int = 4, num_choices: int = 1
) -> AnswerT:
    """What is answered to a request whose deadline passes when each of its choices has so many tokens."""
    states = world.gateway._driver.requests
    answering = asyncio.create_task(asking)
    await world.until(
        lambda: [state.output.num_tokens for state in states.values()] == [num_tokens] * num_choices, "has its tokens"
    )
    for state in tuple(states.values()):
        assert state.deadline_at_s is not None
        assert 0 < state.deadline_at_s - time.monotonic() <= A_MINUTE_S
        state.expire()
    return await answering


async def responses_to(world: World, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in world.stub.Generate(request, timeout=120)]


def outcome_of(record: StreamRecord) -> tuple[grpc.StatusCode, list[int], str, int]:
    return record.code, record.finish_reasons, record.text, record.num_index_errors


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


@pytest.mark.parametrize("num_tokens", [1, 4])
async def test_the_answer_ends_with_the_tokens_that_are_there(world: World, num_tokens: int) -> None:
    world.pair.stops_after = num_tokens
    responses = await at_deadline(world, responses_to(world, partial_request(A_MINUTE_MS)), num_tokens=num_tokens)
    assert "".join(response.text for response in responses) == "hello world"[:num_tokens]
    assert responses[-1].finish_reason == DEADLINE
    assert responses[-1].usage.num_output_tokens == num_tokens
    assert responses[-1].usage.num_prompt_tokens == len(ids_of("Say hello"))
    await world.until_idle()
    assert world.metric("finished_total") == 1
    await world.until(lambda: world.prefill.named("cancel"), "the workers are told")
    finish = world.scheduler.finishes[0]
    assert (finish.num_output_tokens, finish.outcome) == (num_tokens, Outcome.CANCELLED), "charged, and nothing learned"


async def test_a_queued_request_ends_with_nothing(world: World) -> None:
    world.scheduler.grants_at_once = False
    record = await stream(world.stub, partial_request(100))
    assert outcome_of(record) == (grpc.StatusCode.OK, [DEADLINE], "", 0)
    await world.until_idle()
    assert len({cancel.request_id for cancel in world.scheduler.cancels}) == 1


async def test_a_request_that_no_scheduler_answers_ends_with_nothing(world: World) -> None:
    world.scheduler.is_silent = True
    record = await stream(world.stub, partial_request(100), timeout_s=10)
    assert outcome_of(record) == (grpc.StatusCode.OK, [DEADLINE], "", 0)


async def test_all_of_several_choices_end_with_what_there_is(world: World) -> None:
    world.pair.stops_after = 4
    responses = await at_deadline(world, responses_to(world, partial_request(A_MINUTE_MS, n=2)), num_choices=2)
    assert {r.choice: r.finish_reason for r in responses if r.finish_reason} == {0: DEADLINE, 1: DEADLINE}
    for choice in (0, 1):
        assert "".join(r.text for r in responses if r.choice == choice) == "hell"


async def test_of_the_calls_own_deadline_enough_is_left_for_the_end_to_arrive(world: World) -> None:
    world.pair.stops_after = 4
    in_time = (grpc.StatusCode.OK, [DEADLINE], "hell", 0)
    outcomes = []
    for timeout_s in (1.0, 3.0, 9.0):  # what is left is 0.1 s, which a busy machine may take for itself
        outcomes.append(outcome_of(await stream(world.stub, partial_request(), timeout_s=timeout_s)))
        if outcomes[-1] == in_time:
            break
    assert outcomes[-1] == in_time, outcomes


async def test_without_the_wish_the_status_says_that_the_deadline_has_passed(world: World) -> None:
    world.pair.stops_after = 4
    request = greedy_request("Say hello", max_tokens=11)
    request.options.deadline_ms = A_MINUTE_MS
    record = await at_deadline(world, stream(world.stub, request))
    assert (record.code, record.details) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the deadline has passed; 4 tokens were sent before",
    )


async def test_text_that_was_held_back_for_a_stop_string_is_part_of_the_answer(world: World) -> None:
    world.pair.stops_after = 4
    request = partial_request(A_MINUTE_MS)
    request.options.stop_conditions.stop.append("ll and")
    record = await at_deadline(world, stream(world.stub, request))
    assert outcome_of(record) == (grpc.StatusCode.OK, [DEADLINE], "hell", 0)


async def test_the_python_client_gives_the_call_time_for_the_end(world: World) -> None:
    world.pair.stops_after = 4
    options = GenerateOptions(temperature=0.0, max_tokens=11, partial_at_deadline=True)
    for timeout_s in (0.3, 2.0, 8.0):  # the longer ones where the tokens are not there so soon
        async with AsyncWeirClient(world.grpc_address, timeout_s=timeout_s) as client:
            chunks = [chunk async for chunk in client.generate("Say hello", options)]
        if chunks[-1].num_output_tokens == 4:
            break
    assert "".join(chunk.text for chunk in chunks) == "hell"
    assert (chunks[-1].finish_reason, chunks[-1].num_output_tokens) == (FinishReason.DEADLINE, 4)


@pytest.mark.parametrize("stops_after", [0, 4])
async def test_over_http_the_reason_is_length_and_the_details_say_deadline(
    world: World, http: httpx.AsyncClient, stops_after: int
) -> None:
    world.pair.stops_after = stops_after
    asking = http.post("/v1/completions", json=BODY | {"deadline_ms": A_MINUTE_MS})
    response = await at_deadline(world, asking, num_tokens=stops_after)
    [choice] = response.json()["choices"]
    assert (response.status_code, choice["text"]) == (200, "hello world"[:stops_after])
    assert (choice["finish_reason"], choice["finish_details"]) == ("length", {"type": "deadline"})
    assert response.json()["usage"]["completion_tokens"] == stops_after


@pytest.mark.parametrize("is_strict", [False, True])
async def test_openais_client_reads_it_whole_and_streamed_even_if_it_checks_every_type(
    world: World, is_strict: bool
) -> None:
    world.pair.stops_after = 4
    extra = {"deadline_ms": A_MINUTE_MS, "partial_at_deadline": True}
    url = f"{world.http_url}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="-", max_retries=0, _strict_response_validation=is_strict
    ) as client:
        create = client.chat.completions.create
        asked: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 11}
        whole = await at_deadline(world, create(**asked, extra_body=extra))

        async def chunks_of() -> list[ChatCompletionChunk]:
            return [chunk async for chunk in await create(**asked, extra_body=extra, stream=True)]

        chunks = await at_deadline(world, chunks_of())
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.choices[0].model_extra == {"finish_details": {"type": "deadline"}}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
