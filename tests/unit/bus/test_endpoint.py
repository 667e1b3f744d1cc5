"""Typed messages over the in-memory bus: counting, malformed ones, traces."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from weir.bus.codec import VERSION_HEADER, encode
from weir.bus.endpoint import BusEndpoint, MalformedReply
from weir.bus.in_memory import InMemoryBus, InMemoryHub
from weir.bus.messages import Ack, Cancel, GrantReply
from weir.bus.protocol import BusTimeout
from weir.bus.subjects import Subjects

SUBJECT = Subjects("test").cancel


class Peers:
    """Two processes on one hub, and the spans that both make."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        hub = InMemoryHub()
        self.raw: InMemoryBus = hub.connect()
        self.asking = BusEndpoint(self.raw, self.tracer)
        self._serving_bus = hub.connect()
        self.serving = BusEndpoint(self._serving_bus, self.tracer)

    def span(self, name: str) -> ReadableSpan:
        return next(span for span in self._exporter.get_finished_spans() if span.name == name)

    @property
    def num_spans(self) -> int:
        return len(self._exporter.get_finished_spans())

    async def close(self) -> None:
        await self.serving.close()
        await self.raw.close()
        await self._serving_bus.close()
        self.provider.shutdown()


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    both = Peers()
    yield both
    await both.close()


async def acknowledge(cancel: Cancel) -> Ack:
    return Ack(epoch=len(cancel.request_id))


async def test_a_typed_request_gets_a_typed_answer_and_both_sides_count_it(peers: Peers) -> None:
    await peers.serving.serve(SUBJECT, Cancel, acknowledge)
    assert await peers.asking.ask(SUBJECT, Cancel("abc", "g"), Ack, timeout_s=5) == Ack(3)
    assert peers.serving.metrics()["bus_received_total"] == 1
    assert peers.asking.metrics()["bus_sent_total"] == 1


@pytest.mark.parametrize(
    ("payload", "headers"),
    [(b"\xc1 junk", {}), (encode(Ack(1)), {}), (encode(Cancel("a", "g")), {VERSION_HEADER: "9"})],
)
async def test_malformed_messages_are_counted_logged_once_and_not_answered(
    peers: Peers, caplog: pytest.LogCaptureFixture, payload: bytes, headers: dict[str, str]
) -> None:
    await peers.serving.serve(SUBJECT, Cancel, acknowledge)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(BusTimeout):
                await peers.raw.request(SUBJECT, payload, timeout_s=0.05, headers=headers)
    assert peers.serving.metrics()["bus_malformed_total"] == 3
    assert caplog.text.count("malformed message on weir.test.scheduler.cancel") == 1
    assert await peers.asking.ask(SUBJECT, Cancel("abc", "g"), Ack, timeout_s=5) == Ack(3)


async def test_an_answer_of_the_wrong_kind_is_an_error_of_the_bus(peers: Peers) -> None:
    await peers.serving.serve(SUBJECT, Cancel, acknowledge)
    with pytest.raises(MalformedReply, match="accepted: is missing"):
        await peers.asking.ask(SUBJECT, Cancel("abc", "g"), GrantReply, timeout_s=5)
    assert peers.asking.metrics()["bus_malformed_total"] == 1


async def test_a_failing_handler_is_counted(peers: Peers) -> None:
    async def fail(cancel: Cancel) -> Ack:
        raise RuntimeError(cancel.request_id)

    await peers.serving.serve(SUBJECT, Cancel, fail)
    with pytest.raises(BusTimeout):
        await peers.asking.ask(SUBJECT, Cancel("abc", "g"), Ack, timeout_s=0.05)
    assert peers.serving.metrics()["bus_handler_failures_total"] == 1
    assert peers.asking.metrics()["bus_send_failures_total"] == 1


async def test_a_trace_goes_on_through_the_bus_into_what_the_handler_does(peers: Peers) -> None:
    async def work(cancel: Cancel) -> Ack:
        peers.tracer.start_span("inside").end()
        return Ack(len(cancel.request_id))

    await peers.serving.serve(SUBJECT, Cancel, work)
    with peers.tracer.start_as_current_span("root") as root:
        await peers.asking.ask(SUBJECT, Cancel("abc", "g"), Ack, timeout_s=5)
    send = peers.span("send weir.{instance}.scheduler.cancel")
    process = peers.span("process weir.{instance}.scheduler.cancel")
    inside = peers.span("inside")
    chain = [root.get_span_context().span_id]
    for span, kind in ((send, SpanKind.PRODUCER), (process, SpanKind.CONSUMER), (inside, SpanKind.INTERNAL)):
        assert span.parent is not None
        assert span.context is not None
        assert (span.parent.span_id, span.kind) == (chain[-1], kind)
        assert span.context.trace_id == root.get_span_context().trace_id
        chain.append(span.context.span_id)
    assert process.attributes is not None
    assert process.attributes["messaging.system"] == "nats"
    assert process.attributes["messaging.destination.name"] == SUBJECT


async def test_what_is_published_for_a_request_belongs_to_its_trace(peers: Peers) -> None:
    heard: list[str] = []

    async def note(cancel: Cancel) -> None:
        heard.append(cancel.request_id)

    await peers.serving.serve(SUBJECT, Cancel, note)
    with peers.tracer.start_as_current_span("request") as request:
        context = trace.set_span_in_context(request, Context())
    await peers.asking.publish(SUBJECT, Cancel("abc", "g"), context=context)
    async with asyncio.timeout(5):
        while peers.num_spans < 3:  # noqa: ASYNC110 - nothing tells that it has come
            await asyncio.sleep(0.001)
    assert (heard, peers.asking.metrics()["bus_sent_total"]) == (["abc"], 1)
    send = peers.span("send weir.{instance}.scheduler.cancel")
    process = peers.span("process weir.{instance}.scheduler.cancel")
    assert send.parent is not None
    assert send.context is not None
    assert process.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert process.parent.span_id == send.context.span_id


async def test_a_message_outside_of_any_trace_makes_no_span(peers: Peers) -> None:
    current: list[trace.SpanContext] = []

    async def look(cancel: Cancel) -> Ack:
        current.append(trace.get_current_span().get_span_context())
        return Ack(len(cancel.request_id))

    with peers.tracer.start_as_current_span("whoever subscribed"):
        await peers.serving.serve(SUBJECT, Cancel, look)
        await peers.asking.ask(SUBJECT, Cancel("abc", "g"), Ack, timeout_s=5, context=Context())
    assert [span_context.is_valid for span_context in current] == [False]
    assert peers.num_spans == 1


async def test_a_request_without_answer_marks_its_span(peers: Peers) -> None:
    async def say_nothing(cancel: Cancel) -> None:
        del cancel

    await peers.serving.serve(SUBJECT, Cancel, say_nothing)
    with peers.tracer.start_as_current_span("root"), pytest.raises(BusTimeout):
        await peers.asking.ask(SUBJECT, Cancel("abc", "g"), Ack, timeout_s=0.05)
    attributes = peers.span("send weir.{instance}.scheduler.cancel").attributes
    assert attributes is not None
    assert attributes["error.type"] == "BusTimeout"
