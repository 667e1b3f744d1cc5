"""A port for clients: nothing is read before it is known who calls and that there is room; never more bodies are
read at once than there is room for, and none of it is lost.
"""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from opentelemetry.trace import NoOpTracer

from weir.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unauthenticated, WeirError
from weir.core.shares import Holder
from weir.rpc.access import Callers, RpcAccess, RpcCaller
from weir.rpc.access import Port as ClientPort
from weir.rpc.body_budget import BodyBudget
from weir.rpc.errors import from_rpc_error
from weir.rpc.port_guard import PortGuard, PortLimits
from weir.rpc.server import ErrorGuard, ReadinessGuard, TraceContextGuard, make_server

LIMITS = PortLimits(max_message_bytes=100_000, max_calls=4, max_side_calls=2, read_timeout_s=0.5)
KEY = (("authorization", "Bearer good"),)


class Text:
    """A parsed request."""

    def __init__(self, data: bytes) -> None:
        self.data = data


@dataclass
class Port:
    """A server behind a guard, with a service for callers who have a key and one for everybody."""

    guard: PortGuard
    bodies: BodyBudget
    parsed: list[int] = field(default_factory=list)
    held: list["weakref.ref[Text]"] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0
    address: str = ""
    channel: Any = None

    def parse(self, data: bytes) -> Text:
        self.parsed.append(len(data))
        text = Text(data)
        self.held.append(weakref.ref(text))
        return text

    async def wait(self) -> None:
        self.num_waiting += 1
        await self.go_on.wait()
        self.num_waiting -= 1

    async def unary_unary(self, request: Text, context: Any) -> bytes:
        if request.data == b"wait":
            await self.wait()
        return request.data[:9]

    async def unary_stream(self, request: Text, context: Any) -> AsyncIterator[bytes]:
        data = request.data
        del request
        yield data[:9]
        if data == b"wait":
            await self.wait()

    async def stream_unary(self, requests: AsyncIterator[Text], context: Any) -> bytes:
        return b"".join([request.data[:9] async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[Text], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.data[:9]

    async def written_stream(self, request: Text, context: Any) -> None:
        data = request.data
        del request
        await context.write(data[:9])
        if data == b"wait":
            await self.wait()

    def handlers(self, service_name: str) -> grpc.GenericRpcHandler:
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        makers = {kind: getattr(grpc, f"{kind}_rpc_method_handler") for kind in kinds}
        makers["written_stream"] = makers["unary_stream"]
        methods = {name: make(getattr(self, name), request_deserializer=self.parse) for name, make in makers.items()}
        return grpc.method_handlers_generic_handler(service_name, methods)

    async def call(
        self,
        data: bytes | None,
        kind: str = "unary_unary",
        service: str = "test.Keyed",
        metadata: Any = KEY,
        *,
        sends: asyncio.Event | None = None,
    ) -> bytes:
        """The answer. Raises the WeirError that the server meant.

        On the wire a single request is a stream of one, so that a client can wait until it `sends`, or send nothing.
        """

        async def one() -> AsyncIterator[bytes]:
            if sends is not None:
                await sends.wait()
            if data is not None:
                yield data

        while True:
            try:
                call = self.channel.stream_stream(f"/{service}/{kind}")(one(), metadata=metadata, timeout=10)
                return b"".join([part async for part in call])
            except grpc.aio.AioRpcError as error:
                if error.details() != "Internal error from Core":  # grpc.aio's, for a write that the answer overtook
                    raise from_rpc_error(error) from None


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    pytest.fail("not within 5 s")


class Caller(NamedTuple):
    tenant: str
    has_peers: bool = False


def check_key(caller: RpcCaller) -> Holder:
    """`good` is the key of the only tenant, `a` and `b` are those of two."""
    key = caller.key or ""
    if key not in ("good", "a", "b"):
        raise Unauthenticated("show a key")
    return Caller(key, has_peers=key != "good")


@asynccontextmanager
async def open_port(limits: PortLimits = LIMITS, max_bodies_bytes: int = 1_000_000) -> AsyncIterator[Port]:
    """Checks at the end that all room came back."""
    bodies = BodyBudget(max_bodies_bytes, sure_bytes=limits.max_message_bytes, wait_s=0.2)
    table = {
        f"{service}/{kind}": (callers, None)
        for service, callers in (("test.Keyed", Callers.TENANT), ("test.Open", Callers.OPEN))
        for kind in KINDS
    }
    port = Port(PortGuard(limits, bodies, RpcAccess(ClientPort.PUBLIC, table)), bodies)
    port.guard.access.answer(Callers.TENANT, check_key)
    readiness = ReadinessGuard(["test.Keyed"])
    readiness.open()
    guards = [TraceContextGuard(NoOpTracer()), readiness, ErrorGuard()]
    server = make_server([port.guard, *guards], limits)
    server.add_generic_rpc_handlers((port.handlers("test.Keyed"), port.handlers("test.Open")))
    port.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    options = [("grpc.max_send_message_length", 1 << 26)]
    try:
        async with grpc.aio.insecure_channel(port.address, options=options) as port.channel:
            yield port
            port.go_on.set()
            assert await port.call(b"end") == b"end"
            assert bodies.num_bytes == 0
    finally:
        await server.stop(None)


KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "written_stream")


@pytest.mark.parametrize("kind", KINDS)
async def test_who_may_call_is_answered_in_every_kind_of_call(kind: str) -> None:
    async with open_port() as port:
        assert await port.call(b"hello", kind) == b"hello"
        assert await port.call(b"x" * 100_000, kind) == b"x" * 9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bytes", [5, 90_000, 30_000_000], ids=["small", "large", "above the limit"])
async def test_of_a_caller_who_is_not_let_in_nothing_is_read(kind: str, num_bytes: int) -> None:
    async with open_port() as port:
        with pytest.raises(Unauthenticated, match="show a key"):
            await port.call(b"x" * num_bytes, kind, metadata=())
        assert port.parsed == []


async def test_a_message_above_the_limit_of_the_port_is_refused_with_the_limit() -> None:
    async with open_port() as port:
        for kind in KINDS:
            with pytest.raises(Overloaded, match=r"larger than max \(100001 vs. 100000\)"):
                await port.call(b"x" * 100_001, kind)
        assert port.parsed == []


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_calls_beyond_the_bound_are_refused_at_once_and_places_come_free(kind: str) -> None:
    async with open_port() as port, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(port.call(b"wait", kind))
        await until(lambda: port.num_waiting == 4)
        with pytest.raises(Overloaded, match="4 of the 4 places for requests at this port are taken") as refused:
            await port.call(b"x")
        assert refused.value.retry_after_s == 1.0
        assert (
            await port.call(b"x", service="test.Open", metadata=()) == b"x"
        )  # whoever asks for health is not shut out
        port.go_on.set()
        await until(lambda: port.num_waiting == 0)
        assert await port.call(b"x") == b"x"


async def test_calls_that_need_no_key_are_bounded_and_keep_nobody_out_who_has_one() -> None:
    async with open_port() as port, asyncio.TaskGroup() as tasks:
        for kind in ("unary_unary", "unary_stream"):
            for _ in range(2):
                tasks.create_task(port.call(b"wait", kind, "test.Open", ()))
        await until(lambda: port.num_waiting == 4)
        for kind in KINDS:
            with pytest.raises(
                Overloaded, match=r"2 of the 2 places for (calls|streams) beside requests at this port are taken"
            ) as refused:
                await port.call(b"x", kind, "test.Open", ())
            assert refused.value.retry_after_s == 1.0
            assert await port.call(b"x", kind) == b"x"
        port.go_on.set()


async def test_messages_that_are_being_read_are_bounded_together_by_the_largest_that_they_may_be() -> None:
    async with open_port(replace(LIMITS, read_timeout_s=9.0), max_bodies_bytes=200_000) as port:
        sends = asyncio.Event()
        slow = [asyncio.create_task(port.call(b"late", sends=sends)) for _ in range(2)]
        await until(lambda: port.bodies.num_bytes == 200_000)
        with pytest.raises(
            Overloaded, match="of the 200000 bytes for bodies that are read at once are taken"
        ) as refused:
            await port.call(b"x")
        assert refused.value.retry_after_s == 1.0
        sends.set()
        assert await asyncio.gather(*slow) == [b"late", b"late"]
        assert await asyncio.gather(*[port.call(b"x") for _ in range(4)]) == [b"x"] * 4


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "written_stream"])
async def test_a_caller_who_sends_no_message_does_not_keep_his_room(kind: str) -> None:
    async with open_port() as port:
        never = asyncio.Event()
        with pytest.raises(DeadlineExceeded, match=r"the request's message took longer than 0\.5 s"):
            await port.call(b"x", kind, sends=never)
        with pytest.raises(InvalidRequest, match="request: there is none: send one message"):
            await port.call(None, kind)
        call = asyncio.create_task(port.call(b"x", kind, sends=never))
        await until(lambda: port.bodies.num_bytes > 0)
        call.cancel()
        await until(lambda: port.bodies.num_bytes == 0)


@pytest.mark.parametrize("kind", ["unary_stream", "written_stream"])
async def test_a_request_is_not_kept_while_its_answer_goes_on(kind: str) -> None:
    async with open_port() as port, asyncio.TaskGroup() as tasks:
        tasks.create_task(port.call(b"wait", kind))
        await until(lambda: port.num_waiting == 1)
        gc.collect()
        assert [ref() for ref in port.held] == [None]
        port.go_on.set()


async def test_there_are_no_more_methods_than_without_a_gate() -> None:
    async with open_port() as port:
        with pytest.raises(WeirError, match="UNIMPLEMENTED"):
            await port.call(b"x", "no_such_method")


async def test_a_connection_has_a_bound_of_streams_and_ends_when_it_only_pings() -> None:
    async with open_port() as port:
        host, _, number = port.address.rpartition(":")
        received = await asyncio.to_thread(_ping_until_closed, host, int(number))
    max_concurrent_streams = b"\x00\x03" + LIMITS.max_streams_per_connection.to_bytes(4, "big")
    assert max_concurrent_streams in received
    assert b"too_many_pings" in received


def _ping_until_closed(host: str, port: int) -> bytes:
    """All that the server sends to a client of HTTP/2 that opens no stream and pings."""
    received = b""
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        connection.sendall(bytes((0, 0, 8, 6, 0, 0, 0, 0, 0, *range(8))) * 20)
        while part := connection.recv(65536):
            received += part
    return received


def test_a_message_that_never_finds_room_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ValueError, match="max_message_bytes 100000: above the 99999 of all bodies"):
        PortGuard(LIMITS, BodyBudget(99_999))
