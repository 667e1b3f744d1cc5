"""Requests with an idempotency key at whole gateways: sent again they go on where they were, whoever serves them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import httpx
import pytest
from opentelemetry.trace import NoOpTracerProvider
from tests.unit.gateway.fake_model import byte_model, ids_of
from tests.unit.gateway.fake_workers import GOING_ON, STOP, update
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.codec import decode, encode
from weir.bus.keys import KeyRecord, KeyStatus, key_name, seed_of_key
from weir.bus.protocol import KvBucket
from weir.bus.subjects import Subjects
from weir.core.life import FinishReason
from weir.rpc.body_budget import BodyBudget
from weir.rpc.errors import from_rpc_error
from weir.wire.v1 import inference_pb2, types_pb2
from weir_gateway.gateway import Gateway, GatewayProcess
from weir_gateway.keys.keyed_requests import KeySettings
from weir_gateway.output_lengths import OutputLengths

KEY = "order-66"
ANSWER = "héllo wörld"


BRIEFLY_KEPT = pytest.mark.parametrize("resume_s", [0.3])


@pytest.fixture
def resume_s() -> float:
    """Long enough for any client to come back."""
    return 60.0


@pytest.fixture
async def world(resume_s: float) -> AsyncIterator[World]:
    async with open_world(replace(FAST, keys=KeySettings(resume_s=resume_s))) as world:
        world.pair.answer = ids_of(ANSWER)
        yield world


def generate(key: str = KEY, *, resume_from: int | None = None, **fields: object) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text="Say hello")
    request.options.idempotency_key = key
    request.options.stop_conditions.max_tokens = 40
    if resume_from is not None:
        request.options.resume_from = resume_from
    for name, value in fields.items():
        setattr(request.options.sampling, name, value)
    return request


@dataclass
class Answer:
    token_ids: list[int]
    text: str
    first_index: int
    finish_reason: int


async def answer_to(world: World, request: inference_pb2.GenerateRequest) -> Answer:
    responses = [response async for response in world.stub.Generate(request, timeout=60)]
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    text = "".join(response.text for response in responses)
    return Answer(token_ids, text, responses[0].first_index, responses[-1].finish_reason)


async def code_of(world: World, request: inference_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_to(world, request)
    return caught.value.code(), caught.value.details() or ""


async def end_of(
    call: "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]",
) -> grpc.StatusCode:
    """Reads on to its end."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def send_rest(world: World) -> None:
    """Of the one request, whose workers stopped after 4 tokens."""
    (start,) = world.prefill.named("start")
    for index, token_id in enumerate(world.pair.answer[4:], start=4):
        is_last = index == len(world.pair.answer) - 1
        world.decode.send(update(start.request_id, index, [token_id], finish=STOP if is_last else GOING_ON))


async def bucket_of(world: World) -> KvBucket:
    return await world.hub.connect().bucket(Subjects("test").keys_bucket)


async def until_recorded(world: World, status: KeyStatus) -> KeyRecord:
    async with asyncio.timeout(20):
        async for entry in (await bucket_of(world)).watch():
            record = decode(KeyRecord, entry.value or b"")
            if record.status is status:
                return record
    raise AssertionError("the watch ended")


@asynccontextmanager
async def another_gateway(world: World) -> AsyncIterator[str]:
    """On the same bus, with the same workers. Yields the address of its HTTP port."""
    bodies = BodyBudget(1 << 24)
    tracer = NoOpTracerProvider().get_tracer("test")
    process = GatewayProcess("gateway-1-11111111", tracer, bodies, lambda _: None)
    gateway = Gateway(process, FAST, world.hub.connect(), [byte_model(world.tokenizer)], OutputLengths())
    await gateway.start()
    try:
        yield f"http://127.0.0.1:{gateway.http_port}"
    finally:
        await gateway.stop()


async def test_a_whole_answer_is_recorded_with_its_outcome_and_without_its_text(world: World) -> None:
    answer = await answer_to(world, generate())
    assert (answer.token_ids, answer.text) == (ids_of(ANSWER), ANSWER)
    record = await until_recorded(world, KeyStatus.FINISHED)
    assert (record.num_output_tokens, record.finish_reason) == (len(ids_of(ANSWER)), FinishReason.STOP)
    assert int.from_bytes(record.seed, "big") == seed_of_key("default", KEY)
    assert world.prefill.named("start")[0].sampling.seed == seed_of_key("default", KEY)


@pytest.mark.parametrize("resume_from", range(len(ids_of(ANSWER)) + 1))
async def test_from_any_token_on_what_follows_is_the_rest_of_the_text(world: World, resume_from: int) -> None:
    """Also amid a character, whose text comes with its last byte."""
    whole = ids_of(ANSWER)
    await answer_to(world, generate(logprobs=1))
    answer = await answer_to(world, generate(resume_from=resume_from, logprobs=1))
    assert (answer.token_ids, answer.first_index) == (whole[resume_from:], resume_from)
    had = bytes(whole[:resume_from]).decode(errors="ignore")
    assert had + answer.text == ANSWER
    assert answer.finish_reason == types_pb2.FINISH_REASON_STOP
    assert len(world.prefill.named("start")) == 1, "it was kept"


async def test_a_client_that_comes_back_soon_finds_its_request_running(world: World) -> None:
    world.pair.stops_after = 4
    call = world.stub.Generate(generate(), timeout=10)
    num_had = 0
    async for response in call:
        num_had += len(response.token_ids)
        if num_had == 4:
            break
    call.cancel()
    await world.until(lambda: world.metric("keys_kept") == 1, "its client is missed")
    assert world.prefill.named("cancel") == []

    coming = asyncio.create_task(answer_to(world, generate(resume_from=4)))
    await world.until(lambda: world.metric("keys_attached_total") == 1, "it is back")
    assert world.metric("keys_kept") == 0
    send_rest(world)
    answer = await coming
    assert (answer.token_ids, answer.first_index) == (ids_of(ANSWER)[4:], 4)
    assert len(world.prefill.named("start")) == 1


@BRIEFLY_KEPT
async def test_a_client_that_does_not_come_back_loses_its_request_after_a_while(world: World) -> None:
    world.pair.stops_after = 4
    call = world.stub.Generate(generate(), timeout=10)
    await call.read()
    call.cancel()
    await world.until(lambda: world.prefill.named("cancel"), "it is cancelled")
    await world.until_idle()
    await until_recorded(world, KeyStatus.ENDED)
    assert world.metric("keys_expired_total") == 1
    world.pair.stops_after = None
    assert (await answer_to(world, generate())).text == ANSWER, "it is computed again"


async def test_over_the_bound_the_one_that_waited_longest_is_let_go() -> None:
    settings = replace(FAST, keys=KeySettings(resume_s=60.0, max_kept=1))
    async with open_world(settings) as world:
        for key in ("a", "b"):
            await answer_to(world, generate(key))
        assert world.metric("keys_kept") == 1
        await answer_to(world, generate("b"))
        assert len(world.prefill.named("start")) == 2
        await answer_to(world, generate("a"))
        assert len(world.prefill.named("start")) == 3, "the first one was not kept"


async def test_another_body_under_the_key_is_refused_and_the_same_one_by_the_other_api_is_not(world: World) -> None:
    await answer_to(world, generate(temperature=0.9))
    code, details = await code_of(world, generate(temperature=0.8))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert details.startswith("options.idempotency_key: another request was sent under this key")
    body = {"prompt": "Say hello", "max_tokens": 40, "temperature": 0.9}
    async with world.http_client(headers={"Idempotency-Key": KEY}) as http:
        same = await http.post("/v1/completions", json=body)
        other = await http.post("/v1/completions", json={**body, "prompt": "Say goodbye"})
    assert (same.status_code, same.json()["choices"][0]["text"]) == (200, ANSWER)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "already_exists")


async def test_the_client_reads_another_body_as_already_exists(world: World) -> None:
    await answer_to(world, generate())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_to(world, generate(seed=1))
    assert type(from_rpc_error(caught.value)).__name__ == "AlreadyExists"


async def test_beyond_the_end_is_an_error_that_names_the_number_of_tokens(world: World) -> None:
    num_tokens = len(ids_of(ANSWER))
    await answer_to(world, generate())
    code, details = await code_of(world, generate(resume_from=num_tokens + 1))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == f"options.resume_from: is {num_tokens + 1}; the answer has {num_tokens} tokens"
    code, details = await code_of(world, generate("another", resume_from=41))
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.resume_from: is 41; the answer has at most 40 tokens",
    )


async def test_a_second_connection_is_told_to_try_again_unless_it_says_where_it_goes_on(world: World) -> None:
    world.pair.stops_after = 4
    first = world.stub.Generate(generate(), timeout=10)
    await first.read()
    code, details = await code_of(world, generate())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "another connection is getting the answer" in details
    second = world.stub.Generate(generate(resume_from=2), timeout=10)
    response = await second.read()
    assert isinstance(response, inference_pb2.GenerateResponse)
    assert (response.first_index, list(response.token_ids)) == (2, ids_of(ANSWER)[2:4])
    assert await end_of(first) is grpc.StatusCode.UNAVAILABLE
    send_rest(world)
    assert await end_of(second) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("headers", "body", "problem"),
    [
        ({"Last-Event-ID": "3"}, {"stream": True}, "Last-Event-ID: needs Idempotency-Key"),
        ({"Idempotency-Key": KEY, "Last-Event-ID": "3"}, {}, "Last-Event-ID: is for streams"),
        ({"Idempotency-Key": KEY, "Last-Event-ID": "x"}, {"stream": True}, "Last-Event-ID: is 'x'"),
        ({"Idempotency-Key": KEY}, {"n": 2}, "n: is 2; with Idempotency-Key there is one answer"),
        ({"Idempotency-Key": ""}, {}, "Idempotency-Key: is empty"),
        ({"Idempotency-Key": "k" * 256}, {}, "Idempotency-Key: has 256 characters"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused_by_name(
    world: World, headers: dict[str, str], body: dict[str, object], problem: str
) -> None:
    async with world.http_client(headers=headers) as http:
        answer = await http.post("/v1/completions", json={"prompt": "Say hello", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(problem)


async def events_of(url: str, headers: dict[str, str], body: dict[str, object]) -> list[tuple[str, str]]:
    """(id, data) of each event."""
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in answer.text.strip().split("\n\n")]
    return [(event.get("id", ""), event["data"]) for event in events]


CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}


async def test_events_have_ids_with_a_key_and_go_on_after_the_last_one(world: World) -> None:
    plain = await events_of(world.http_url, {}, CHAT)
    assert {event_id for event_id, _ in plain} == {""}
    whole = await events_of(world.http_url, {"Idempotency-Key": KEY}, CHAT)
    (end_id,) = [event_id for event_id, _ in whole if event_id.endswith("-end")]
    assert end_id == f"{len(ids_of(ANSWER))}-end"

    later = await events_of(world.http_url, {"Idempotency-Key": KEY, "Last-Event-ID": "3"}, CHAT)
    assert "".join(data for _, data in later).count("assistant") == 0, "the client has the opening"
    assert '"content":"llo wörld"' in later[0][1]
    body = {**CHAT, "stream_options": {"include_usage": True}}
    rest = await events_of(world.http_url, {"Idempotency-Key": KEY, "Last-Event-ID": end_id}, body)
    assert ['"usage":{' in data or data for _, data in rest] == [True, "[DONE]"]


async def test_while_the_bus_is_away_a_keyed_request_is_refused_at_once(world: World) -> None:
    world.hub.stop()
    code, details = await code_of(world, generate())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "idempotency keys cannot be looked up now" in details
    world.hub.start()
    assert (await answer_to(world, generate())).text == ANSWER


@BRIEFLY_KEPT
async def test_a_request_of_a_dead_gateway_goes_on_under_its_id_and_a_higher_dispatch(world: World) -> None:
    await answer_to(world, generate())
    record = await until_recorded(world, KeyStatus.FINISHED)
    await world.until(lambda: world.metric("keys_held") == 0, "it is kept no longer")
    dead = replace(record, status=KeyStatus.RUNNING, gateway_id="gateway-9-99999999", num_output_tokens=0)
    await (await bucket_of(world)).put(key_name("default", KEY), encode(dead))

    answer = await answer_to(world, generate(resume_from=3))

    assert (answer.token_ids, answer.text) == (ids_of(ANSWER)[3:], ANSWER[2:])
    first, second = world.prefill.named("start")
    assert (second.request_id, second.attempt.dispatch) == (first.request_id, 1001)
    assert second.sampling.seed == first.sampling.seed
    assert world.metric("keys_taken_over_total") == 1


async def test_a_living_gateway_keeps_its_request_until_the_client_says_that_it_goes_on_elsewhere(world: World) -> None:
    world.pair.stops_after = 4
    call = world.stub.Generate(generate(), timeout=10)
    await call.read()
    body = {"prompt": "Say hello", "max_tokens": 40, "stream": True}
    async with another_gateway(world) as url, httpx.AsyncClient(base_url=url) as http:
        headers = {"Idempotency-Key": KEY}
        refused = await http.post("/v1/completions", json=body, headers=headers)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        world.pair.stops_after = None
        served = await http.post("/v1/completions", json=body, headers={**headers, "Last-Event-ID": "3"})
        assert served.status_code == 200
        chunks = [json.loads(line[6:]) for line in served.text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "llo wörld"
        assert await end_of(call) is grpc.StatusCode.UNAVAILABLE
        assert len({start.request_id for start in world.prefill.named("start")}) == 2
        record = await until_recorded(world, KeyStatus.FINISHED)
        assert record.gateway_id == "gateway-1-11111111"


async def test_what_was_refused_or_failed_is_tried_again_when_it_is_sent_again(world: World) -> None:
    world.scheduler.is_silent = True
    code, _ = await code_of(world, generate())
    assert code is grpc.StatusCode.UNAVAILABLE
    world.scheduler.is_silent = False
    await until_recorded(world, KeyStatus.ENDED)
    assert (await answer_to(world, generate())).text == ANSWER
