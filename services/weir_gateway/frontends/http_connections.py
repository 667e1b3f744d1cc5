"""HTTP/1.1 connections: how many may ask at a time, how many may rest, and for how long."""

import asyncio
from collections.abc import Callable

from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from weir.core.errors import Unavailable
from weir_gateway.frontends.openai_render import error_body, error_headers, error_status
from weir_gateway.frontends.send_batch import BatchedTransport, SendBatch

_BUSY_RETRY_S = 2.0


class ConnectionBook:
    """Connections of one port by whether they rest: on those nothing has been asked, or all is answered.

    Over `max_resting` the one that has rested longest is closed: it would come back anyway, and idle connections keep
    nobody out. Over `max_busy` a request is answered with 503.
    """

    def __init__(self, max_busy: int, max_resting: int) -> None:
        self._max_busy = max_busy
        self._max_resting = max_resting
        self._num = 0
        self._resting: dict[asyncio.Protocol, Callable[[], None]] = {}
        """With what closes it; the one that has rested longest comes first."""
        self._num_closed = 0

    def metrics(self) -> dict[str, float]:
        return {
            "http_connections": float(self._num),
            "http_connections_resting": float(len(self._resting)),
            "http_connections_closed_for_others_total": float(self._num_closed),
        }

    def open(self) -> None:
        self._num += 1

    def rest(self, connection: asyncio.Protocol, close: Callable[[], None]) -> None:
        self._resting.pop(connection, None)
        self._resting[connection] = close
        if len(self._resting) > self._max_resting:
            self._num_closed += 1
            close_oldest = self._resting.pop(next(iter(self._resting)))
            close_oldest()

    def wake(self, connection: asyncio.Protocol) -> None:
        self._resting.pop(connection, None)

    def lose(self, connection: asyncio.Protocol) -> None:
        self.wake(connection)
        self._num -= 1

    def has_room(self, connection: asyncio.Protocol) -> bool:
        """For a request on a connection that rests, or whose last one is just answered."""
        num_others_busy = self._num - len(self._resting) - (connection not in self._resting)
        return num_others_busy < self._max_busy


def protocol_with_bounds(book: ConnectionBook, head_timeout_s: float) -> type[asyncio.Protocol]:
    """HTTP/1.1 that closes connections on which no whole head of a request comes in time; uvicorn bounds only the pause
    between two requests. Its own bound counts connections that rest. What they write in one pass of the event loop is
    sent together."""
    batch = SendBatch()
    error = Unavailable("as many requests as this port takes are open; try again later", retry_after_s=_BUSY_RETRY_S)
    refusal = JSONResponse(error_body(error), error_status(error), headers=error_headers(error))

    class Protocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            transport = BatchedTransport(transport, batch)
            super().connection_made(transport)
            book.open()
            book.rest(self, transport.close)
            self._head_timer = self.loop.call_later(head_timeout_s, transport.close)

        def data_received(self, data: bytes) -> None:
            if self._is_in_head:
                self.app = self.config.loaded_app if book.has_room(self) else refusal
            super().data_received(data)
            if not self._is_in_head:
                book.wake(self)
                self._stop_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(head_timeout_s, self.transport.close)

        def on_response_complete(self) -> None:
            super().on_response_complete()  # begins the next request, if that has come already
            if self._is_in_head and not self.transport.is_closing():
                book.rest(self, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            book.lose(self)
            super().connection_lost(exc)

        @property
        def _is_in_head(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Protocol
