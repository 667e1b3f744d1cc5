"""What this project relies on in grpc.aio, over the real one and over the simulated one: the same comes of it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.simulation.grpc_client import SimChannel
from tests.simulation.grpc_server import SimServer
from tests.simulation.loop import SimLoop, SimProcess
from tests.simulation.network import Network
from weir.core.errors import Overloaded
from weir.rpc.channel import make_channel
from weir.rpc.errors import from_rpc_error
from weir.rpc.server import ErrorGuard, make_server
from weir.wire.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 20.0
_WELCOME = worker_pb2.ServeResponse(welcome=worker_pb2.Welcome(worker_id="w"))
_HELLO = worker_pb2.ServeRequest(hello=worker_pb2.Hello(gateway_id="g"))
_PADDING = "x" * 65_536
"""Two dozen of these fill the window of a stream, as so many messages of any size fill the simulated one's."""


@dataclass
class Seen:
    """What came of it, on both sides."""

    at_client: list[str] = field(default_factory=list)
    at_server: list[str] = field(default_factory=list)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)


class Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, seen: Seen, handler: "Handler") -> None:
        self._seen = seen
        self._handler = handler

    async def Serve(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            async for response in self._handler(self._seen, request_iterator, context):
                yield response
        except asyncio.CancelledError:
            self._seen.at_server.append("cancelled")
            raise
        finally:
            self._seen.has_ended.set()


class Inference(inference_pb2_grpc.InferenceServicer):
    """Cancel: answers by the request's id. Generate: writes until its client has gone."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    async def Cancel(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._seen.at_server.append(request.request_id)
        match request.request_id:
            case "overloaded":
                raise Overloaded("too much", retry_after_s=1.5)
            case "defect":
                raise RuntimeError("on purpose")
            case "abort":
                await context.abort(grpc.StatusCode.ABORTED, "not now")
            case "late":
                try:
                    await asyncio.sleep(_TIMEOUT_S)
                except asyncio.CancelledError:
                    self._seen.at_server.append("cancelled")
                    raise
                finally:
                    self._seen.has_ended.set()
        return inference_pb2.CancelResponse(found=True)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        del request
        context.add_done_callback(lambda _: self._seen.has_ended.set())
        for index in range(1000):
            await context.write(inference_pb2.GenerateResponse(first_index=index, text=_PADDING))
            self._seen.at_server[:] = [f"wrote up to {index}"]
            await asyncio.sleep(0)


Handler = Callable[[Seen, Any, Any], AsyncIterator[Any]]
Scenario = Callable[[Seen, Any, Any], Awaitable[None]]
"""Gets what it sees, a channel to the server, and the server."""


async def _what_of(seen: Seen, awaitable: Awaitable[Any]) -> None:
    """Notes what became of it at the client."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            result = await awaitable
    except grpc.aio.AioRpcError as error:
        seen.at_client.append(error.code().name)
    except asyncio.InvalidStateError:
        seen.at_client.append("invalid state")
    except asyncio.CancelledError:
        seen.at_client.append("cancelled")
    except TimeoutError:
        seen.at_client.append("nothing")
    else:
        kind = "end" if result is grpc.aio.EOF else type(result).__name__
        seen.at_client.append(kind)


async def _served(seen: Seen, server: Any, address: str, handler: Handler) -> None:
    worker_pb2_grpc.add_WorkerServicer_to_server(Worker(seen, handler), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(seen), server)  # type: ignore[abstract]
    del address
    await server.start()


def on_real(handler: Handler, scenario: Scenario) -> Seen:
    async def run() -> Seen:
        seen, server = Seen(), make_server([ErrorGuard()])
        port = server.add_insecure_port("127.0.0.1:0")
        await _served(seen, server, "", handler)
        async with make_channel(f"127.0.0.1:{port}") as channel:
            await scenario(seen, channel, server)
        await server.stop(0)
        return seen

    return asyncio.run(run())


def on_simulated(handler: Handler, scenario: Scenario) -> Seen:
    loop = SimLoop(random.Random(1), 100_000)
    network = Network(loop, random.Random(2))
    serving, asking = SimProcess("server", 1), SimProcess("client", 2)
    made: list[Any] = []

    async def serve() -> None:
        seen, server = Seen(), SimServer(network, [ErrorGuard()])
        server.add_insecure_port("here")
        await _served(seen, server, "here", handler)
        made.extend((seen, server))

    async def ask() -> None:
        while not made:  # noqa: ASYNC110 - it has started in a moment
            await asyncio.sleep(0.01)
        async with SimChannel(network, "here") as channel:
            await scenario(made[0], channel, made[1])

    loop.create_task(serve(), context=serving.context.copy())
    task = loop.create_task(ask(), context=asking.context.copy())
    task.add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    task.result()
    loop.end()
    seen: Seen = made[0]
    return seen


async def _until_cancelled(seen: Seen, requests: Any, context: Any) -> AsyncIterator[Any]:
    del context
    yield _WELCOME
    async for _ in requests:
        seen.at_server.append("message")
    seen.at_server.append("no more messages")
    yield _WELCOME


async def _two(seen: Seen, requests: Any, context: Any) -> AsyncIterator[Any]:
    del seen, requests, context
    yield _WELCOME
    yield _WELCOME


async def _one_and_abort(seen: Seen, requests: Any, context: Any) -> AsyncIterator[Any]:
    del seen, requests
    yield _WELCOME
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")


async def _stays(seen: Seen, requests: Any, context: Any) -> AsyncIterator[Any]:
    del requests, context
    yield _WELCOME
    seen.at_server.append("waits")
    await asyncio.sleep(_TIMEOUT_S)


def _stub(channel: Any) -> Any:
    return worker_pb2_grpc.WorkerStub(channel)


async def reads_to_the_end(seen: Seen, channel: Any, server: Any) -> None:
    del server
    call = _stub(channel).Serve()
    for _ in range(4):
        await _what_of(seen, call.read())
    seen.at_client.append((await call.code()).name)
    await _what_of(seen, call.write(_HELLO))


async def writes_and_closes_its_half(seen: Seen, channel: Any, server: Any) -> None:
    del server
    call = _stub(channel).Serve()
    await _what_of(seen, call.write(_HELLO))
    await _what_of(seen, call.write(_HELLO))
    await _what_of(seen, call.done_writing())
    await _what_of(seen, call.write(_HELLO))
    for _ in range(3):
        await _what_of(seen, call.read())


async def cancels(seen: Seen, channel: Any, server: Any) -> None:
    del server
    call = _stub(channel).Serve()
    await _what_of(seen, call.read())
    call.cancel()
    await _what_of(seen, call.read())
    seen.at_client.append((await call.code()).name)
    await _what_of(seen, call.write(_HELLO))
    await seen.has_ended.wait()


async def is_cancelled_while_it_reads(seen: Seen, channel: Any, server: Any) -> None:
    del server
    call = _stub(channel).Serve()
    await _what_of(seen, call.read())
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0.05)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    seen.at_client.append(str(call.cancelled()))
    await seen.has_ended.wait()


async def cancels_while_another_task_reads(seen: Seen, channel: Any, server: Any) -> None:
    del server
    call = _stub(channel).Serve()
    await _what_of(seen, call.read())
    reading = asyncio.create_task(_what_of(seen, call.read()))
    await asyncio.sleep(0.05)
    call.cancel()
    await reading
    await seen.has_ended.wait()


async def loses_the_server(seen: Seen, channel: Any, server: Any) -> None:
    call = _stub(channel).Serve()
    await _what_of(seen, call.read())
    reading = asyncio.create_task(_what_of(seen, call.read()))
    await asyncio.sleep(0.05)
    await server.stop(0)
    await reading
    again = _stub(channel).Serve()
    await _what_of(seen, again.write(_HELLO))
    await _what_of(seen, again.read())
    await _what_of(seen, inference_pb2_grpc.InferenceStub(channel).Cancel(inference_pb2.CancelRequest()))


async def asks(seen: Seen, channel: Any, server: Any) -> None:
    del server
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    for request_id in ("fine", "abort", "overloaded", "defect"):
        await _what_of(seen, stub.Cancel(inference_pb2.CancelRequest(request_id=request_id)))
    try:
        await stub.Cancel(inference_pb2.CancelRequest(request_id="overloaded"))
    except grpc.aio.AioRpcError as error:
        seen.at_client.append(repr(from_rpc_error(error).retry_after_s))
    await _what_of(seen, stub.Cancel(inference_pb2.CancelRequest(request_id="late"), timeout=0.2))
    await seen.has_ended.wait()


async def goes_away_from_a_writer(seen: Seen, channel: Any, server: Any) -> None:
    """The writer waits for room at some time, and is told when the client goes."""
    del server
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(inference_pb2.GenerateRequest())
    await _what_of(seen, call.read())
    await asyncio.sleep(0.5)
    seen.at_client.append("waits" if seen.at_server != ["wrote up to 999"] else "has written all")
    call.cancel()
    await seen.has_ended.wait()
    seen.at_server.clear()


SCENARIOS: dict[str, tuple[Handler, Scenario, list[str], list[str]]] = {
    "messages, then the end": (
        _two,
        reads_to_the_end,
        ["ServeResponse", "ServeResponse", "end", "end", "OK", "invalid state"],
        [],
    ),
    "a message, then a bad end": (
        _one_and_abort,
        reads_to_the_end,
        ["ServeResponse", *["FAILED_PRECONDITION"] * 3, "FAILED_PRECONDITION", "invalid state"],
        [],
    ),
    "a half that is closed": (
        _until_cancelled,
        writes_and_closes_its_half,
        ["NoneType", "NoneType", "NoneType", "invalid state", "ServeResponse", "ServeResponse", "end"],
        ["message", "message", "no more messages"],
    ),
    "a call that is cancelled": (
        _stays,
        cancels,
        ["ServeResponse", "cancelled", "CANCELLED", "invalid state"],
        ["waits", "cancelled"],
    ),
    "a reader that is cancelled": (
        _stays,
        is_cancelled_while_it_reads,
        ["ServeResponse", "True"],
        ["waits", "cancelled"],
    ),
    "a call that is cancelled beside its reader": (
        _stays,
        cancels_while_another_task_reads,
        ["ServeResponse", "cancelled"],
        ["waits", "cancelled"],
    ),
    "a server that goes": (
        _stays,
        loses_the_server,
        ["ServeResponse", "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"],
        ["waits", "cancelled"],
    ),
    "unary calls": (
        _two,
        asks,
        ["CancelResponse", "ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL", "1.5", "DEADLINE_EXCEEDED"],
        ["fine", "abort", "overloaded", "defect", "overloaded", "late", "cancelled"],
    ),
    "a client that does not read": (_two, goes_away_from_a_writer, ["GenerateResponse", "waits"], []),
}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("run", [on_real, on_simulated])
def test_the_same_comes_of_it(run: Callable[[Handler, Scenario], Seen], name: str) -> None:
    handler, scenario, at_client, at_server = SCENARIOS[name]
    seen = run(handler, scenario)
    assert (seen.at_client, seen.at_server) == (at_client, at_server)
