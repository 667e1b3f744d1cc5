"""OpenAI's API, with the official client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from tests.unit.gateway.failing import ONE_DISPATCH
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import NUM_CACHED_TOKENS
from tests.unit.gateway.world import World

from weir.bus.messages import RefusalReason, SubmitReply


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def data_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line]


async def test_a_completion_of_a_text(world: World, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="bytes", prompt="Say hello", max_tokens=5, temperature=0)
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 5, 14)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == NUM_CACHED_TOKENS
    assert answer.id.startswith("cmpl-")


async def test_a_completion_of_token_ids_with_every_parameter(world: World, client: openai.AsyncOpenAI) -> None:
    extra = {"top_k": 3, "min_p": 0.5, "ignore_eos": True, "stop_token_ids": [7], "lane": "batch"}
    extra |= {"cache_salt": "team", "cache_prompt": False}
    await client.completions.create(
        model="bytes",
        prompt=[1, 2, 3],
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        seed=11,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"9": -100, "4": 2.5},  # numbers of any kind are served
        extra_body=extra | {"repetition_penalty": 1.5, "min_tokens": 2},
    )
    [start] = world.prefill.named("start")
    assert list(start.prompt_token_ids) == [1, 2, 3]
    sampling = start.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 11)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.5, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert dict(sampling.logit_bias) == {4: 2.5, 9: -100.0}
    assert (list(start.stop_token_ids), start.min_tokens) == ([7], 2)
    assert (start.cache_salt, start.skips_prefix_cache) == ("team", True)
    assert world.scheduler.submits[0].lane == "batch"


async def test_a_chat(world: World, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="bytes",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        ],
        max_completion_tokens=11,
        stop="o w",
    )
    assert answer.choices[0].message.content == "hell"
    assert answer.choices[0].finish_reason == "stop"
    [start] = world.prefill.named("start")
    assert bytes(start.prompt_token_ids) == b"system: Be kind.\nuser: Hello\n"


@pytest.mark.parametrize("includes_usage", [True, False])
async def test_a_streamed_chat_is_the_whole_one_in_chunks(
    world: World, client: openai.AsyncOpenAI, includes_usage: bool
) -> None:
    world.pair.answer = ids_of("héllo 😀!")
    stream = await client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": includes_usage},
    )
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "héllo 😀!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == ([12] if includes_usage else [])
    assert (chunks[-1].choices == []) == includes_usage


async def events_of_broken(http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    """The data of each event, of a stream whose connection is cut before its body ends."""
    events: list[str] = []

    async def read(response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            events.extend([line.removeprefix("data: ")] if line else [])

    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
            await read(response)
    return events


async def test_a_stream_ends_with_done(world: World, http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = data_of(response)
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "hel"


async def test_an_error_before_the_first_token_has_its_own_status(world: World, client: openai.AsyncOpenAI) -> None:
    world.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUEUE_FULL, "lane standard is full", 2100)
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model="bytes", prompt="x", stream=True)
    assert refused.value.response.headers["retry-after"] == "3"
    assert refused.value.type == "rate_limit_error"
    assert "lane standard is full" in refused.value.message


@ONE_DISPATCH
async def test_an_error_after_tokens_is_an_error_event_and_then_the_end(world: World, http: httpx.AsyncClient) -> None:
    world.pair.stops_after = 4
    asking = asyncio.create_task(events_of_broken(http, {"prompt": "x", "stream": True}))
    await world.until(lambda: world.scheduler.prefilled, "runs")
    await asyncio.sleep(0.05)
    await world.decode.stop()
    *events, last = await asking
    error = json.loads(last)["error"]
    assert error["type"] == "service_unavailable"
    assert "4 tokens were sent" in error["message"]
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events)


@ONE_DISPATCH
async def test_the_openai_client_raises_when_a_stream_breaks(world: World, client: openai.AsyncOpenAI) -> None:
    world.pair.stops_after = 4
    stream = await client.completions.create(model="bytes", prompt="x", stream=True)
    await world.until(lambda: world.scheduler.prefilled, "runs")
    await world.decode.stop()
    with pytest.raises(openai.APIError, match="is lost"):
        _ = [chunk async for chunk in stream]


@ONE_DISPATCH
async def test_an_error_of_a_whole_answer_is_a_status_with_a_hint(world: World, http: httpx.AsyncClient) -> None:
    world.pair.stops_after = 4
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
    await world.until(lambda: world.scheduler.prefilled, "runs")
    await world.decode.stop()
    response = await asking
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "service_unavailable"


async def test_an_unknown_model_path_or_method_has_the_nested_form(http: httpx.AsyncClient) -> None:
    unknown_model = await http.post("/v1/completions", json={"model": "gpt-x", "prompt": "x"})
    assert (unknown_model.status_code, unknown_model.json()["error"]["param"]) == (404, "model")
    unknown_path = await http.get("/v1/nothing")
    assert (unknown_path.status_code, unknown_path.json()["error"]["type"]) == (404, "not_found_error")
    wrong_method = await http.get("/v1/completions")
    assert (wrong_method.status_code, wrong_method.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_models_and_health(world: World, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    assert [model.id async for model in client.models.list()] == ["bytes"]
    assert (await http.get("/health")).json() == {"status": "ok"}
    await world.gateway.drain(0)
    assert (await http.get("/health")).status_code == 503
    refused = await http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_a_defect_in_a_stream_is_counted_and_ends_it_with_an_error_event(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token_bytes(token_id: int) -> bytes:
        raise RuntimeError(f"a defect at {token_id}")

    monkeypatch.setattr(world.tokenizer, "token_bytes", token_bytes)
    body = {"model": "bytes", "prompt": "x", "max_tokens": 5, "logprobs": 1, "stream": True}
    *_, error = await events_of_broken(http, body)
    assert json.loads(error)["error"]["message"] == "internal error: RuntimeError; see the gateway's log"
    assert world.metric("http_internal_errors_total") == 1
