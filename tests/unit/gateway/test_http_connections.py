"""Connections that ask for nothing, or take nothing, do not keep others out."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from weir_gateway.frontends.event_stream import StreamSettings
from weir_gateway.frontends.http_connections import ConnectionBook
from weir_gateway.frontends.http_server import HttpServer, HttpSettings

HEAD_TIMEOUT_S = 0.3
SLOW_S = 3 * HEAD_TIMEOUT_S
REQUEST = b"GET /%s HTTP/1.1\r\nHost: here\r\n\r\n"
CLOSING_REQUEST = b"GET /%s HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
SEND_TIMEOUT_S = 2.0
MAX_IDLE = 20
BIG = 8 << 20
"""More than the kernel takes for a client that does not read."""


async def _answer(request: Request) -> PlainTextResponse:
    if request.path_params["pace"] == "slow":
        await asyncio.sleep(SLOW_S)
    return PlainTextResponse("." * BIG if request.path_params["pace"] == "big" else "done")


@pytest.fixture
def head_timeout_s() -> float:
    return HEAD_TIMEOUT_S


@pytest.fixture
async def port(head_timeout_s: float) -> AsyncIterator[int]:
    app = Starlette(routes=[Route("/{pace}", _answer)])
    failures: list[str] = []
    settings = HttpSettings(
        max_connections=1,
        max_idle_connections=MAX_IDLE,
        head_timeout_s=head_timeout_s,
        streams=StreamSettings(send_timeout_s=SEND_TIMEOUT_S),
    )
    server = HttpServer(app, settings, failures.append)
    await server.start()
    yield server.port
    await server.stop()
    assert failures == []


@pytest.mark.parametrize("begun", [b"", b"GET /fast HTTP/1.1\r\nHost: he"], ids=["nothing", "half a head"])
async def test_a_connection_on_which_no_whole_head_comes_is_closed(port: int, begun: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()


async def test_one_that_stops_in_its_second_head_is_closed_too(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST % b"fast")
    async with asyncio.timeout(10):
        await reader.readuntil(b"done")
        writer.write(b"GET /fast HT")
        assert await reader.read() == b""
    writer.close()


async def test_an_answer_may_take_longer_than_a_head(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST % b"slow")
    async with asyncio.timeout(10):
        assert b"200 OK" in await reader.readuntil(b"done")
    writer.close()


async def connect_with_a_small_window(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=client, limit=4096)


async def wait_for_status(port: int, wanted: bytes) -> None:
    """Asks until the answer is `wanted`."""
    status = b""
    while status != wanted:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CLOSING_REQUEST % b"fast")
        words = (await reader.read()).split()
        status = words[1] if len(words) > 1 else b""  # closed, should this machine be slow
        writer.close()
        await asyncio.sleep(0.05)


async def test_one_that_never_reads_its_answer_gives_its_connection_back(port: int) -> None:
    _, writer = await connect_with_a_small_window(port)
    writer.write(CLOSING_REQUEST % b"big")
    async with asyncio.timeout(20):
        await wait_for_status(port, b"503")
        await wait_for_status(port, b"200")
    writer.close()


async def test_one_that_reads_slowly_gets_its_whole_answer(port: int) -> None:
    reader, writer = await connect_with_a_small_window(port)
    writer.write(CLOSING_REQUEST % b"big")
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        num_bytes = 0
        while data := await reader.read(1 << 16):
            num_bytes += len(data)
            await asyncio.sleep(0.001)
    assert b"200 OK" in head
    assert num_bytes == BIG
    writer.close()


@pytest.mark.parametrize("head_timeout_s", [60.0])
async def test_idle_connections_keep_nobody_out_and_over_their_bound_the_longest_idle_is_closed(port: int) -> None:
    first, first_writer = await asyncio.open_connection("127.0.0.1", port)
    others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_IDLE - 1)]
    async with asyncio.timeout(10):
        await asyncio.sleep(0)
        assert not first.at_eof()
        for _ in range(2):  # the port takes one request at a time, whatever rests
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CLOSING_REQUEST % b"fast")
            assert b"200 OK" in await reader.read()
            writer.close()
        assert await first.read() == b""
        newest = others[-1][1]
        newest.write(CLOSING_REQUEST % b"fast")
        assert b"200 OK" in await others[-1][0].read()
    for _, writer in (*others, (first, first_writer)):
        writer.close()


async def test_a_request_too_many_is_told_when_to_try_again(port: int) -> None:
    _, slow = await asyncio.open_connection("127.0.0.1", port)
    slow.write(REQUEST % b"slow")
    await asyncio.sleep(0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((CLOSING_REQUEST % b"fast").replace(b"Host: here", b"Host: here\r\nX-Request-Id: mine/7"))
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 2" in answer.lower()
    assert b"x-request-id: mine/7" in answer.lower()
    for one in (slow, writer):
        one.close()


def test_the_book_says_how_many_connections_there_are_how_many_rest_and_how_many_made_room() -> None:
    book, closed = ConnectionBook(1, 1), list[asyncio.Protocol]()
    first, second, busy = (asyncio.Protocol() for _ in range(3))
    for _ in (first, second, busy):
        book.open()
    for connection in (first, second):
        book.rest(connection, lambda connection=connection: closed.append(connection))  # type: ignore[misc]
    assert closed == [first]
    assert book.metrics() == {
        "http_connections": 3,
        "http_connections_resting": 1,
        "http_connections_closed_for_others_total": 1,
    }
