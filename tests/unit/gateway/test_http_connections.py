"""Connections that ask for nothing do not keep others out."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from weir_gateway.http_server import HttpServer

HEAD_TIMEOUT_S = 0.3
SLOW_S = 3 * HEAD_TIMEOUT_S
REQUEST = b"GET /%s HTTP/1.1\r\nHost: here\r\n\r\n"


async def _answer(request: Request) -> PlainTextResponse:
    if request.path_params["pace"] == "slow":
        await asyncio.sleep(SLOW_S)
    return PlainTextResponse("done")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = Starlette(routes=[Route("/{pace}", _answer)])
    failures: list[str] = []
    server = HttpServer(
        app, "127.0.0.1", 0, max_connections=8, on_failure=failures.append, head_timeout_s=HEAD_TIMEOUT_S
    )
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
