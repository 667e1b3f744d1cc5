"""`GET /metrics` of one process, on a port of its own: its figures alone.

Whoever reaches the port may read it, so it is on the loopback interface unless a setting names another. One request a
connection, heads of bounded size and time, few connections at once: what a scraper needs, and nothing else.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

import httptools

from weir.core.errors import Unavailable
from weir.telemetry.described import Described, families_of
from weir.telemetry.exposition import Page, is_openmetrics, render
from weir.telemetry.families import gathered
from weir.telemetry.page_cache import PageCache

_log = logging.getLogger(__name__)
_MAX_CONNECTIONS = 16
_MAX_HEAD_BYTES = 8 << 10
_HEAD_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0
_PATH = b"/metrics"


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


class MetricsPort:
    """Serves from `start` to `stop`. `describe` is called in the event loop."""

    def __init__(self, host: str, port: int, describe: Callable[[], Described]) -> None:
        self._host = host
        self._port = port
        self._describe = describe
        self._pages = PageCache[bool, Page]()
        self._server: asyncio.Server | None = None
        self._num_open = 0
        self.port = 0
        """Once it has started."""

    async def start(self) -> None:
        """Raises Unavailable, naming the address, when it cannot be bound."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            problem = f"metrics cannot be served on {self._host}:{self._port} ({error.strerror or error})"
            raise Unavailable(f"{problem}; choose another --metrics-port") from error
        self.port = self._server.sockets[0].getsockname()[1]
        _log.info("metrics on %s:%d", self._host, self.port)

    async def stop(self) -> None:
        """What is being answered ends with the process."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= _MAX_CONNECTIONS:
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            _log.debug("a scraper went away")
        except Exception:  # noqa: BLE001 - the boundary of one connection
            _log.exception("a scrape failed")
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            status, accept = await _read_head(reader)
        page = Page(f"{status.value} {status.phrase}\n".encode(), "text/plain; charset=utf-8")
        if status is HTTPStatus.OK:
            page = await self._page(accept)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {page.content_type}\r\n"
        head += f"Content-Length: {len(page.content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + page.content)
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await writer.drain()

    async def _page(self, accept: str) -> Page:
        as_openmetrics = is_openmetrics(accept)

        async def make() -> Page:
            return await render(gathered(families_of(self._describe())), as_openmetrics=as_openmetrics)

        return await self._pages.page(as_openmetrics, make)


async def _read_head(reader: asyncio.StreamReader) -> tuple[HTTPStatus, str]:
    """What is to be answered, and the header Accept. Raises IncompleteReadError when the client goes away."""
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, ""
    head = _Head()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(data)
        path = httptools.parse_url(head.url).path
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return HTTPStatus.BAD_REQUEST, ""
    if not head.is_whole:
        return HTTPStatus.BAD_REQUEST, ""
    if path != _PATH:
        return HTTPStatus.NOT_FOUND, ""
    if parser.get_method() != b"GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, ""
    return HTTPStatus.OK, head.accept
