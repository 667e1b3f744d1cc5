"""Traces: the OpenTelemetry SDK with an OTLP/gRPC exporter. Without an endpoint it is a no-op, and imports neither."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from opentelemetry.trace import NoOpTracerProvider, TracerProvider

import weir

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_SCHEDULE_DELAY_MS = 250
_MAX_QUEUED_SPANS = 8192
_EXPORT_TIMEOUT_S = 2.0
_QUIET_S = 60.0
_EXPORT_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")


class QuietFilter(logging.Filter):
    """Lets one record a minute through: a collector that is away is worth a line, not a line a batch."""

    def __init__(self, quiet_s: float = _QUIET_S, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._quiet_s = quiet_s
        self._now_s = now_s
        self._silent_until_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        del record
        if self._now_s() < self._silent_until_s:
            return False
        self._silent_until_s = self._now_s() + self._quiet_s
        return True


def quieten_exporters() -> None:
    """Of the SDK's loggers, whatever is exported; as often as one likes."""
    for name in _EXPORT_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(present, QuietFilter) for present in logger.filters):
            logger.addFilter(QuietFilter())


def resource_of(role: str, instance: str, process_id: str) -> "Resource":
    """Who a process is, for traces and metrics alike."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - see setup_tracing

    return Resource.create(
        {
            "service.name": f"weir-{role}",
            "service.namespace": instance,
            "service.instance.id": process_id,
            "service.version": weir.__version__,
        }
    )


def setup_tracing(role: str, instance: str, process_id: str, endpoint: str) -> TracerProvider:
    """A provider that exports to `endpoint` (http://HOST:PORT, or https:// for TLS); empty: one that does nothing.

    Exporting happens in a thread of its own with a bounded queue: a collector that is away costs spans, never time.
    """
    if not endpoint:
        return NoOpTracerProvider()
    # A tenth of the time in which a process starts, or starts again while streams wait for it.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    quieten_exporters()
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
    )
    provider = SdkTracerProvider(resource=resource_of(role, instance, process_id), shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS, schedule_delay_millis=_SCHEDULE_DELAY_MS)
    )
    return provider


def shutdown_tracing(provider: TracerProvider, timeout_s: float) -> bool:
    """Sends what is queued, for at most `timeout_s`. Blocks; returns whether it finished in time."""
    if isinstance(provider, NoOpTracerProvider):
        return True
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider  # noqa: PLC0415 - imported by setup_tracing

    if not isinstance(provider, SdkTracerProvider):
        raise TypeError(f"a tracer provider of setup_tracing, not {type(provider).__name__}")
    # The SDK's own time-out of 30 s cannot be passed through the provider; a daemon thread can be left behind.
    flusher = threading.Thread(target=provider.shutdown, name="weir-trace-flush", daemon=True)
    flusher.start()
    flusher.join(timeout_s)
    return not flusher.is_alive()
