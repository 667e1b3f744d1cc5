"""An OTLP/gRPC receiver of traces and metrics, in memory."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span as it came over the wire; ids are hex, `parent_id` is empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    process_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    linked_span_ids: tuple[str, ...]
    raw: bytes = b""
    """All of it, events and status too."""


@dataclass(frozen=True, slots=True)
class ReceivedPoint:
    """One point of a metric as it came over the wire; of a histogram `value` is the sum."""

    name: str
    kind: str
    """sum, gauge or histogram."""
    service: str
    process_id: str
    attributes: dict[str, object]
    value: float
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    exemplars: tuple[tuple[float, str], ...] = ()
    """Value and trace id."""
    start_ns: int = 0
    least: float | None = None
    """Of a histogram that knows its least value."""


class _MetricsReceiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps what the newest exports said."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exports: list[list[ReceivedPoint]] = []

    @property
    def exports(self) -> list[list[ReceivedPoint]]:
        with self._lock:
            return list(self._exports)

    def Export(  # noqa: N802  the method's name on the wire
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        received = _points_of(request)
        with self._lock:
            self._exports.append(received)
        return metrics_service_pb2.ExportMetricsServiceResponse()


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens while it is entered, on a free loopback port unless `address`, HOST:PORT, says otherwise."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._metrics = _MetricsReceiver()
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self._metrics, self._server)
        self._port = self._server.add_insecure_port(address)
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    @property
    def metric_exports(self) -> list[list[ReceivedPoint]]:
        """The points of each export, the oldest first."""
        return self._metrics.exports

    def Export(  # noqa: N802  the method's name on the wire
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        received = _spans_of(request)
        with self._lock:
            self._spans.extend(received)
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, is_enough: Callable[[Sequence[ReceivedSpan]], bool], *, timeout_s: float) -> list[ReceivedSpan]:
        """Returns the spans as soon as they are enough. Raises TimeoutError with the names of what did come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            spans = self.spans
            if is_enough(spans):
                return spans
            time.sleep(0.05)
        raise TimeoutError(f"after {timeout_s} s only {sorted((s.service, s.name) for s in self.spans)}")

    def __enter__(self) -> "OtlpReceiver":
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=0.5).wait(timeout=5)


def _spans_of(request: trace_service_pb2.ExportTraceServiceRequest) -> list[ReceivedSpan]:
    received = []
    for resource_spans in request.resource_spans:
        resource = {item.key: _value(item.value) for item in resource_spans.resource.attributes}
        for span in (span for scope in resource_spans.scope_spans for span in scope.spans):
            received.append(
                ReceivedSpan(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    name=span.name,
                    service=str(resource.get("service.name", "")),
                    process_id=str(resource.get("service.instance.id", "")),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes={item.key: _value(item.value) for item in span.attributes},
                    linked_span_ids=tuple(link.span_id.hex() for link in span.links),
                    raw=span.SerializeToString(),
                )
            )
    return received


def _points_of(request: metrics_service_pb2.ExportMetricsServiceRequest) -> list[ReceivedPoint]:
    received = []
    for resource_metrics in request.resource_metrics:
        resource = {item.key: _value(item.value) for item in resource_metrics.resource.attributes}
        who = str(resource.get("service.name", "")), str(resource.get("service.instance.id", ""))
        for metric in (metric for scope in resource_metrics.scope_metrics for metric in scope.metrics):
            received.extend(_points_of_metric(metric, *who))
    return received


def _points_of_metric(metric: Metric, service: str, process_id: str) -> list[ReceivedPoint]:
    kind = metric.WhichOneof("data")
    received = []
    for point in metric.histogram.data_points:
        labels = {item.key: _value(item.value) for item in point.attributes}
        received.append(
            ReceivedPoint(
                name=metric.name,
                kind=str(kind),
                service=service,
                process_id=process_id,
                attributes=labels,
                value=point.sum,
                bounds=tuple(point.explicit_bounds),
                counts=tuple(point.bucket_counts),
                exemplars=tuple((seen.as_double, seen.trace_id.hex()) for seen in point.exemplars),
                start_ns=point.start_time_unix_nano,
                least=point.min if point.HasField("min") else None,
            )
        )
    for number in (*metric.sum.data_points, *metric.gauge.data_points):
        labels = {item.key: _value(item.value) for item in number.attributes}
        value = float(getattr(number, number.WhichOneof("value") or "as_double"))
        received.append(
            ReceivedPoint(
                metric.name, str(kind), service, process_id, labels, value, start_ns=number.start_time_unix_nano
            )
        )
    return received


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    found: object = getattr(value, kind)
    return found
