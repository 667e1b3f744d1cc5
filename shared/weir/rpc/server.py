"""Servers: limits, keep-alive, and the interceptors that every process has.

    call ─> Access ─> TraceContext ─> Readiness ─> Errors ─> servicer
            the table of   joins the       refuses until  WeirError -> status with details,
            who may        caller's trace  warmed up      anything else -> INTERNAL, logged, counted

An interceptor is a `Guard`: an async context manager around the whole handler, unary or streaming.
"""

import inspect
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from weir.core.errors import FieldViolation, InvalidRequest, Unavailable, WeirError
from weir.core.trace_context import extract
from weir.rpc.access import RpcAccess
from weir.rpc.channel import KEEPALIVE_TIME_MS, MAX_MESSAGE_BYTES, keepalive
from weir.rpc.errors import abort_with
from weir.rpc.port_guard import PortLimits, handler_kind

if TYPE_CHECKING:  # these are generic in their stubs only
    ServicerContext = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

_log = logging.getLogger(__name__)
MIN_PING_INTERVAL_MS = KEEPALIVE_TIME_MS // 2
"""A client that asks for signs of life more often, on a connection without data, is cut off. Weir's own do not."""
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    # A port that is taken must be an error, not a port that two processes share.
    ("grpc.so_reuseport", 0),
)
_INTERNAL_OPTIONS: tuple[tuple[str, int], ...] = (
    *keepalive(),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_ping_strikes", 0),
)
_MAX_PING_STRIKES = 2
_CLIENT_KEEPALIVE_TIMEOUT_MS = 20_000
"""A client may be far away, or change its network: how long is too long it decides itself, by its own keep-alive."""
MAX_METADATA_BYTES = 16 << 10
"""Of the headers of one call to a port for clients, unpacked."""
_STARTING_RETRY_S = 1.0


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (), limits: PortLimits | None = None
) -> grpc.aio.Server:
    """A server with Weir's limits, without services, not bound, not started. `limits`: of a port for clients; None for
    one that only Weir's own processes reach.
    """
    own = _INTERNAL_OPTIONS if limits is None else _public_options(limits)
    return grpc.aio.server(interceptors=list(interceptors), options=[*_SERVER_OPTIONS, *own])


def _public_options(limits: PortLimits) -> tuple[tuple[str, int], ...]:
    return (
        *keepalive(_CLIENT_KEEPALIVE_TIMEOUT_MS),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
        # Equal bounds: between them gRPC would refuse some by chance.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Calls that come while the loop is busy wait in gRPC, which would else cancel some of more than 1,000, and
        # those that wait for 30 s, without a reason. Equal bounds: none is cancelled by chance.
        ("grpc.server_max_unrequested_time_in_server", limits.max_pending_s),
        ("grpc.server.max_pending_requests", limits.max_pending_calls),
        ("grpc.server.max_pending_requests_hard_limit", limits.max_pending_calls),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.read_timeout_s)),
        # Else the window of streams that nobody reads yet grows to megabytes; that of messages being read does anyway.
        ("grpc.http2.bdp_probe", 0),
    )


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler in `around`, whatever its arity; synchronous ones (none of ours) are not served, since none
    of this would be asked of them."""

    @abstractmethod
    def around(self, method: str, is_unary: bool, context: "ServicerContext") -> AbstractAsyncContextManager[None]:
        """`method` is the full name, /package.Service/Method; `is_unary` when neither side streams."""

    def deserializer(self, handler: "Handler") -> Callable[[bytes], Any] | None:
        return handler.request_deserializer

    def check(self, request: object) -> None:
        """Called inside of `around`, with what `deserializer` has made, before the handler. May raise WeirError."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method; gRPC answers UNIMPLEMENTED
            return None
        kind = handler_kind(handler)
        function = getattr(handler, kind)
        if not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            return None
        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped = self._wrap(function, handler_call_details.method, kind == "unary_unary")
        made: Handler = make_handler(wrapped, self.deserializer(handler), handler.response_serializer)
        return made

    def _wrap(self, function: Callable[..., Any], method: str, is_unary: bool) -> Callable[..., Any]:
        async def stream(request: Any, context: "ServicerContext") -> AsyncIterator[Any]:
            async with self.around(method, is_unary, context):
                self.check(request)
                responses = function(request, context)
                del request  # the handler's own from here on, who may drop it before the answer is complete
                async for response in responses:
                    yield response

        async def call(request: Any, context: "ServicerContext") -> Any:
            async with self.around(method, is_unary, context):
                self.check(request)
                answering = function(request, context)
                del request  # as above
                return await answering

        return stream if inspect.isasyncgenfunction(function) else call


class AccessGuard(Guard):
    """Of ports of the stack: refuses who may not call a method. At a port for clients `PortGuard` does it, which asks
    before the message is read."""

    def __init__(self, access: RpcAccess) -> None:
        self._access = access

    @asynccontextmanager
    async def around(self, method: str, is_unary: bool, context: "ServicerContext") -> AsyncIterator[None]:
        del is_unary
        try:
            self._access.admit(method, context)
        except WeirError as error:
            await abort_with(context, error)
        yield


class TraceContextGuard(Guard):
    """Makes the caller's trace context the current one.

    A unary call that belongs to a trace also gets a server span; streams live as long as a connection and would give
    spans without meaning, so those who serve them make their own.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @asynccontextmanager
    async def around(self, method: str, is_unary: bool, context: "ServicerContext") -> AsyncIterator[None]:
        metadata = context.invocation_metadata() or ()
        caller = extract({key: value for key, value in metadata if isinstance(value, str)})
        if not trace.get_current_span(caller).get_span_context().is_valid:
            yield
            return
        # Not detached: every call runs in a task of its own, and a stream may be closed from another one.
        otel_context.attach(caller)
        if not is_unary:
            yield
            return
        name = method.removeprefix("/")
        attributes = {"rpc.system.name": "grpc", "rpc.method": name}
        # Not the exception itself, whose message and traceback may repeat what a client sent.
        with self._tracer.start_as_current_span(
            name, kind=SpanKind.SERVER, attributes=attributes, record_exception=False
        ):
            yield


class ReadinessGuard(Guard):
    """Refuses calls of the given services until `open` is called. Health and Admin always answer."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._prefixes = tuple(f"/{name}/" for name in service_names)
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    @asynccontextmanager
    async def around(self, method: str, is_unary: bool, context: "ServicerContext") -> AsyncIterator[None]:
        del is_unary
        if not self.is_open and method.startswith(self._prefixes):
            await abort_with(context, Unavailable("starting: not ready yet", retry_after_s=_STARTING_RETRY_S))
        yield


class _Malformed:
    """Stands for a request that could not be read."""


class ErrorGuard(Guard):
    """Turns a WeirError into a rich status, and a defect into INTERNAL with a traceback in the log."""

    def __init__(self) -> None:
        self.num_internal_errors = 0

    def deserializer(self, handler: "Handler") -> Callable[[bytes], Any] | None:
        """Bytes that are no request reach `check`: grpc.aio would answer them with UNKNOWN and a traceback. Of a stream
        of requests they end the stream.
        """
        deserialize = handler.request_deserializer
        if deserialize is None or handler.request_streaming:
            return deserialize

        def try_deserialize(data: bytes) -> Any:
            try:
                return deserialize(data)
            except DecodeError:
                return _Malformed()

        return try_deserialize

    def check(self, request: object) -> None:
        if isinstance(request, _Malformed):
            raise InvalidRequest([FieldViolation("request", "the bytes are not the protobuf message of this method")])

    @asynccontextmanager
    async def around(self, method: str, is_unary: bool, context: "ServicerContext") -> AsyncIterator[None]:
        del is_unary
        try:
            yield
        except WeirError as error:
            await abort_with(context, error)
        except grpc.aio.BaseError:
            raise  # an abort on its way out
        except Exception as error:  # noqa: BLE001 - the boundary: logged, counted, and answered
            self.num_internal_errors += 1
            _log.exception("%s failed", method)
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}; see the log")
