"""Guards around handlers of every kind, and limits of servers and channels."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weir.core.errors import InternalError, NotFound, Overloaded, Unavailable
from weir.core.trace_context import traceparent_of
from weir.rpc.channel import MAX_MESSAGE_BYTES, make_channel
from weir.rpc.errors import from_rpc_error
from weir.rpc.server import ErrorGuard, ReadinessGuard, TraceContextGuard, make_server

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "written_stream")


async def act(text: bytes) -> bytes:
    match text:
        case b"overloaded":
            raise Overloaded("too much", retry_after_s=2.5)
        case b"missing":
            raise NotFound("model", "no such model")
        case b"defect":
            raise KeyError("nobody thought of this")
        case b"trace":
            return traceparent_of(trace.get_current_span()).encode()
    return text.upper()


async def unary_unary(request: bytes, context: Any) -> bytes:
    return await act(request)


async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"first"
    yield await act(request)


async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return await act(b"".join([request async for request in requests]))


async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield b"first"
        yield await act(request)


async def written_stream(request: bytes, context: Any) -> None:
    await context.write(b"first")
    await context.write(await act(request))


def handlers() -> grpc.GenericRpcHandler:
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(unary_unary),
        "unary_stream": grpc.unary_stream_rpc_method_handler(unary_stream),
        "stream_unary": grpc.stream_unary_rpc_method_handler(stream_unary),
        "stream_stream": grpc.stream_stream_rpc_method_handler(stream_stream),
        "written_stream": grpc.unary_stream_rpc_method_handler(written_stream),
    }
    return grpc.method_handlers_generic_handler("test.Echo", methods)


@dataclass
class World:
    """A server with all guards and a channel to it."""

    channel: grpc.aio.Channel
    errors: ErrorGuard
    readiness: ReadinessGuard
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    async def call(self, kind: str, text: bytes, **kwargs: Any) -> bytes:
        """The last message of the answer."""

        async def one() -> AsyncIterator[bytes]:
            yield text

        method = f"/test.Echo/{kind}"
        arity = {"written_stream": "unary_stream", "nothing": "unary_unary"}.get(kind, kind)
        make: Callable[..., Any] = getattr(self.channel, arity)
        call = make(method)(one() if kind.startswith("stream") else text, timeout=5, **kwargs)
        if arity.endswith("_unary"):
            answer: bytes = await call
            return answer
        messages: list[bytes] = [message async for message in call]
        return messages[-1]


@asynccontextmanager
async def world(*, is_ready: bool = True) -> AsyncIterator[World]:
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    errors, readiness = ErrorGuard(), ReadinessGuard(["test.Echo"])
    if is_ready:
        readiness.open()
    server = make_server([TraceContextGuard(provider.get_tracer("t")), readiness, errors])
    server.add_generic_rpc_handlers((handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            yield World(channel, errors, readiness, exporter)
    finally:
        await server.stop(None)


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_and_errors_become_statuses_in_every_kind_of_call(kind: str) -> None:
    async with world() as here:
        assert await here.call(kind, b"hello") == b"HELLO"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.call(kind, b"overloaded")
        overloaded = from_rpc_error(caught.value)
        assert isinstance(overloaded, Overloaded)
        assert (overloaded.message, overloaded.retry_after_s) == ("too much", 2.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.call(kind, b"missing")
        missing = from_rpc_error(caught.value)
        assert isinstance(missing, NotFound)
        assert missing.field == "model"
        assert here.errors.num_internal_errors == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.call(kind, b"defect")
        assert isinstance(from_rpc_error(caught.value), InternalError)
        assert "KeyError" in (caught.value.details() or "")
        assert here.errors.num_internal_errors == 1


async def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async with world() as here:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.call("nothing", b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_are_refused_until_the_process_is_ready(kind: str) -> None:
    async with world(is_ready=False) as here:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.call(kind, b"hello")
        refused = from_rpc_error(caught.value)
        assert isinstance(refused, Unavailable)
        assert refused.retry_after_s is not None
        here.readiness.open()
        assert await here.call(kind, b"hello") == b"HELLO"


@pytest.mark.parametrize("kind", KINDS)
async def test_the_callers_trace_is_the_handlers_and_only_unary_calls_get_a_span(kind: str) -> None:
    async with world() as here:
        seen = (await here.call(kind, b"trace", metadata=[("traceparent", TRACEPARENT)])).decode()
        assert await here.call(kind, b"trace") == b""
        spans: tuple[ReadableSpan, ...] = here.exporter.get_finished_spans()
    assert seen[:35] == TRACEPARENT[:35]
    if kind != "unary_unary":
        assert (seen, spans) == (TRACEPARENT, ())
        return
    (span,) = spans
    assert (span.name, span.kind) == ("test.Echo/unary_unary", trace.SpanKind.SERVER)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert seen.split("-")[2] == f"{span.context.span_id:016x}"


async def test_a_message_beyond_what_grpc_allows_by_itself_passes() -> None:
    async with world() as here:
        large = b"a" * 20_000_000
        assert await here.call("unary_unary", large) == large.upper()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.call("unary_unary", b"a" * (MAX_MESSAGE_BYTES + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_two_servers_cannot_share_a_port() -> None:
    first, second = make_server(), make_server()
    port = first.add_insecure_port("127.0.0.1:0")
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")
    await first.stop(None)
    await second.stop(None)


async def test_a_channel_finds_a_server_that_comes_back() -> None:
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((handlers(),))
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.unary_unary("/test.Echo/unary_unary")
        assert await method(b"a", timeout=5) == b"A"
        await server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"a", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        again = make_server()
        again.add_generic_rpc_handlers((handlers(),))
        again.add_insecure_port(f"127.0.0.1:{port}")
        await again.start()
        assert await method(b"a", timeout=5, wait_for_ready=True) == b"A"
        await again.stop(None)
