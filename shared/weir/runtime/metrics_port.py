"""What one process tells by plain HTTP, on a port of its own.

    GET /metrics    its figures alone
    GET /live       200 as long as its loop answers: no other process' death makes it fail
    GET /ready      200 while it serves; 503 before, and from the moment in which it is to end

Whoever reaches the port may read it, so it is on the loopback interface unless a setting names another. One request a
connection, heads of bounded size and time, few connections at once: what a scraper or a probe needs, and nothing else.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import httptools

from weir.core.errors import Unavailable
from weir.telemetry.exposition import Page, is_openmetrics, render
from weir.telemetry.families import Family, gathered
from weir.telemetry.page_cache import PageCache

_log = logging.getLogger(__name__)
_MAX_HEAD_BYTES = 8 << 10
_METRICS, _LIVE, _READY = b"/metrics", b"/live", b"/ready"


class _Head:
    """httptools' callbacks for one request."""

    def __init__(self) -> None:
        self.url = b""
        self.accept = ""
        self.is_whole = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"accept":
            self.accept = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.is_whole = True


@dataclass(frozen=True, slots=True)
class PortBounds:
    """What connections to one port may take."""

    max_connections: int = 16
    head_timeout_s: float = 5.0
    send_timeout_s: float = 10.0
    """From the page's first byte until the client has the last one; then the connection is cut."""


class MetricsPort:
    """Serves from `start` to `stop`. `families` and `is_ready` are called in the event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        families: Callable[[], Sequence[Family]] | None,
        bounds: PortBounds = PortBounds(),
        *,
        is_ready: Callable[[], bool] = lambda: True,
        setting: str = "metrics_port",
    ) -> None:
        """`families`: of the page as it is now; None: it has no page of figures. `setting`: that names the port."""
        self._host = host
        self._port = port
        self._families = families
        self._is_ready = is_ready
        self._setting = setting
        self._bounds = bounds
        self._pages = PageCache[bool, Page]()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0
        """Once it has started."""

    async def start(self) -> None:
        """Raises Unavailable, naming the address, when it cannot be bound."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            problem = f"nothing can be served on {self._host}:{self._port} ({error.strerror or error})"
            raise Unavailable(f"{problem}; choose another --{self._setting.replace('_', '-')}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        _log.info("%s on %s:%d", self._setting, self._host, self.port)

    async def stop(self) -> None:
        """Cuts off what is being answered."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._bounds.max_connections:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            _log.debug("a scraper went away")
        except Exception:  # noqa: BLE001 - the boundary of one connection
            _log.exception("a scrape failed")
        finally:
            # `close` would wait for ever for a client that does not read.
            writer.transport.abort()
            self._open.discard(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._bounds.head_timeout_s):
            status, path, accept = await _read_head(reader)
        if status is HTTPStatus.OK:
            status = self._status_of(path)
        page = Page(f"{status.value} {status.phrase}\n".encode(), "text/plain; charset=utf-8")
        if status is HTTPStatus.OK and path == _METRICS and self._families is not None:
            page = await self._page(self._families, accept)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {page.content_type}\r\n"
        head += f"Content-Length: {len(page.content)}\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(self._bounds.send_timeout_s):
            writer.transport.set_write_buffer_limits(high=0)  # `drain` waits for all of it
            writer.write(head.encode() + page.content)
            await writer.drain()

    def _status_of(self, path: bytes) -> HTTPStatus:
        if path == _READY and not self._is_ready():
            return HTTPStatus.SERVICE_UNAVAILABLE
        is_known = path in (_LIVE, _READY) or (path == _METRICS and self._families is not None)
        return HTTPStatus.OK if is_known else HTTPStatus.NOT_FOUND

    async def _page(self, families: Callable[[], Sequence[Family]], accept: str) -> Page:
        as_openmetrics = is_openmetrics(accept)

        async def make() -> Page:
            return await render(gathered(families()), as_openmetrics=as_openmetrics)

        return await self._pages.page(as_openmetrics, make)


async def _read_head(reader: asyncio.StreamReader) -> tuple[HTTPStatus, bytes, str]:
    """Whether it can be answered, the path, the header Accept. Raises IncompleteReadError when the client goes away."""
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"", ""
    head = _Head()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(data)
        path = httptools.parse_url(head.url).path
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return HTTPStatus.BAD_REQUEST, b"", ""
    if not head.is_whole:
        return HTTPStatus.BAD_REQUEST, b"", ""
    if parser.get_method() != b"GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, path or b"", ""
    return HTTPStatus.OK, path or b"", head.accept
