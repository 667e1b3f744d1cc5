"""The span of a request's time in its queue."""

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer


class QueueSpans:
    """One span a queued request that is part of a trace. Every request that enters leaves, so that none stays open."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[str, Span] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def enter(self, request_id: str, lane: str) -> None:
        """The parent is the current span: the one that processes the Submit."""
        if not trace.get_current_span().get_span_context().is_valid:
            return
        attributes = {"weir.request.id": request_id, "weir.lane": lane}
        self._spans[request_id] = self._tracer.start_span("queue", kind=SpanKind.INTERNAL, attributes=attributes)

    def leave(self, request_id: str, outcome: str, *, is_error: bool = False) -> Context:
        """Ends the span; what follows from it goes on in the context that is returned."""
        span = self._spans.pop(request_id, None)
        if span is None:
            return Context()
        span.set_attribute("weir.queue.outcome", outcome)
        if is_error:
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()
        return trace.set_span_in_context(span, Context())

    def close(self) -> None:
        for request_id in list(self._spans):
            self.leave(request_id, "scheduler_stopped", is_error=True)
