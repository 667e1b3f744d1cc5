"""The server's side of grpc.aio over the simulated network: handlers in tasks of the server's process, cancelled when
their client goes or their deadline passes.
"""

import asyncio
import functools
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc
import grpc.aio

from tests.simulation.grpc_client import WINDOW_MESSAGES, ClientCall, Frame, Start, Status
from tests.simulation.loop import PROCESS
from tests.simulation.network import Connection, Network

_log = logging.getLogger(__name__)


class Details(NamedTuple):
    """grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: tuple[tuple[str, Any], ...]


class SimServer:
    """`grpc.aio.Server`."""

    def __init__(self, network: Network, interceptors: Sequence[Any] = ()) -> None:
        self.network = network
        self.process = PROCESS.get()
        self._interceptors = tuple(interceptors)
        self._generic_handlers: list[Any] = []
        self._handlers: dict[str, Any] = {}
        self._addresses: list[str] = []
        self._calls: dict[ClientCall, ServerCall] = {}
        self._connections: dict[Connection, None] = {}
        self._is_stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic_handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same once more, for speed."""

    def add_insecure_port(self, address: str) -> int:
        self._addresses.append(address)
        return 1

    async def start(self) -> None:
        for address in self._addresses:
            self.network.listen(address, self)

    async def stop(self, grace: float | None) -> None:
        self._is_stopping = True
        for address in self._addresses:
            self.network.close_listener(address, self)
        tasks = [call.task for call in self._calls.values()]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for call in list(self._calls.values()):
            call.task.cancel()
        for connection in list(self._connections):
            connection.close_server()
        left = [task for task in tasks if not task.done()]
        if left:
            await asyncio.wait(left)

    def on_connected(self, connection: Connection) -> None:
        if self._is_stopping:
            connection.close_server()
        else:
            self._connections[connection] = None

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        if frame.kind == "start":
            if not self._is_stopping:
                start, request = frame.body
                self._calls[frame.call] = ServerCall(self, connection, frame.call, start, request)
            return
        call = self._calls.get(frame.call)
        if call is None:
            return
        if frame.kind == "message":
            call.requests.append(frame.body)
            call.news.set()
        elif frame.kind == "half_close":
            call.is_half_closed = True
            call.news.set()
        else:
            call.lose_client()

    def on_closed(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        for call in list(self._calls.values()):
            if call.connection is connection:
                call.lose_client()

    def forget(self, client: ClientCall) -> None:
        self._calls.pop(client, None)

    async def find_handler(self, details: Details) -> Any:
        """With its interceptors around it, which go by the method alone."""
        if details.method not in self._handlers:
            find: Callable[..., Any] = self._find
            for interceptor in reversed(self._interceptors):
                find = functools.partial(interceptor.intercept_service, find)
            self._handlers[details.method] = await find(details)
        return self._handlers[details.method]

    async def _find(self, details: Details) -> Any:
        found = (generic.service(details) for generic in self._generic_handlers)
        return next((handler for handler in found if handler is not None), None)


class ServerCall:
    """One call at its handler, and the `grpc.aio.ServicerContext` of it."""

    def __init__(
        self, server: SimServer, connection: Connection, client: ClientCall, start: Start, request: bytes | None
    ) -> None:
        self._server = server
        self.connection = connection
        self._client = client
        self._start = start
        self.requests: deque[bytes] = deque([] if request is None else [request])
        self.is_half_closed = start.is_unary
        self.is_lost = False
        self.news = asyncio.Event()
        self._room = asyncio.Event()
        self._status: Status | None = None
        self._trailers: tuple[tuple[str, Any], ...] = ()
        self._abort: grpc.aio.AbortError | None = None
        self._serialize: Callable[[Any], bytes] = bytes
        self._deserialize: Callable[[bytes], Any] = bytes
        self._deadline: asyncio.TimerHandle | None = None
        if start.deadline_s is not None:
            self._deadline = server.network.loop.call_at(start.deadline_s, self.lose_client)
        self.task = asyncio.get_running_loop().create_task(self._serve())

    # What the transport does.

    def lose_client(self) -> None:
        self.is_lost = True
        self.news.set()
        self._room.set()
        if self._status is None and not self.task.done():
            self.task.cancel()

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            self.connection.to_client.send(self._client.on_status, status)

    async def _serve(self) -> None:
        try:
            await self._handle()
            self._end(Status(grpc.StatusCode.OK, "", self._trailers))
        except asyncio.CancelledError:
            self._end(Status(grpc.StatusCode.CANCELLED, "the handler was cancelled"))
            if not self.is_lost and not self._server._is_stopping:
                raise
        except grpc.aio.AbortError:
            pass  # its status is under way
        except Exception as error:  # noqa: BLE001 - as grpc.aio: the boundary of a handler
            if self._abort is None:
                _log.exception("unexpected %s raised by a servicer method", type(error).__name__)
                self._end(Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
            self._server.forget(self._client)

    async def _handle(self) -> None:
        handler = await self._server.find_handler(Details(self._start.method, self._start.metadata))
        if handler is None:
            self._end(Status(grpc.StatusCode.UNIMPLEMENTED, f"{self._start.method}: no such method"))
            return
        self._serialize, self._deserialize = handler.response_serializer, handler.request_deserializer
        request = self._iterate() if handler.request_streaming else self._deserialize(self.requests.popleft())
        if not handler.response_streaming:
            function = handler.stream_unary if handler.request_streaming else handler.unary_unary
            await self._answer(await function(request, self))
            return
        function = handler.stream_stream if handler.request_streaming else handler.unary_stream
        answering = function(request, self)
        if inspect.isasyncgen(answering):
            async for response in answering:
                await self.write(response)
        else:
            await answering

    async def _answer(self, response: Any) -> None:
        if self._server.network.draw_is_answer_lost():
            self._status = Status(grpc.StatusCode.UNAVAILABLE)
            lost = Status(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
            if self._server.network.rng.random() < 0.5:  # else the caller waits until its deadline
                self.connection.to_client.send(self._client.break_off, lost)
            return
        await self.write(response)

    async def _iterate(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    # What grpc.aio.ServicerContext has.

    async def read(self) -> Any:
        self._check()
        while not self.requests and not self.is_half_closed and not self.is_lost:
            self.news.clear()
            await self.news.wait()
        self._check()
        if not self.requests or self.is_lost:
            return grpc.aio.EOF
        client = self._client
        client.num_unread -= 1
        if client.num_unread == WINDOW_MESSAGES - 1:
            self.connection.to_client.send(client.on_room)
        return self._deserialize(self.requests.popleft())

    async def write(self, message: Any) -> None:
        self._check()
        client = self._client
        while client.num_unread_responses >= WINDOW_MESSAGES and not self.is_lost:
            client.wake_writer = self._room.set
            self._room.clear()
            await self._room.wait()
        client.num_unread_responses += 1
        self.connection.to_client.send(client.on_message, self._serialize(message))
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        if self._abort is not None:
            raise grpc.aio.UsageError("Abort already called!")
        self._abort = grpc.aio.AbortError("Locally aborted.")
        self._end(Status(code, details, tuple(trailing_metadata)))
        await asyncio.sleep(0)
        raise self._abort

    def set_trailing_metadata(self, trailers: Any) -> None:
        self._trailers = tuple(trailers)

    def auth_context(self) -> dict[str, list[bytes]]:
        """There are no certificates."""
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._start.metadata

    def time_remaining(self) -> float | None:
        deadline_s = self._start.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._server.network.loop.time())

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.task.add_done_callback(lambda _: callback(self))

    def cancelled(self) -> bool:
        return self.is_lost

    def done(self) -> bool:
        return self._status is not None or self.task.done()

    def _check(self) -> None:
        if self._abort is not None:
            raise self._abort
        if self._status is not None:
            raise grpc.aio.UsageError("RPC already finished.")
