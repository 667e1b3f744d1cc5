"""What a port that clients reach asks before it reads a call's message: who calls, and whether there is room.

    call ─> known method? ─> who calls? ─> one more? ─> bytes for a message? ─> read ─> parse ─> the other interceptors
                             metadata      or at once  or RESOURCE_EXHAUSTED   one message,
                             only          refused     after a short wait      within a deadline

Of calls and of bytes no tenant that has peers holds more than its share (`weir.core.shares`).

gRPC's own handlers of single requests read the message first. Here they are registered as handlers of streams, which
look the same on the wire and read when they want to.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from weir.core.errors import DeadlineExceeded, FieldViolation, InvalidRequest, WeirError
from weir.core.shares import Holder, SharedRoom
from weir.rpc.access import Callers, Port, RpcAccess
from weir.rpc.body_budget import BodyBudget
from weir.rpc.errors import abort_with

if TYPE_CHECKING:  # these are generic in their stubs only
    ServicerContext = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

_SIDE_STREAMS, _SIDE_CALLS = "streams beside requests", "calls beside requests"

_SURE_CALLS = 2
"""So many of a tenant may be open whatever its share."""


@dataclass(frozen=True, slots=True)
class PortLimits:
    """`max_calls` of what tenants call, together; `max_side_calls` of all others (health, reflection, Describe), and
    again as many streams of them. Of connections those over `max_connections` are closed at once, and one on which no
    HTTP/2 begins within `read_timeout_s` then. A call that nobody has looked at for `max_pending_s` is cancelled: a
    caller who will not wait so long has set a deadline.
    """

    max_message_bytes: int
    max_calls: int
    max_side_calls: int = 32
    read_timeout_s: float = 30.0
    max_connections: int = 9216
    max_pending_s: int = 600

    @property
    def max_streams_per_connection(self) -> int:
        """Above all that can run, so that a call too many is refused, and does not wait in its own client."""
        return self.max_calls + 2 * self.max_side_calls

    @property
    def max_pending_calls(self) -> int:
        """Of all connections, before anybody has looked at them; those beyond it are cancelled without a reason."""
        return 2 * self.max_streams_per_connection


class PortGuard(grpc.aio.ServerInterceptor):
    """Has to be the outermost interceptor. Synchronous handlers (none of ours) are refused.

    `access` says who may call what; what is not in its table nobody may.
    """

    def __init__(self, limits: PortLimits, bodies: BodyBudget, access: RpcAccess | None = None) -> None:
        if limits.max_message_bytes > bodies.max_bytes:
            raise ValueError(
                f"max_message_bytes {limits.max_message_bytes}: above the {bodies.max_bytes} of all bodies"
            )
        self.limits = limits
        self.access = access or RpcAccess(Port.PUBLIC)
        self._bodies = bodies
        self._rooms = {
            "requests": _places("requests", limits.max_calls, _SURE_CALLS),
            _SIDE_STREAMS: _places(_SIDE_STREAMS, limits.max_side_calls, limits.max_side_calls),
            _SIDE_CALLS: _places(_SIDE_CALLS, limits.max_side_calls, limits.max_side_calls),
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method; gRPC answers UNIMPLEMENTED and reads nothing
            return None
        is_answer_stream = handler.response_streaming
        function = getattr(handler, handler_kind(handler))
        if not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            return None
        method = handler_call_details.method
        side = _SIDE_STREAMS if handler.request_streaming or is_answer_stream else _SIDE_CALLS
        kind = "requests" if self.access.callers_of(method) is Callers.TENANT else side
        call = _Call(self, kind, method, handler, function)
        if is_answer_stream:
            wrapped = call.stream if inspect.isasyncgenfunction(function) else call.written_stream
            return grpc.stream_stream_rpc_method_handler(wrapped, call.deserializer, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(call.answer, call.deserializer, handler.response_serializer)

    def counted(self, kind: str, caller: Holder) -> contextlib.AbstractContextManager[None]:
        """While one more call of this kind is open. Raises Overloaded, at once, and QuotaExceeded where the caller's
        tenant has its share of them."""
        return self._rooms[kind].held(caller, 1)

    @contextlib.asynccontextmanager
    async def room_for_message(self, kind: str, caller: Holder) -> AsyncIterator[None]:
        """Raises Overloaded after a short wait. For the largest message: its size is not known before."""
        if kind != "requests":  # bounded by their number, so that those who read large messages keep nobody from them
            yield
            return
        num_bytes = self.limits.max_message_bytes
        await self._bodies.take(num_bytes, caller)
        try:
            yield
        finally:
            self._bodies.give_back(num_bytes, caller)


class _Call:
    """The handler of one call."""

    def __init__(self, guard: PortGuard, kind: str, method: str, handler: Any, function: Callable[..., Any]) -> None:
        self._guard = guard
        self._kind = kind
        self._method = method
        self._function = function
        self._reads_itself = handler.request_streaming
        self._deserialize = handler.request_deserializer or (lambda data: data)

    @property
    def deserializer(self) -> Callable[[bytes], Any] | None:
        """Of single requests the bytes are wanted, to be parsed when nobody else can be refused any more."""
        return self._deserialize if self._reads_itself else None

    async def answer(self, requests: AsyncIterator[Any], context: "ServicerContext") -> Any:
        with contextlib.ExitStack() as counted:
            return await self._function(await self._admit(counted, requests, context), context)

    async def written_stream(self, requests: AsyncIterator[Any], context: "ServicerContext") -> None:
        with contextlib.ExitStack() as counted:
            await self._function(await self._admit(counted, requests, context), context)

    async def stream(self, requests: AsyncIterator[Any], context: "ServicerContext") -> AsyncIterator[Any]:
        with contextlib.ExitStack() as counted:
            # The handler alone holds the request: the answer may take long, and what was asked may be large.
            responses = self._function(await self._admit(counted, requests, context), context)
            async for response in responses:
                yield response

    async def _admit(
        self, counted: contextlib.ExitStack, requests: AsyncIterator[Any], context: "ServicerContext"
    ) -> Any:
        """What the handler takes. Errors become statuses here; the handler's own do in the other interceptors."""
        try:
            caller = self._guard.access.admit(self._method, context)
            counted.enter_context(self._guard.counted(self._kind, caller))
            return requests if self._reads_itself else self._deserialize(await self._read(context, caller))
        except WeirError as error:
            await abort_with(context, error)

    async def _read(self, context: "ServicerContext", caller: Holder) -> bytes:
        timeout_s = self._guard.limits.read_timeout_s
        async with self._guard.room_for_message(self._kind, caller):
            try:
                async with asyncio.timeout(timeout_s):
                    data = await context.read()
            except TimeoutError:
                raise DeadlineExceeded(f"the request's message took longer than {timeout_s:g} s") from None
        if data is grpc.aio.EOF:
            raise InvalidRequest([FieldViolation("request", "there is none: send one message")])
        assert isinstance(data, bytes)
        return data


def _places(kind: str, num: int, num_sure: int) -> SharedRoom:
    return SharedRoom(num, num_sure, f"places for {kind} at this port")


def handler_kind(handler: "Handler") -> str:
    """`unary_unary` to `stream_stream`: the attribute of a handler that has its function."""
    streams = handler.request_streaming, handler.response_streaming
    return "_".join("stream" if is_stream else "unary" for is_stream in streams)
