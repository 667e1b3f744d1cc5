"""What a client may send that is no body, and how many requests at once: bounded, whatever the parser would take."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from weir_gateway.frontends.http_server import HttpServer, HttpSettings

HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20


class Served:
    """An application that counts what it is asked and how it ends; `/stream` goes on until its client leaves."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.was_left = asyncio.Event()

    async def answer(self, request: Request) -> PlainTextResponse:
        self.bodies.append(await request.body())
        return PlainTextResponse(f"answer {len(self.bodies)}.")

    async def stream(self, request: Request) -> StreamingResponse:
        async def words() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"word "
                    await asyncio.sleep(0.01)
            finally:
                self.was_left.set()

        del request
        return StreamingResponse(words())


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
async def port(served: Served) -> AsyncIterator[int]:
    app = Starlette(routes=[Route("/", served.answer, methods=["POST"]), Route("/stream", served.stream)])
    server = HttpServer(app, HttpSettings(), pytest.fail)
    await server.start()
    yield server.port
    await server.stop()


def endless_field() -> Iterator[bytes]:
    yield HEAD + b"X-Long: "
    while True:
        yield b"a" * 4096


def endlessly_many_fields() -> Iterator[bytes]:
    yield HEAD
    while True:
        yield b"X-Many: a\r\n" * 400


def endless_path() -> Iterator[bytes]:
    yield b"POST /"
    while True:
        yield b"a" * 4096


def endless_trailer() -> Iterator[bytes]:
    yield CHUNKED + b"3\r\nabc\r\n0\r\n"
    while True:
        yield b"X-Many: a\r\n" * 400


def endless_chunk_extension() -> Iterator[bytes]:
    yield CHUNKED + b"3;name="
    while True:
        yield b"a" * 4096


@pytest.mark.parametrize(
    "pieces", [endless_field, endlessly_many_fields, endless_path, endless_trailer, endless_chunk_extension]
)
async def test_what_never_becomes_a_body_is_refused_before_much_of_it_has_come(port: int, pieces: object) -> None:
    assert callable(pieces)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    num_sent = 0
    async with asyncio.timeout(20):
        for piece in pieces():
            writer.write(piece)
            num_sent += len(piece)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
            assert num_sent < 16 * MIB
        with_answer = await _read(reader)
    assert with_answer == b"" or with_answer.startswith(b"HTTP/1.1 400")  # the rest that was sent may reset it
    writer.close()


async def test_a_long_head_that_keeps_to_the_bound_is_taken(port: int) -> None:
    answer = await ask(port, HEAD + b"X-Long: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"answer 1.")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: here\r\n",
        HEAD + b"X-Long: " + b"a" * 100_000 + b"\r\n",
        HEAD + b"X-Many: a\r\n" * 10_000,
    ],
    ids=["path", "field", "fields"],
)
async def test_a_head_over_the_bound_is_refused_though_it_comes_whole_and_has_no_body(
    port: int, served: Served, head: bytes
) -> None:
    for _ in range(5):  # so much comes in one read, or in two
        answer = await ask(port, head + b"Content-Length: 0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
    assert served.bodies == []


async def test_a_body_in_many_small_chunks_is_taken_whatever_their_frames_come_to(port: int, served: Served) -> None:
    chunks = b"".join(b"1;a=%06d\r\n.\r\n" % index for index in range(20_000))
    answer = await ask(port, HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert answer.endswith(b"answer 1.")
    assert served.bodies == [b"." * 20_000]


@pytest.mark.parametrize("body", [b"no length\r\n", b"5\r\nabcdeXX"], ids=["length", "end of a chunk"])
async def test_a_body_that_breaks_the_protocol_is_answered_with_400(port: int, served: Served, body: bytes) -> None:
    answer = await ask(port, CHUNKED + body)
    assert answer.startswith(b"HTTP/1.1 400")
    assert served.bodies == []


async def test_requests_that_come_together_are_answered_in_their_order(port: int, served: Served) -> None:
    requests = b"".join(HEAD + b"Content-Length: 1\r\n\r\n%d" % index for index in range(8))
    last = HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\n8"
    answer = await ask(port, requests + last)
    assert [answer.index(b"answer %d." % index) for index in range(1, 10)] == sorted(
        answer.index(b"answer %d." % index) for index in range(1, 10)
    )
    assert served.bodies == [b"%d" % index for index in range(9)]


async def test_a_crowd_of_requests_in_one_piece_ends_the_connection(port: int, served: Served) -> None:
    await ask(port, (HEAD + b"Content-Length: 0\r\n\r\n") * 2000)
    assert len(served.bodies) < 50


async def test_a_stream_whose_client_leaves_is_told_though_another_request_was_sent_behind_it(
    port: int, served: Served
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stream HTTP/1.1\r\nHost: here\r\n\r\n" + HEAD + b"Content-Length: 0\r\n\r\n")
    async with asyncio.timeout(10):
        await reader.readuntil(b"word")
        writer.transport.abort()
        await served.was_left.wait()
    assert served.bodies == []


async def ask(port: int, request: bytes) -> bytes:
    """All that comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await _read(reader)
    writer.close()
    return answer


async def _read(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            answer += piece
    return answer
