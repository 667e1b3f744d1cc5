"""What clients can make a gateway hold beside running requests is bounded, and comes free again."""

import asyncio
import gc
import traceback
import tracemalloc
from dataclasses import replace
from typing import Any

import grpc.aio
import httpx
import pytest
from google.protobuf.message import Message
from tests.unit.gateway.fake_scheduler import OPEN_RULES
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.configuration import TenantAccess
from weir.client import AsyncWeirClient
from weir.core.credentials import key_digest
from weir.core.errors import InvalidRequest, Overloaded, Unauthenticated
from weir.rpc.errors import from_rpc_error
from weir.rpc.port_guard import PortLimits
from weir.testing.load import greedy_request, stream
from weir.wire.v1 import inference_pb2, types_pb2
from weir_gateway.config import GatewayConfig
from weir_gateway.frontends.grpc_frontend import InferenceServicer

CLOSED = replace(OPEN_RULES, tenants=(TenantAccess("a", (key_digest("key-of-a-0123456789"),)),))
SMALL = PortLimits(max_message_bytes=1000, max_calls=8)


async def test_bodies_that_come_at_the_same_time_are_bounded_together() -> None:
    async with (
        open_world(max_bodies_bytes=1000, port_limits=SMALL) as world,
        world.http_client() as http,
    ):
        address = httpx.URL(world.http_url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + b" " * 800)
        body = {"prompt": "x" * 300, "max_tokens": 1}

        async def post(wanted: int) -> httpx.Response:
            for _ in range(500):
                response = await http.post("/v1/completions", json=body)
                if response.status_code == wanted:
                    return response
                await asyncio.sleep(0.02)
            pytest.fail(f"never {wanted}")

        refused = await post(429)
        assert "of the 1000 bytes for bodies that are read at once are taken" in refused.json()["error"]["message"]
        assert refused.headers["Retry-After"] == "1"
        writer.close()
        await post(200)


async def test_a_text_that_is_only_tokenized_takes_no_room_of_requests(world: World) -> None:
    world.pair.stops_after = 0
    requests = [
        asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=8)))
        for _ in range(FAST.driver.max_requests)
    ]
    await world.until(lambda: world.metric("requests_in_flight") == FAST.driver.max_requests, "full")
    async with AsyncWeirClient(world.grpc_address) as client:
        assert await client.tokenize("abc") == [97, 98, 99]
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def send(world: World, method: str, message: bytes) -> None:
    """Raises the WeirError that the gateway answers with."""
    options = [("grpc.max_send_message_length", 1 << 28)]
    async with grpc.aio.insecure_channel(world.grpc_address, options=options) as channel:
        stub: Any = channel.unary_stream(f"/weir.v1.Inference/{method}")
        try:
            async for _ in stub(message, timeout=30):
                pass
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


@pytest.mark.parametrize("method", ["Generate", "Chat", "Cancel", "Tokenize", "ListModels"])
async def test_nothing_is_read_of_what_somebody_sends_who_is_not_known(method: str) -> None:
    async with open_world(rules=CLOSED) as world:
        for message in (b"", b"no message at all", b"\x12\x00" * 30_000_000):
            with pytest.raises(Unauthenticated, match="an API key is needed"):
                await send(world, method, message)


NUM = 200_000
MANY = {
    "messages": inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage()] * NUM),
    "stop": inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage()],
        options=inference_pb2.RequestOptions(stop_conditions=inference_pb2.StopConditions(stop=[""] * NUM)),
    ),
    "stop_token_ids": inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage()],
        options=inference_pb2.RequestOptions(
            stop_conditions=inference_pb2.StopConditions(stop_token_ids=range(70_000, 70_000 + NUM))
        ),
    ),
    "logit_bias": inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage()],
        options=inference_pb2.RequestOptions(
            sampling=types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(NUM), 1.0))
        ),
    ),
    "token_ids": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=range(70_000, 70_000 + NUM))),
}


@pytest.mark.parametrize("field", MANY)
async def test_entries_are_counted_before_anything_is_made_of_them(world: World, field: str) -> None:
    message = MANY[field]
    method = "Generate" if isinstance(message, inference_pb2.GenerateRequest) else "Chat"
    data = message.SerializeToString()
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=rf"{field}: (has|is) 200000 ") as refused:
            await send(world, method, data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [violation.field.rpartition(".")[2] for violation in refused.value.violations] == [field]
    # The bytes themselves, here and there; an object an entry would be several times that.
    assert peak_bytes < 3 * len(data) + 2_000_000


@pytest.mark.parametrize("field", ["messages", "token_ids"])
async def test_what_is_refused_for_its_size_is_not_kept_while_the_refusal_is_sent(world: World, field: str) -> None:
    servicer = InferenceServicer(lambda: world.gateway.processor)
    method: Any = servicer.Generate if field == "token_ids" else servicer.Chat
    with pytest.raises(InvalidRequest) as refused:
        await method(MANY[field], None)
    frames = [frame for frame, _ in traceback.walk_tb(refused.tb)]
    assert any(frame.f_code.co_name in ("Generate", "Chat") for frame in frames)
    inner = [value for frame in frames[1:] for value in frame.f_locals.values()]
    assert not any(isinstance(value, Message) for value in inner)


async def test_grpc_and_http_share_the_room_for_what_is_being_read() -> None:
    async with open_world(max_bodies_bytes=1000, port_limits=SMALL) as world:
        address = httpx.URL(world.http_url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + b" " * 800)
        await world.until(lambda: world.bodies.num_bytes == 800, "a part was read")
        async with AsyncWeirClient(world.grpc_address) as client:
            with pytest.raises(
                Overloaded, match="of the 1000 bytes for bodies that are read at once are taken"
            ) as refused:
                await client.tokenize("abc")
            assert refused.value.retry_after_s == 1.0
            writer.close()
            await world.until(lambda: world.bodies.num_bytes == 0, "given up")
            assert await client.tokenize("abc") == [97, 98, 99]


def test_a_message_may_be_larger_than_the_longest_prompt_unless_the_setting_differs() -> None:
    assert GatewayConfig().message_bytes == 4 << 20
    assert GatewayConfig(max_prompt_bytes=16 << 20).message_bytes == 34 << 20
    assert GatewayConfig(max_prompt_bytes=1 << 30).message_bytes == 64 << 20
    assert GatewayConfig(max_message_bytes=1 << 20).message_bytes == 1 << 20


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"max_message_bytes": 1000}, r"max_message_bytes 1000: must be 0, or in \[65536, 67108864\]"),
        ({"max_bodies_bytes": 4 << 19}, "max_bodies_bytes 2097152: must be at least the 4194304 of one gRPC message"),
    ],
)
def test_bounds_of_messages_that_cannot_work_are_named(setting: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GatewayConfig(**setting)  # type: ignore[arg-type]
