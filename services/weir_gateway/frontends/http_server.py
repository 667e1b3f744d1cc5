"""uvicorn inside the process's own event loop, on a socket that is bound beforehand."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.core.errors import Unavailable
from weir_gateway.frontends.bodies.unknown_fields import UnknownFields
from weir_gateway.frontends.event_stream import StreamSettings
from weir_gateway.frontends.http_connections import ConnectionBook
from weir_gateway.frontends.http_protocol import protocol_with_bounds

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_CLOSE_CONNECTIONS_S = 2
_KEEP_ALIVE_S = 30
_POLL_S = 0.01
MAX_SHOWN_CHARS = 200
"""Of a client's path, in the log and in errors."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where it listens (port 0: any free one), and how much and for how long a client may hold.

    More than `max_connections` that ask get 503 at once. Of those on which nothing is asked `max_idle_connections` are
    held; over that the one that has been idle longest is closed. `max_body_bytes` is above what any field may hold, so
    that a prompt that is too long is named. `unknown_fields`: what happens to fields of a body that nobody here knows.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_connections: int = 256
    max_idle_connections: int = 8192
    max_body_bytes: int = 18 << 20
    head_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    streams: StreamSettings = field(default_factory=StreamSettings)
    unknown_fields: UnknownFields = "ignore"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, send_timeout_s: float) -> None:
        super().__init__(config)
        self._send_timeout_s = send_timeout_s
        self._next_check_s = 0.0
        self._unread: dict[object, int] = {}
        """Bytes that wait on connections that are being closed, at the last check."""

    async def on_tick(self, counter: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + self._send_timeout_s
            self._end_unread()
        return await super().on_tick(counter)

    def _end_unread(self) -> None:
        """A connection that is closed waits for its client to read what was written before, and counts until then."""
        closing = [connection for connection in self.server_state.connections if connection.transport.is_closing()]
        seen, self._unread = self._unread, {}
        for connection in closing:
            num_bytes = self._unread[connection] = connection.transport.get_write_buffer_size()
            if num_bytes == seen.get(connection):
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the service's main function."""
        yield


class HttpServer:
    """Serves one application from `start` to `stop`.

    `on_failure` is called with the reason when it ends before `stop`: then nobody answers at the port any more.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        on_failure: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._host = settings.host
        self._has_tls = tls is not None
        self._on_failure = on_failure
        self._book = ConnectionBook(settings.max_connections, settings.max_idle_connections)
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http=protocol_with_bounds(self._book, settings.head_timeout_s),  # type: ignore[arg-type]  # it only calls it
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
            ssl_context_factory=None if tls is None else lambda _config, _make: tls,
        )
        self._server = _Server(config, settings.streams.send_timeout_s)
        self._wanted_port = settings.port
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        """Once it has started."""

    async def start(self) -> None:
        """Returns when connections are taken. Raises Unavailable, naming the address, when it cannot be bound."""
        listener = self._bind()
        self.port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http server")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise Unavailable("the HTTP server ended while it started")
            await asyncio.sleep(_POLL_S)
        self._task.add_done_callback(self._check_end)
        logger.info("%s on %s:%d", "HTTPS" if self._has_tls else "HTTP", self._host, self.port)

    async def stop(self) -> None:
        """Lets open responses end for a moment, then closes them."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task])

    def metrics(self) -> dict[str, float]:
        return self._book.metrics()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Where it ends with the server, since its client takes nothing, that is no defect, as uvicorn would log it."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._server.should_exit:
                raise
            logger.warning("%s %s: cut off as the server ends", scope["method"], scope["path"][:MAX_SHOWN_CHARS])

    def _check_end(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is None and self._server.should_exit:
            return
        logger.critical("the HTTP server ended", exc_info=error)
        for listener in self._server.servers:  # still there after an error: clients would wait in its backlog
            listener.close()
        self._on_failure("the HTTP server ended")

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._wanted_port), family=family, backlog=_BACKLOG)
        except OSError as error:
            problem = f"HTTP cannot listen on {self._host}:{self._wanted_port} ({error.strerror or error})"
            raise Unavailable(f"{problem}; choose another --http-port") from error
