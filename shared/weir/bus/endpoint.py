"""Typed messages over a bus: decoded for a handler, counted, and part of the request's trace on both sides."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from opentelemetry import context as current_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from weir.bus.codec import MalformedMessage, check_version, decode, encode, version_headers
from weir.bus.protocol import Bus, BusError, BusMessage, Subscription
from weir.bus.subjects import subject_template
from weir.core import trace_context

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound="DataclassInstance")
ReplyT = TypeVar("ReplyT", bound="DataclassInstance")


class MalformedReply(BusError):
    """The answer is not the message that was expected."""


class BusEndpoint:
    """What one process sends and receives over its bus.

    Spans are made only for messages that belong to a trace: what is sent every second would make one of its own.
    """

    def __init__(self, bus: Bus, tracer: Tracer) -> None:
        self._bus = bus
        self._tracer = tracer
        self._counts: Counter[str] = Counter()
        self._subscriptions: list[Subscription] = []
        self._logged_subjects: set[str] = set()

    async def serve(
        self,
        subject: str,
        request_type: type[RequestT],
        handler: Callable[[RequestT], Awaitable["DataclassInstance | None"]],
        *,
        max_pending: int = 4096,
    ) -> None:
        """Calls `handler` with each message, in order, inside the message's trace context, and sends its answer.

        A malformed message is counted, logged once a subject, and not answered.
        """

        async def on_message(message: BusMessage) -> bytes | None:
            self._counts["received"] += 1
            try:
                check_version(message.headers)
                request = decode(request_type, message.payload)
            except MalformedMessage as error:
                self._count_malformed(message.subject, error)
                return None
            with self._count_failure("handler_failures"), self._process_span(message):
                reply = await handler(request)
            return None if reply is None else encode(reply)

        self._subscriptions.append(await self._bus.subscribe(subject, on_message, max_pending=max_pending))

    async def ask(
        self,
        subject: str,
        message: "DataclassInstance",
        reply_type: type[ReplyT],
        *,
        timeout_s: float,
        context: Context | None = None,
    ) -> ReplyT:
        """One request, sent once. `context` is the trace context, by default the current one. Raises BusError."""
        headers = version_headers()
        self._counts["sent"] += 1
        with self._count_failure("send_failures"), self._send_span(subject, headers, context):
            answer = await self._bus.request(subject, encode(message), timeout_s=timeout_s, headers=headers)
            try:
                return decode(reply_type, answer.payload)
            except MalformedMessage as error:
                self._count_malformed(subject, error)
                raise MalformedReply(f"answer on {subject}: {error}") from error

    async def publish(self, subject: str, message: "DataclassInstance", *, context: Context | None = None) -> None:
        """Sent once, to whoever listens; nobody answers. `context` is the trace that it belongs to, by default none.
        Raises BusError."""
        headers = version_headers()
        self._counts["sent"] += 1
        with self._count_failure("send_failures"), self._send_span(subject, headers, context or Context()):
            await self._bus.publish(subject, encode(message), headers)

    async def close(self) -> None:
        """Ends the subscriptions; the bus stays open."""
        while self._subscriptions:
            await self._subscriptions.pop().close()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges, for `describe()`."""
        names = ("received", "sent", "malformed", "handler_failures", "send_failures")
        return {f"bus_{name}_total": float(self._counts[name]) for name in names} | {
            "bus_dropped_total": float(sum(subscription.num_dropped for subscription in self._subscriptions)),
            "bus_pending": float(sum(subscription.num_pending for subscription in self._subscriptions)),
        }

    def _count_malformed(self, subject: str, error: MalformedMessage) -> None:
        self._counts["malformed"] += 1
        if subject not in self._logged_subjects:
            self._logged_subjects.add(subject)
            logger.warning("malformed message on %s: %s (further ones are only counted)", subject, error)

    @contextmanager
    def _count_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._counts[name] += 1
            raise

    @contextmanager
    def _process_span(self, message: BusMessage) -> Iterator[None]:
        parent = trace_context.extract(message.headers)
        if not trace.get_current_span(parent).get_span_context().is_valid:
            # The subscription's task may have been started inside somebody's trace; this message has none.
            with _attached(Context()):
                yield
            return
        with self._span("process", message.subject, SpanKind.CONSUMER, parent) as span, _attached_span(span, parent):
            yield

    @contextmanager
    def _send_span(self, subject: str, headers: dict[str, str], context: Context | None) -> Iterator[None]:
        parent = current_context.get_current() if context is None else context
        if not trace.get_current_span(parent).get_span_context().is_valid:
            yield
            return
        with self._span("send", subject, SpanKind.PRODUCER, parent) as span:
            trace_context.inject(headers, trace.set_span_in_context(span, parent))
            yield

    @contextmanager
    def _span(self, operation: str, subject: str, kind: SpanKind, parent: Context) -> Iterator[Span]:
        template = subject_template(subject)
        span = self._tracer.start_span(f"{operation} {template}", context=parent, kind=kind)
        span.set_attributes(
            {
                "messaging.system": "nats",
                "messaging.operation.type": operation,
                "messaging.operation.name": operation,
                "messaging.destination.name": subject,
                "messaging.destination.template": template,
            }
        )
        try:
            yield span
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            span.end()


@contextmanager
def _attached(context: Context) -> Iterator[None]:
    token = current_context.attach(context)
    try:
        yield
    finally:
        current_context.detach(token)


@contextmanager
def _attached_span(span: Span, parent: Context) -> Iterator[None]:
    with _attached(trace.set_span_in_context(span, parent)):
        yield
