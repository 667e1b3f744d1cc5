"""A gateway's own ports, in the process: whatever is asked there, an answer or an error in the form of its API, never
one of the server's own mistakes."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from tests.fuzz.choices import Choices, edited, mutated_json
from tests.fuzz.target import Check, Target
from tests.fuzz.targets.bodies import CHAT, COMPLETION, MESSAGES, RESPONSE
from tests.unit.gateway.world import FAST, World, open_world
from weir.wire.v1 import inference_pb2, types_pb2
from weir_gateway.frontends.openapi.document import OPERATIONS

_TIMEOUT_S = 30.0
_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/tokenize": {"prompt": "x", "messages": CHAT["messages"], "add_special_tokens": True},
    "/detokenize": {"tokens": [3, 4]},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
_PATHS = [(one.method, one.path) for one in OPERATIONS if not one.path.endswith("/events")]
_HEADERS = (
    "Content-Type: application/json",
    "Content-Type: multipart/form-data; boundary=x",
    "Content-Encoding: gzip",
    "Idempotency-Key: k",
    "Last-Event-ID: 5",
    "X-Request-Id: \xff",
    "Authorization: Bearer x",
    "Traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "Expect: 100-continue",
    "Accept: text/event-stream",
    "Host: y",
    "X-Weir-Lane: batch",
)
_UNAVAILABLE = (501, 503, 504, 529)
"""501: what this gateway was not set up for. The others say when to try again."""
_WRONG_CODES = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
)
"""The last says that nobody answers: whatever the message is, what carries it is whole."""


class _Ports:
    """One gateway for many inputs."""

    def __init__(self, world: World, runner: asyncio.Runner) -> None:
        self._world = world
        self._runner = runner
        self._port = world.gateway.http_port

    def check_http(self, data: bytes) -> None:
        self._runner.run(asyncio.wait_for(self._ask(Choices(data)), _TIMEOUT_S))

    def check_grpc(self, data: bytes) -> None:
        self._runner.run(asyncio.wait_for(self._call(Choices(data)), _TIMEOUT_S))

    def check_valid(self) -> None:
        """What is valid is served: without it a gateway that always says 503 would be as good."""
        self._runner.run(asyncio.wait_for(self._ask_what_is_valid(), _TIMEOUT_S))

    async def _ask_what_is_valid(self) -> None:
        answer = await self._answer_to(_request("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 2}'))
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:600]
        message = inference_pb2.GenerateRequest(text="x").SerializeToString()
        code, details = await self._status_of("Generate", message)
        assert code is grpc.StatusCode.OK, f"{code}: {details}"

    async def _ask(self, choices: Choices) -> None:
        raw, is_edited = _any_request(choices)
        answer = await self._answer_to(raw)
        assert answer or is_edited, f"no answer to {raw!r}"
        if answer:
            _check_answer(answer)

    async def _answer_to(self, raw: bytes) -> bytes:
        """None at all is one, to what is no HTTP or has not come whole."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(raw)
            return await reader.read(1 << 20)
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()

    async def _call(self, choices: Choices) -> None:
        method = choices.pick(("Generate", "Chat", "Tokenize"))
        message = _message(choices).SerializeToString()
        is_edited = choices.byte() % 4 == 1
        payload = edited(choices, message) if is_edited else message
        metadata = (choices.pick(("authorization", "x", "traceparent")), choices.pick(("Bearer k", "", "a" * 99)))
        code, details = await self._status_of(method, payload, metadata)
        assert code not in _WRONG_CODES, f"{code}: {details}"
        assert code is grpc.StatusCode.OK or details

    async def _status_of(
        self, method: str, payload: bytes, *metadata: tuple[str, str]
    ) -> tuple[grpc.StatusCode, str | None]:
        async with grpc.aio.insecure_channel(self._world.grpc_address) as channel:
            ask: Any = channel.unary_stream(f"/weir.v1.Inference/{method}")
            call = ask(payload, metadata=metadata, timeout=_TIMEOUT_S)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            return await call.code(), await call.details()


def _any_request(choices: Choices) -> tuple[bytes, bool]:
    """And whether it is edited."""
    method, path = choices.pick(_PATHS)
    path = path.replace("{id}", "a%00" if choices.byte() == 1 else "x-1").replace("{model}", "bytes")
    body = b""
    if method == "POST":
        valid = _BODIES.get(path, {"a": 1})
        kept = {name: value for name, value in valid.items() if choices.byte() % 3}
        body = mutated_json(choices, kept) if choices.byte() % 8 else choices.some_bytes(60)
    raw = _request(method, path, body, *(choices.pick(_HEADERS) for _ in range(choices.below(4))))
    is_edited = choices.byte() % 8 == 1
    return edited(choices, raw) if is_edited else raw, is_edited


def _request(method: str, path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _check_answer(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), answer[:100]
    status = int(head[9:12])
    assert status < 500 or status in _UNAVAILABLE, answer[:600]
    is_json = b"content-type: application/json" in head.lower()
    if status >= 400 and is_json and b"HTTP/1.1" not in body:
        error = json.loads(body)["error"]
        assert isinstance(error["message"], str)
        assert error["type"]


def _message(choices: Choices) -> Any:
    sampling = types_pb2.SamplingParams()
    options = inference_pb2.RequestOptions(sampling=sampling)
    for holder in (options, options.sampling, options.stop_conditions):
        for field in holder.DESCRIPTOR.fields:
            if choices.byte() % 6 == 1:
                with contextlib.suppress(TypeError, ValueError, AttributeError, OverflowError):
                    setattr(holder, field.name, choices.value())
    request = inference_pb2.GenerateRequest(options=options)
    if choices.byte() % 2:
        request.text = choices.text().encode("utf-8", "replace").decode()
    else:
        request.token_ids.ids.extend(choices.below(300) for _ in range(choices.below(5)))
    return request


@contextlib.contextmanager
def _ports() -> Iterator[_Ports]:
    with asyncio.Runner() as runner:
        opened = open_world(replace(FAST, http=replace(FAST.http, head_timeout_s=0.5, body_timeout_s=0.5)))
        world = runner.run(opened.__aenter__())
        try:
            ports = _Ports(world, runner)
            ports.check_valid()
            yield ports
            ports.check_valid()
        finally:
            runner.run(opened.__aexit__(None, None, None))


@contextlib.contextmanager
def _http() -> Iterator[Check]:
    with _ports() as ports:
        yield ports.check_http


@contextlib.contextmanager
def _grpc() -> Iterator[Check]:
    with _ports() as ports:
        yield ports.check_grpc


TARGETS = (
    Target("http_port", _http, (), max_bytes=256, max_s=10.0, ci_examples=60),
    Target("grpc_port", _grpc, (), max_bytes=256, max_s=10.0, ci_examples=40),
)
