"""The client's side of grpc.aio over the simulated network, as far as generated stubs and this project use it.

What is kept of the real one (`test_grpc_contract.py` compares): a write to a call that has ended raises
InvalidStateError; a read that finds a bad end raises AioRpcError, of a call that was cancelled here CancelledError, and
EOF at a good one; messages that came before a good end are read first; an end by the connection drops them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from tests.simulation.loop import PROCESS
from tests.simulation.network import Connection, Network

WINDOW_MESSAGES = 24
"""Sent and not read yet; HTTP/2 counts bytes."""


class Frame(NamedTuple):
    """Client to server: start, message, half_close, cancel. Server to client: message, status."""

    call: "ClientCall"
    kind: str
    body: Any = None


class Start(NamedTuple):
    method: str
    metadata: tuple[tuple[str, Any], ...]
    deadline_s: float | None
    is_unary: bool
    """The request comes with it, and no other."""


class Status(NamedTuple):
    code: grpc.StatusCode
    details: str = ""
    trailers: tuple[tuple[str, Any], ...] = ()


class SimChannel:
    """One connection at a time, made when a call needs it."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._connection: Connection | None = None
        self._calls: dict[ClientCall, None] = {}

    async def __aenter__(self) -> "SimChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        del grace
        for call in list(self._calls):
            call.cancel()
        if self._connection is not None:
            self._connection.close_client()

    def unary_unary(self, method: str, serialize: Any = None, deserialize: Any = None, **more: Any) -> Any:
        return _method(self, method, UnaryCall, serialize, deserialize, more)

    def unary_stream(self, method: str, serialize: Any = None, deserialize: Any = None, **more: Any) -> Any:
        return _method(self, method, UnaryStreamCall, serialize, deserialize, more)

    def stream_stream(self, method: str, serialize: Any = None, deserialize: Any = None, **more: Any) -> Any:
        return _method(self, method, StreamStreamCall, serialize, deserialize, more)

    stream_unary = stream_stream
    """No stub of the stack's own calls uses it; every stub names it."""

    @property
    def network(self) -> Network:
        return self._network

    def begin(self, call: "ClientCall") -> Connection | None:
        """The connection that the call goes over; None: nobody listens."""
        if self._connection is None or self._connection.is_client_closed:
            self._connection = self._network.connect(self._address, self._on_closed)
        if self._connection is not None:
            self._calls[call] = None
        return self._connection

    def forget(self, call: "ClientCall") -> None:
        self._calls.pop(call, None)

    @property
    def address(self) -> str:
        return self._address

    def _on_closed(self) -> None:
        for call in list(self._calls):
            call.break_off(Status(grpc.StatusCode.UNAVAILABLE, "the connection was lost"))


def _method(
    channel: SimChannel, method: str, make: type["ClientCall"], serialize: Any, deserialize: Any, more: dict[str, Any]
) -> Callable[..., "ClientCall"]:
    serialize = more.get("request_serializer", serialize)
    deserialize = more.get("response_deserializer", deserialize)

    def call(
        *requests: Any, timeout: float | None = None, metadata: Sequence[tuple[str, Any]] | None = None, **_: Any
    ) -> ClientCall:
        return make(channel, method, (serialize, deserialize), requests, timeout, tuple(metadata or ()))

    return call


class ClientCall:
    """One call, whatever its arity."""

    is_request_unary = True

    def __init__(
        self,
        channel: SimChannel,
        method: str,
        codec: tuple[Callable[[Any], bytes], Callable[[bytes], Any]],
        requests: Sequence[Any],
        timeout_s: float | None,
        metadata: tuple[tuple[str, Any], ...],
    ) -> None:
        loop = channel.network.loop
        self._channel = channel
        self.process = PROCESS.get()
        self._serialize, self._deserialize = codec
        self._status: asyncio.Future[Status] = loop.create_future()
        self._incoming: deque[bytes] = deque()
        self._end: Status | None = None
        """Behind what is still to be read."""
        self._news = asyncio.Event()
        self._is_locally_cancelled = False
        self._has_done_writing = self.is_request_unary
        self._room = asyncio.Event()
        self.num_unread = 0
        """Messages to the server that its handler has not taken."""
        self.num_unread_responses = 0
        self.wake_writer: Callable[[], None] | None = None
        """Of the server, where it waits for room."""
        self._timer: asyncio.TimerHandle | None = None
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        start = Start(method, metadata, deadline_s, self.is_request_unary)
        serialized = [self._serialize(request) for request in requests if request is not None]
        self._connection = channel.begin(self)
        if self._connection is None:
            refused = Status(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {channel.address}: refused")
            channel.network.post(self.process, channel.network.draw_delay_s(), self.break_off, refused)
            return
        self._send("start", (start, serialized[0] if serialized else None))
        if timeout_s is not None:
            late = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._timer = loop.call_later(timeout_s, self.break_off, late, True)

    def done(self) -> bool:
        return self._status.done()

    def cancelled(self) -> bool:
        return self.done() and self._status.result().code is grpc.StatusCode.CANCELLED

    def cancel(self) -> bool:
        if self.done():
            return False
        self._is_locally_cancelled = True
        self.break_off(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"), True)
        return True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._status.add_done_callback(lambda _: callback(self))

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status)).code

    async def details(self) -> str:
        return (await asyncio.shield(self._status)).details

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await asyncio.shield(self._status)).trailers)

    def on_message(self, data: bytes) -> None:
        if not self.done():
            self._incoming.append(data)
            self._news.set()

    def on_status(self, status: Status) -> None:
        if not self.done():
            self._end = status
            if not self._incoming:
                self._finish(status)
            self._news.set()

    def on_room(self) -> None:
        self._room.set()

    def break_off(self, status: Status, tell: bool = False) -> None:
        """From this side or by the connection: what was not read is lost."""
        if self.done():
            return
        self._incoming.clear()
        self._finish(status)
        self._news.set()
        self._room.set()
        if tell:
            self._send("cancel")

    def _finish(self, status: Status) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._channel.forget(self)
        self._status.set_result(status)
        self._room.set()

    def _send(self, kind: str, body: Any = None) -> None:
        if self._connection is not None and not self._connection.is_client_closed:
            self._connection.send_frame(Frame(self, kind, body))

    async def _read(self) -> Any:
        while not self._incoming and not self.done():
            self._news.clear()
            await self._news.wait()
        if not self._incoming:
            return grpc.aio.EOF
        data = self._incoming.popleft()
        self._count_read()
        if self._end is not None and not self._incoming and not self.done():
            self._finish(self._end)
        return self._deserialize(data)

    def _count_read(self) -> None:
        self.num_unread_responses -= 1
        wake, connection = self.wake_writer, self._connection
        if wake is not None and connection is not None and self.num_unread_responses < WINDOW_MESSAGES:
            self.wake_writer = None
            connection.to_server.send(wake)

    def _raise_for_status(self) -> None:
        if self._is_locally_cancelled:
            raise asyncio.CancelledError
        status = self._status.result()
        if status.code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailers), status.details
            )


class UnaryCall(ClientCall):
    """unary_unary: awaitable."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            answer = await self._read()
            await asyncio.shield(self._status)
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()
        return answer


class UnaryStreamCall(ClientCall):
    """unary_stream: an async iterator, or `read`."""

    async def read(self) -> Any:
        if self.done():
            self._raise_for_status()
            return grpc.aio.EOF
        try:
            message = await self._read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is grpc.aio.EOF:
            self._raise_for_status()
        return message

    async def __aiter__(self) -> Any:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


class StreamStreamCall(UnaryStreamCall):
    """stream_stream by `read` and `write`."""

    is_request_unary = False

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._has_done_writing:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        data = self._serialize(request)
        if self._connection is None:  # as without a connection: known before anything is written
            await asyncio.shield(self._status)
            self._raise_for_status()
        try:
            while self.num_unread >= WINDOW_MESSAGES and not self.done():
                self._room.clear()
                await self._room.wait()
            self.num_unread += 1
            self._send("message", data)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.done():
            self._raise_for_status()

    async def done_writing(self) -> None:
        if not self.done() and not self._has_done_writing:
            self._has_done_writing = True
            self._send("half_close")
            await asyncio.sleep(0)
