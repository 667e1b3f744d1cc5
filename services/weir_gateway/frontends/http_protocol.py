"""HTTP/1.1 of one connection: uvicorn's over httptools, within bounds that neither has."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weir.core.errors import Unavailable
from weir_gateway.frontends.correlation import correlation_of, mark
from weir_gateway.frontends.error_forms import error_form_of
from weir_gateway.frontends.http_connections import ConnectionBook
from weir_gateway.frontends.send_batch import BatchedTransport, SendBatch

_BUSY_RETRY_S = 2.0
_MAX_HEAD_BYTES = 64 << 10
"""Of what comes and is no body: the parser keeps a field until it has come whole, and takes any number of them."""
_MAX_PIPELINED = 16
"""Requests behind one that is being answered. The parser makes them of all that one read brings."""
_READ_BYTES = 32 << 10
"""Of one connection in one pass of the event loop: each that has something is read in the same one, before anything
else is done."""
_MAX_UNREAD_BYTES = _READ_BYTES // 2
"""Of a body: no more is read before these are wanted. uvicorn's bound is two reads."""


def protocol_with_bounds(book: ConnectionBook, head_timeout_s: float) -> Callable[..., asyncio.BaseProtocol]:
    """What uvicorn makes a connection's protocol with. All write through one batch, and are read into one buffer."""
    batch, buffer = SendBatch(), bytearray(_READ_BYTES)

    def make(**of_uvicorn: Any) -> asyncio.BaseProtocol:
        return _SmallReads(_BoundedProtocol(book, batch, head_timeout_s, **of_uvicorn), buffer)

    return make


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """The application where there is no room for the request."""
    error = Unavailable("as many requests as this port takes are open; try again later", retry_after_s=_BUSY_RETRY_S)
    correlation_id = correlation_of(Headers(scope=scope)).correlation_id
    response = error_form_of(scope["path"]).of_error(error, correlation_id)
    mark(response, correlation_id)
    await response(scope, receive, send)


class _OutOfBounds(Exception):
    """Raised in a callback of the parser, which hands it on as an error of the request."""


class _SmallReads(asyncio.BufferedProtocol):
    """Gives a protocol what comes, a buffer at a time; event loops read up to 256 KiB at once. Connections of one event
    loop share the buffer: it is taken, filled and emptied without a pause."""

    def __init__(self, protocol: asyncio.Protocol, buffer: bytearray) -> None:
        self._protocol = protocol
        self._buffer = buffer
        self.connection_made = protocol.connection_made  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(memoryview(self._buffer)[:nbytes]))


class _BoundedProtocol(HttpToolsProtocol):
    """Closes a connection on which no whole head of a request comes in time; uvicorn bounds only the pause between two
    requests. Its own bound counts connections that rest, and it has none for heads."""

    def __init__(self, book: ConnectionBook, batch: SendBatch, head_timeout_s: float, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._book = book
        self._batch = batch
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        """`cycle` is the one that was read last, which may still wait behind this one."""
        self._num_head_bytes = 0
        """Since the last byte of a body, or end of a request."""
        self._num_field_bytes = 0
        """Of the path and the header fields of one head, which may come whole in one read, and end a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        transport = BatchedTransport(transport, self._batch)
        super().connection_made(transport)
        self._book.open()
        self._book.rest(self, transport.close)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self.app = self.config.loaded_app if self._book.has_room(self) else _refuse
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            self.send_400_response(f"what is not the body is longer than {_MAX_HEAD_BYTES} bytes")
        if not self._is_in_head:
            self._book.wake(self)
            self._stop_timer()
        elif self._head_timer is None:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        answering = self._answering
        if answering is None or answering.response_complete or not answering.response_started:
            super().send_400_response(msg)
        else:  # in the middle of an answer nothing else can be said
            self.transport.close()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _OutOfBounds
        self._num_field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_field(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)
        if not self._is_in_head and len(self.cycle.body) > _MAX_UNREAD_BYTES:  # what comes after the answer is dropped
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next request, if that has come already
        if self._is_in_head and not self.transport.is_closing():
            self._book.rest(self, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._book.lose(self)
        super().connection_lost(exc)
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_in_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _count_field(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > _MAX_HEAD_BYTES:
            raise _OutOfBounds

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
