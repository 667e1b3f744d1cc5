"""What clients try at a gateway's ports: memory before they are known, more than their part, what operators may."""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from tests.attacks.attempt import Attempt, Scene, Trying

from weir.client import AsyncWeirClient, GenerateOptions
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2

_MEBIBYTE = 1 << 20
_TIMEOUT_S = 60.0
_MAX_GROWTH_BYTES = 48 * _MEBIBYTE
_MEMORY = "1 memory before anybody is known"
_NETWORK = "3 anybody inside the network"
_TENANTS = "4 one tenant against all"
_LOW = "6 low"
_GENERATE, _CHAT = "/weir.v1.Inference/Generate", "/weir.v1.Inference/Chat"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PING = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0, *range(8)))


def _method(channel: grpc.aio.Channel, name: str) -> Any:
    """For messages as bytes."""
    return channel.unary_stream(name)


def _gateway_bytes(scene: Scene) -> int:
    """That the gateway has in memory."""
    [gateway] = scene.stack.processes("gateway")
    pages = int(Path(f"/proc/{gateway.pid}/statm").read_text().split()[1])
    return pages * 4096


async def _status(scene: Scene, method: str, message: bytes, *metadata: tuple[str, str]) -> str:
    """The status of one call with these bytes as its message."""
    async with grpc.aio.insecure_channel(
        scene.stack.grpc_address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        call = _method(channel, method)(message, metadata=metadata, timeout=_TIMEOUT_S)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def _without_growth(scene: Scene, trying: Awaitable[str]) -> str:
    """What it came to, and whether the gateway grew by more than a message may have."""
    before = _gateway_bytes(scene)
    outcome = await trying
    grown = _gateway_bytes(scene) - before
    return outcome if grown < _MAX_GROWTH_BYTES else f"{outcome}, and the gateway grew by {grown // _MEBIBYTE} MiB"


async def _large_message_without_key(scene: Scene) -> str:
    return await _without_growth(scene, _status(scene, _GENERATE, bytes(60 * _MEBIBYTE)))


async def _many_empty_messages(scene: Scene) -> str:
    """Two bytes each: an object of 100 for every one."""
    empty_turns = b"\x12\x00" * (30 * _MEBIBYTE)
    return await _without_growth(scene, _status(scene, _CHAT, empty_turns, ("x-api-key", scene.attacker_key)))


async def _many_calls_without_key(scene: Scene) -> str:
    """Of one connection, which may have fewer open: a client that is quick gets UNAVAILABLE for some."""

    async def all_at_once() -> str:
        async with grpc.aio.insecure_channel(scene.stack.grpc_address) as channel:

            async def call() -> str:
                try:
                    async for _ in _method(channel, _GENERATE)(bytes(100_000), timeout=_TIMEOUT_S):
                        pass
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return "OK"

            outcomes = Counter(await asyncio.gather(*(call() for _ in range(500))))
        if outcomes["UNAUTHENTICATED"]:
            del outcomes["UNAVAILABLE"]
        return _summary(outcomes)

    return await _without_growth(scene, all_at_once())


async def _large_headers(scene: Scene) -> str:
    return await _status(scene, _GENERATE, b"", ("x-large", "x" * 65_536))


async def _only_pings(scene: Scene) -> str:
    def ping() -> str:
        received = b""
        host, _, port = scene.stack.grpc_address.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(_PREFACE + _PING * 20)
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(65_536):
                    received += part
        return "too_many_pings" if b"too_many_pings" in received else "served"

    return await asyncio.to_thread(ping)


def _raw_http(head: str, body: bytes = b"") -> Trying:
    """The status of a request of which no more than this is ever sent."""

    async def send(scene: Scene) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.stack.http_port)
        try:
            writer.write(head.format(key=scene.attacker_key).encode() + b"\r\n\r\n" + body)
            async with asyncio.timeout(_TIMEOUT_S):
                return (await reader.readline()).decode()[9:12] or "closed"
        finally:
            writer.close()

    return send


def _post(path: str, body: bytes | dict[str, Any], headers: Mapping[str, str] | None = None) -> Trying:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def post(scene: Scene) -> str:
        shown = {"Content-Type": "application/json", "X-API-Key": scene.attacker_key, **(headers or {})}
        async with httpx.AsyncClient(base_url=scene.stack.http_url, timeout=_TIMEOUT_S) as http:
            try:
                answer = await http.post(path, content=raw, headers=shown)
            except httpx.WriteError:
                return "closed"
        return str(answer.status_code)

    return post


def _get(path: str, *, with_key: bool = False) -> Trying:
    async def get(scene: Scene) -> str:
        headers = {"X-API-Key": scene.attacker_key} if with_key else {}
        async with httpx.AsyncClient(base_url=scene.stack.http_url, timeout=_TIMEOUT_S) as http:
            return str((await http.get(path, headers=headers)).status_code)

    return get


def _describe(*, with_key: bool) -> Trying:
    async def describe(scene: Scene) -> str:
        metadata = (("x-api-key", scene.attacker_key),) if with_key else ()
        async with grpc.aio.insecure_channel(scene.stack.grpc_address) as channel:
            stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
            try:
                await stub.Describe(admin_pb2.DescribeRequest(), timeout=_TIMEOUT_S, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return error.code().name
        return "OK"

    return describe


async def _more_than_its_share(scene: Scene) -> str:
    """Answers that are asked for and never read, until nothing more is let in; then the other tenant asks."""
    async with grpc.aio.insecure_channel(scene.stack.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(
            text="Once",
            options=inference_pb2.RequestOptions(
                stop_conditions=inference_pb2.StopConditions(max_tokens=400, ignore_eos=True)
            ),
        ).SerializeToString()
        calls = [_method(channel, _GENERATE)(request, metadata=(("x-api-key", scene.attacker_key),)) for _ in range(48)]
        try:
            await asyncio.sleep(2)
            refused = Counter([(await call.code()).name for call in calls if call.done()])
            async with AsyncWeirClient(scene.stack.grpc_address, api_key=scene.other_key) as client:
                async for _ in client.generate("Hello", GenerateOptions(max_tokens=4)):
                    pass
        finally:
            for call in calls:
                call.cancel()
    return f"{_summary(refused)}, the other is served"


async def _many_small_calls(scene: Scene) -> str:
    """Of a tenant with 600 requests a minute."""
    headers = {"X-API-Key": scene.attacker_key}
    async with httpx.AsyncClient(base_url=scene.stack.http_url, timeout=_TIMEOUT_S, headers=headers) as http:
        for _ in range(700):
            answer = await http.post("/tokenize", json={"prompt": "x"})
            if answer.status_code != 200:
                return str(answer.status_code)
    return "200"


async def _half_sent_bodies(scene: Scene) -> str:
    """As many as the port takes; the other tenant is served beside them."""

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt":"'
        await asyncio.sleep(3600)

    async def post(http: httpx.AsyncClient) -> None:
        headers = {"X-API-Key": scene.attacker_key, "Content-Type": "application/json"}
        await http.post("/v1/completions", content=body(), headers=headers)

    async with httpx.AsyncClient(base_url=scene.stack.http_url, timeout=_TIMEOUT_S) as http:
        posting = [asyncio.create_task(post(http)) for _ in range(80)]
        try:
            await asyncio.sleep(1)
            answer = await http.post(
                "/v1/completions", json={"prompt": "Hello", "max_tokens": 2}, headers={"X-API-Key": scene.other_key}
            )
        finally:
            for task in posting:
                task.cancel()
            await asyncio.gather(*posting, return_exceptions=True)
    return "the other is served" if answer.status_code == 200 else f"the other gets {answer.status_code}"


def _summary(outcomes: Counter[str]) -> str:
    return " and ".join(sorted(outcomes)) or "all served"


_TURN = {"role": "user", "content": "Hi"}
_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
ATTEMPTS = (
    Attempt(_MEMORY, "gRPC: 60 MiB without a key", "UNAUTHENTICATED", _large_message_without_key),
    Attempt(_MEMORY, "gRPC: 30 million empty turns", "RESOURCE_EXHAUSTED", _many_empty_messages),
    Attempt(_MEMORY, "gRPC: 500 calls at once without a key", "UNAUTHENTICATED", _many_calls_without_key),
    Attempt(_MEMORY, "gRPC: 64 KiB of headers", "RESOURCE_EXHAUSTED", _large_headers),
    Attempt(
        _MEMORY, "HTTP: 32 MiB announced without a key", "401", _raw_http(f"{_HEAD}\r\nContent-Length: {32 << 20}")
    ),
    Attempt(
        _MEMORY,
        "HTTP: 512 MiB announced",
        "413",
        _raw_http(f"{_HEAD}\r\nX-API-Key: {{key}}\r\nContent-Length: {512 << 20}"),
    ),
    Attempt(_MEMORY, "HTTP: 100 KiB of headers", "400", _raw_http(_HEAD + "\r\nX-Large: " + "x" * 100_000)),
    Attempt(
        _MEMORY,
        "HTTP: two lengths",
        "400",
        _raw_http(f"{_HEAD}\r\nX-API-Key: {{key}}\r\nContent-Length: 2\r\nTransfer-Encoding: chunked", b"{}"),
    ),
    Attempt(_NETWORK, "gRPC: Describe without a key", "UNAUTHENTICATED", _describe(with_key=False)),
    Attempt(_NETWORK, "gRPC: Describe with a tenant's key", "PERMISSION_DENIED", _describe(with_key=True)),
    Attempt(_NETWORK, "HTTP: /debug/stack without a key", "401", _get("/debug/stack")),
    Attempt(_NETWORK, "HTTP: /debug/stack with a tenant's key", "403", _get("/debug/stack", with_key=True)),
    Attempt(_NETWORK, "HTTP: /metrics without a key", "401", _get("/metrics")),
    Attempt(_TENANTS, "answers that nobody reads", "RESOURCE_EXHAUSTED, the other is served", _more_than_its_share),
    Attempt(_TENANTS, "80 half-sent bodies", "the other is served", _half_sent_bodies),
    Attempt(_TENANTS, "a prompt of 3 MiB", "400", _post("/v1/completions", {"prompt": "word " * 600_000})),
    Attempt(_TENANTS, "a body of 32 MiB", "413", _post("/v1/completions", b'{"prompt":"' + b"x" * (32 << 20) + b'"}')),
    Attempt(
        _TENANTS,
        "a conversation of 100,000 turns",
        "400",
        _post("/v1/chat/completions", {"messages": [_TURN] * 100_000}),
    ),
    Attempt(_TENANTS, "lists 100,000 deep", "400", _post("/v1/completions", b"[" * 100_000)),
    Attempt(
        _TENANTS,
        "a grammar of 200,000 characters",
        "400",
        _post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a" * 200_000}}),
    ),
    Attempt(_TENANTS, "more small calls than its limit", "429", _many_small_calls),
    Attempt(_LOW, "gRPC: nothing but pings", "too_many_pings", _only_pings),
)
