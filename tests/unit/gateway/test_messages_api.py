"""`/v1/messages` with Anthropic's client."""

import asyncio
from collections.abc import AsyncIterator

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam
from tests.unit.gateway.failing import ONE_DISPATCH, lines_of_broken
from tests.unit.gateway.fake_workers import NUM_CACHED_TOKENS
from tests.unit.gateway.world import World, open_world

from weir.bus.configuration import AccessRules, TenantAccess
from weir.bus.messages import RefusalReason, SubmitReply
from weir.core.credentials import key_digest

MESSAGES: list[MessageParam] = [{"role": "user", "content": "x"}]


@pytest.fixture
async def client(world: World) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=world.http_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


async def test_a_message_with_a_system(world: World, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(
        model="bytes", max_tokens=5, system="Be brief", messages=MESSAGES, extra_body={"temperature": 0, "top_k": 3}
    )
    [block] = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.stop_sequence) == ("hello", "max_tokens", None)
    num_prompt = len("system: Be brief\nuser: x\n")
    assert message.usage.cache_read_input_tokens == NUM_CACHED_TOKENS
    assert message.usage.input_tokens == num_prompt - NUM_CACHED_TOKENS
    assert message.usage.output_tokens == 5
    [start] = world.prefill.named("start")
    assert bytes(start.prompt_token_ids).decode() == "system: Be brief\nuser: x\n"
    assert start.sampling.top_k == 3


async def test_the_request_has_an_id_that_the_client_finds(world: World, client: anthropic.AsyncAnthropic) -> None:
    headers = {"X-Request-Id": "mine/1"}
    message = await client.messages.create(model="bytes", max_tokens=5, messages=MESSAGES, extra_headers=headers)
    assert message._request_id == "mine/1"


@pytest.mark.parametrize(
    ("max_tokens", "stops", "text", "reason", "matched"),
    [
        (50, [], "hello world", "end_turn", None),
        (5, [], "hello", "max_tokens", None),
        (50, ["zzz", "wor"], "hello ", "stop_sequence", "wor"),
    ],
)
async def test_a_stream_is_the_message_that_is_not_streamed(
    world: World,
    client: anthropic.AsyncAnthropic,
    max_tokens: int,
    stops: list[str],
    text: str,
    reason: str,
    matched: str | None,
) -> None:
    async with client.messages.stream(
        model="bytes", max_tokens=max_tokens, messages=MESSAGES, stop_sequences=stops
    ) as stream:
        pieces = [piece async for piece in stream.text_stream]
        streamed = await stream.get_final_message()
    whole = await client.messages.create(model="bytes", max_tokens=max_tokens, messages=MESSAGES, stop_sequences=stops)
    assert "".join(pieces) == text
    for message in (streamed, whole):
        [block] = message.content
        assert block.type == "text"
        assert (block.text, message.stop_reason, message.stop_sequence) == (text, reason, matched)
    assert streamed.usage.model_dump() == whole.usage.model_dump()


async def test_tokens_are_counted_as_a_message_counts_them(world: World, client: anthropic.AsyncAnthropic) -> None:
    count = await client.messages.count_tokens(model="bytes", messages=MESSAGES, system="s")
    message = await client.messages.create(model="bytes", max_tokens=1, messages=MESSAGES, system="s")
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


async def test_wrong_fields_are_named_in_anthropics_form(world: World, http: httpx.AsyncClient) -> None:
    body = {"max_tokens": 5, "messages": MESSAGES}
    for fields, name in (
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "f g"}]}, "tools[0].name"),
    ):
        refused = await http.post("/v1/messages", json={**body, **fields}, headers={"X-Request-Id": "a"})
        assert refused.status_code == 400
        error = refused.json()
        assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "invalid_request_error", "a")
        assert error["error"]["message"].startswith(f"{name}: ")
        assert refused.headers["request-id"] == "a"


async def test_each_refusal_is_the_clients_own_error(world: World, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="none", max_tokens=5, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="messages: is 607 tokens"):
        await client.messages.create(model="bytes", max_tokens=5, messages=[{"role": "user", "content": "x" * 600}])
    for reason, status, kind in (
        (RefusalReason.QUEUE_FULL, 529, "overloaded_error"),
        (RefusalReason.QUOTA, 429, "rate_limit_error"),
    ):
        world.scheduler.refusal = SubmitReply(5, queued=False, reason=reason, message="full", retry_after_ms=1500)
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(model="bytes", max_tokens=5, messages=MESSAGES)
        assert (refused.value.status_code, refused.value.type) == (status, kind)
        assert refused.value.response.headers["retry-after"] == "2"


async def test_who_shows_no_known_key_is_told_so_in_anthropics_form() -> None:
    tenants = (TenantAccess("a", key_digests=(key_digest("sk-weir-a"),)),)
    rules = AccessRules(epoch=9, lanes=("standard",), default_lane="standard", default_tenant="a", tenants=tenants)
    async with open_world(rules=rules) as world:
        for key, kind in (("sk-weir-a", None), ("sk-weir-b", "authentication_error")):
            found = None
            async with anthropic.AsyncAnthropic(base_url=world.http_url, api_key=key, max_retries=0) as client:
                try:
                    await client.messages.create(model="bytes", max_tokens=1, messages=MESSAGES)
                except anthropic.AuthenticationError as error:
                    found = error.type
            assert found == kind


async def test_a_wrong_path_or_method_is_in_anthropics_form_too(world: World, http: httpx.AsyncClient) -> None:
    wrong = await http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    assert wrong.headers["allow"] == "POST"
    missing = await http.post("/v1/messages/batches")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    plain = await http.post("/v1/messagesx")
    assert plain.json()["error"]["type"] == "not_found_error"
    assert "type" not in plain.json()


@ONE_DISPATCH
async def test_a_stream_that_fails_raises_in_the_client_and_has_no_success(
    world: World, client: anthropic.AsyncAnthropic, http: httpx.AsyncClient
) -> None:
    world.pair.stops_after = 4
    body = {"model": "bytes", "max_tokens": 50, "messages": MESSAGES, "stream": True}
    stream = await client.messages.create(model="bytes", max_tokens=50, messages=MESSAGES, stream=True)
    raw = asyncio.create_task(lines_of_broken(http, "/v1/messages", body))
    await world.until(lambda: len(world.scheduler.prefilled) == 2, "both run")
    await world.decode.stop()
    with pytest.raises(anthropic.APIError, match="is lost"):
        _ = [event async for event in stream]
    names = [line.removeprefix("event: ") for line in await raw if line.startswith("event: ")]
    assert names[-1] == "error"
    assert not {"content_block_stop", "message_delta", "message_stop"} & set(names)
