"""`/v1/responses` with the official client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from tests.unit.gateway.failing import ONE_DISPATCH, lines_of_broken
from tests.unit.gateway.fake_workers import NUM_CACHED_TOKENS
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.configuration import AccessRules, TenantAccess
from weir.bus.messages import RefusalReason
from weir.core.credentials import key_digest
from weir_gateway.frontends import json_parts
from weir_gateway.frontends.event_stream import StreamSettings
from weir_gateway.frontends.responses import handlers

LIFE = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
)


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(world) as client:
        yield client


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def client_of(world: World, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key=key, max_retries=0)


def prompts(world: World) -> list[str]:
    return [bytes(start.prompt_token_ids).decode() for start in world.prefill.named("start")]


async def events_of(client: openai.AsyncOpenAI, **fields: object) -> list[ResponseStreamEvent]:
    stream = await client.responses.create(model="bytes", input="x", stream=True, **fields)
    return [event async for event in stream]


async def test_a_response_to_a_text(world: World, client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        model="bytes", input="Say hello", instructions="Be brief", max_output_tokens=5, temperature=0, store=False
    )
    assert (response.output_text, response.status) == ("hello", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    num_prompt = len("system: Be brief\nuser: Say hello\n")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (num_prompt, 5)
    assert response.usage.input_tokens_details.cached_tokens == NUM_CACHED_TOKENS
    assert (response.temperature, response.max_output_tokens, response.instructions) == (0, 5, "Be brief")
    assert prompts(world) == ["system: Be brief\nuser: Say hello\n"]


async def test_a_stream_has_every_event_once_and_the_response_that_is_not_streamed(
    world: World, client: openai.AsyncOpenAI
) -> None:
    events = await events_of(client)
    kinds = [event.type for event in events]
    assert tuple(dict.fromkeys(kinds)) == (*LIFE, "response.completed")
    assert all(kinds.count(kind) == 1 for kind in kinds if kind != "response.output_text.delta")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello world"
    last = events[-1]
    assert last.type == "response.completed"
    whole = await client.responses.create(model="bytes", input="x")
    varying = {"id", "created_at", "output"}
    assert last.response.model_dump(exclude=varying) == whole.model_dump(exclude=varying)
    assert last.response.output_text == whole.output_text == "hello world"


async def test_the_clients_own_reader_of_streams_understands_it(world: World, client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="bytes", input="x") as stream:
        kinds = [event.type async for event in stream]
        final: Response = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "hello world"


async def test_log_probabilities_come_with_deltas_and_with_the_whole(world: World, client: openai.AsyncOpenAI) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 2}
    events = await events_of(client, **fields)
    of_deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.token for entry in of_deltas] == ["h", "e"]
    assert [entry.to_dict() for entry in of_deltas] == [entry.to_dict() for entry in done.logprobs]
    assert all(len(entry.top_logprobs or []) == 1 for entry in of_deltas)


@pytest.mark.parametrize("num_top", [0, 20])
async def test_many_log_probabilities_are_rendered_as_few_are(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, num_top: int
) -> None:
    """In threads, and one by one."""
    body = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": num_top, "seed": 1}
    in_threads: list[object] = []

    async def to_thread(render: Callable[[], object]) -> object:
        in_threads.append(render)
        return render()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    found = []
    for max_inline in (10**6, 10 * (1 + num_top)):  # of an answer of eleven tokens
        monkeypatch.setattr(handlers, "MAX_INLINE_ENTRIES", max_inline)
        whole = (await http.post("/v1/responses", json=body)).json()
        events = (await http.post("/v1/responses", json={**body, "stream": True})).text
        found.append((whole["output"][0]["content"], events.count('"logprob"')))
        assert bool(in_threads) is (max_inline < 10**6)
    assert found[0] == found[1]
    assert len(found[0][0][0]["logprobs"]) == len("hello world")


async def test_a_request_goes_on_from_a_kept_response(world: World, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="bytes", input="one", instructions="i", max_output_tokens=5)
    last = (await events_of(client, previous_response_id=first.id))[-1]
    assert last.type == "response.completed"
    assert last.response.previous_response_id == first.id
    await client.responses.create(
        model="bytes", input=[{"role": "user", "content": "three"}], previous_response_id=last.response.id
    )
    assert prompts(world)[1:] == [
        "user: one\nassistant: hello\nuser: x\n",
        "user: one\nassistant: hello\nuser: x\nassistant: hello world\nuser: three\n",
    ]


async def test_a_kept_response_is_retrieved_as_it_was_and_deleted(world: World, client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="bytes", input="x", metadata={"team": "a"})
    assert (await client.responses.retrieve(made.id)).model_dump() == made.model_dump()
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(made.id)


async def test_a_kept_response_is_rendered_once(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []

    def dump_in_parts(value: object) -> str:
        rendered.append(json_parts.dump_in_parts(value))
        return rendered[-1]

    monkeypatch.setattr(handlers, "dump_in_parts", dump_in_parts)
    made = await http.post("/v1/responses", json={"input": "x"})
    assert rendered == [made.text]
    assert (await http.get(f"/v1/responses/{made.json()['id']}")).text == made.text
    assert made.json()["store"] is True


async def test_a_response_that_is_not_to_be_stored_is_not_kept(world: World, client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="bytes", input="x", store=False)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="bytes", input="y", previous_response_id=made.id)
    assert missing.value.param == "previous_response_id"
    assert made.to_dict()["store"] is False


async def test_another_tenants_response_is_not_found() -> None:
    tenants = tuple(TenantAccess(name, key_digests=(key_digest(f"sk-weir-{name}"),)) for name in ("a", "b"))
    rules = AccessRules(epoch=9, lanes=("standard",), default_lane="standard", default_tenant="a", tenants=tenants)
    async with open_world(rules=rules) as world, client_of(world, "sk-weir-a") as a, client_of(world, "sk-weir-b") as b:
        made = await a.responses.create(model="bytes", input="x")
        for asking in (
            b.responses.retrieve(made.id),
            b.responses.delete(made.id),
            b.responses.create(model="bytes", input="y", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await asking
        assert (await a.responses.retrieve(made.id)).id == made.id


async def test_without_a_store_going_on_is_refused_by_name_and_all_else_is_served() -> None:
    async with open_world(replace(FAST, keeps_responses=False)) as world, client_of(world) as client:
        made = await client.responses.create(model="bytes", input="x")
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="bytes", input="y", previous_response_id=made.id)
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_an_answer_that_cannot_be_kept_is_given_and_says_so(world: World, client: openai.AsyncOpenAI) -> None:
    world.pair.stops_after = 4
    asking = asyncio.create_task(client.responses.create(model="bytes", input="x", max_output_tokens=11))
    await world.until(lambda: world.scheduler.prefilled, "runs")
    world.hub.stop()
    world.pair.stops_after = None
    world.decode.break_streams()
    response = await asking
    assert (response.output_text, response.to_dict()["store"]) == ("hello world", False)
    world.hub.start()


async def test_wrong_fields_are_named_as_this_api_has_them(world: World, client: openai.AsyncOpenAI) -> None:
    for fields, param in (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"input": "x" * 600}, "input"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**({"model": "bytes", "input": "x"} | fields))
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="none", input="x")


async def test_events_of_responses_are_not_gone_on_with(world: World, http: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k", "Last-Event-ID": "3"}
    body = {"input": "x", "stream": True}
    refused = await http.post("/v1/responses", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert (await http.get("/v1/responses/x?stream=true")).json()["error"]["param"] == "stream"


async def test_a_request_with_a_key_is_computed_once(world: World, http: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = [await http.post("/v1/responses", json={"input": "x"}, headers=headers) for _ in range(2)]
    texts = [answer.json()["output"][0]["content"][0]["text"] for answer in answers]
    assert texts == ["hello world"] * 2
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(world.scheduler.submits) == 1


@ONE_DISPATCH
async def test_a_stream_that_fails_raises_in_the_client_and_has_no_success(
    world: World, http: httpx.AsyncClient
) -> None:
    world.pair.stops_after = 4
    async with client_of(world) as client:
        stream = await client.responses.create(model="bytes", input="x", stream=True)
        raw = asyncio.create_task(lines_of_broken(http, "/v1/responses", {"input": "x", "stream": True}))
        await world.until(lambda: len(world.scheduler.prefilled) == 2, "both run")
        await world.decode.stop()
        with pytest.raises(openai.APIError, match="is lost"):
            _ = [event async for event in stream]
    names = [line.removeprefix("event: ") for line in await raw if line.startswith("event: ")]
    assert names[-2:] == ["error", "response.failed"]
    assert not {"response.completed", "response.incomplete", "response.output_text.done"} & set(names)


async def test_a_client_that_leaves_cancels_its_response(world: World, http: httpx.AsyncClient) -> None:
    world.pair.stops_after = 4
    async with http.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                break
    await world.until(lambda: world.metric("cancelled_total") == 1, "it is cancelled")


async def test_a_defect_in_a_stream_is_counted_and_ends_it_as_a_failure(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token_bytes(token_id: int) -> bytes:
        raise RuntimeError(f"a defect at {token_id}")

    monkeypatch.setattr(world.tokenizer, "token_bytes", token_bytes)
    body = {"input": "x", "stream": True, "include": ["message.output_text.logprobs"]}
    lines = await lines_of_broken(http, "/v1/responses", body)
    assert lines[-2] == "event: response.failed"
    assert "internal error: RuntimeError; see the gateway's log" in lines[-1]
    assert world.metric("http_internal_errors_total") == 1


async def test_a_stream_that_waits_is_kept_alive_and_one_that_breaks_off_may_end_without_done() -> None:
    streams = StreamSettings(keep_alive_s=0.05, after_error="done")
    async with (
        open_world(replace(FAST, http=replace(FAST.http, streams=streams))) as world,
        world.http_client() as http,
    ):
        world.scheduler.grants_at_once = False
        body = {"input": "x", "stream": True, "of_next_year": 1}
        async with http.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            await world.scheduler.revoke(world.scheduler.submits[-1], RefusalReason.QUEUE_FULL, dispatch=1)
            rest = [line async for line in lines]
    assert answer.headers["x-weir-ignored-fields"] == "of_next_year"
    assert [line for line in rest if line.startswith("event: ")][-2:] == ["event: error", "event: response.failed"]
    assert "data: [DONE]" not in rest
