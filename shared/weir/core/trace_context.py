"""W3C trace context through headers.

It passes through a process that does not trace, too, so that such a hop does not cut the trace in two.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def traceparent_of(span: Span) -> str:
    """The span as a W3C `traceparent`; empty for a span that is not part of a trace."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, context=trace.set_span_in_context(span, Context()))
    return headers.get("traceparent", "")


def sampled_trace_id(span: Span) -> str:
    """32 hexadecimal digits, of a trace that somebody may look at; else empty."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid and context.trace_flags.sampled else ""


def context_of(traceparent: str) -> Context:
    """The context to start children in; an empty or malformed `traceparent` gives an empty one."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def inject(headers: dict[str, str], context: Context | None = None) -> None:
    """Adds `traceparent` (and `tracestate`) of `context`, default the current one, if there is a trace."""
    _PROPAGATOR.inject(headers, context=context)


def extract(headers: Mapping[str, str]) -> Context:
    """The context that the headers carry; an empty one if they carry none."""
    return _PROPAGATOR.extract(dict(headers), context=Context())
