"""The figures of the process's page of metrics, sent to an OTLP/gRPC collector every few seconds.

    figures ─(event loop)─> families ─(thread)─> points of the OpenTelemetry SDK ─> OTLPMetricExporter

The SDK's observable instruments know no histogram that was counted elsewhere, so its data points are made here; nothing
is counted twice. Off unless an endpoint is named, and then nothing of it is imported.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import weir
from weir.runtime.config import OTLP_SCHEMES, ConfigError, ServiceConfig
from weir.runtime.telemetry import quieten_exporters, resource_of
from weir.telemetry.described import Described, families_of
from weir.telemetry.families import Family, Kind, Sample, gathered
from weir.telemetry.histogram import Exemplar, HistogramValue

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import Exemplar as OtlpExemplar
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, Metric, NumberDataPoint

_log = logging.getLogger(__name__)
_EXPORT_TIMEOUT_S = 2.0
_SCOPE = "weir"


@dataclass(frozen=True, slots=True)
class ExportTimes:
    """Of all points of one export, in nanoseconds of Unix time."""

    start_ns: int
    """When the process began to count."""
    now_ns: int


def metrics_endpoint(config: ServiceConfig, environ: Mapping[str, str]) -> str:
    """The setting, or what OpenTelemetry's own variables say; empty: nothing is sent. Raises ConfigError.

    OTEL_METRICS_EXPORTER=otlp without an endpoint of its own sends to where traces go.
    """
    if config.otlp_metrics_endpoint:
        return config.otlp_metrics_endpoint
    exporter = environ.get("OTEL_METRICS_EXPORTER", "").strip()
    if exporter not in ("", "none", "otlp"):
        raise ConfigError(f"OTEL_METRICS_EXPORTER {exporter!r}: must be otlp or none; Prometheus has GET /metrics")
    own = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "").strip()
    if exporter == "none" or not (own or exporter):
        return ""
    found = own or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or config.otlp_endpoint
    if not found:
        raise ConfigError("OTEL_METRICS_EXPORTER is otlp, and no endpoint is named: set otlp_metrics_endpoint")
    if not found.startswith(OTLP_SCHEMES):
        raise ConfigError(f"OTLP endpoint {found!r}: must start with http:// or https:// (from OTEL_EXPORTER_OTLP_…)")
    return found


class MetricsExport:
    """Sends from `start` to `stop`. A collector that is away costs points, never time of the event loop."""

    def __init__(self, config: ServiceConfig, endpoint: str, describe: Callable[[], Described]) -> None:
        """`describe` is called in the event loop."""
        self._instance = config.instance
        self._interval_s = config.otlp_metrics_interval_s
        self._endpoint = endpoint
        self._describe = describe
        self._start_ns = time.time_ns()
        self._exporter: OTLPMetricExporter | None = None
        self._sending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._exporter = await asyncio.to_thread(self._make_exporter)
        self._sending = asyncio.create_task(self._send_for_ever())
        _log.info("metrics go to %s every %g s", self._endpoint, self._interval_s)

    async def stop(self) -> None:
        """Sends the last figures, which a process that lived shortly sends alone."""
        if self._sending is None or self._exporter is None:
            return
        self._sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sending
        try:
            await self._send()
        finally:
            await asyncio.to_thread(self._exporter.shutdown, 0)

    async def _send_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._send()
            except Exception:  # noqa: BLE001 - the boundary of one export
                _log.exception("metrics could not be sent")

    async def _send(self) -> None:
        described = self._describe()
        families = gathered(families_of(described))
        await asyncio.to_thread(self._export, described, families)

    def _make_exporter(self) -> "OTLPMetricExporter":
        # Processes without a collector start sooner without it.
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415

        quieten_exporters()
        is_plain = not self._endpoint.startswith("https://")
        return OTLPMetricExporter(endpoint=self._endpoint, insecure=is_plain, timeout=_EXPORT_TIMEOUT_S)

    def _export(self, described: Described, families: Sequence[Family]) -> None:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        times = ExportTimes(self._start_ns, time.time_ns())
        scope = InstrumentationScope(_SCOPE, weir.__version__)
        metrics = [metric_of(family, times) for family in families]
        resource = resource_of(described.role, self._instance, described.process_id)
        data = MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])
        if self._exporter is not None:
            self._exporter.export(data)


def metric_of(family: Family, times: ExportTimes) -> "Metric":
    """With the name and the labels that it has on the page."""
    from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - as above

    cumulative = export.AggregationTemporality.CUMULATIVE
    data: export.Sum | export.Gauge | export.Histogram
    if family.kind is Kind.HISTOGRAM:
        points = [
            _histogram_point(one, one.value, times) for one in family.samples if isinstance(one.value, HistogramValue)
        ]
        data = export.Histogram(points, cumulative)
    else:
        numbers = [
            _number_point(one, one.value, times) for one in family.samples if not isinstance(one.value, HistogramValue)
        ]
        data = export.Sum(numbers, cumulative, True) if family.kind is Kind.COUNTER else export.Gauge(numbers)
    return export.Metric(family.name, family.help, "", data)


def _number_point(sample: Sample, value: float, times: ExportTimes) -> "NumberDataPoint":
    from opentelemetry.sdk.metrics.export import NumberDataPoint  # noqa: PLC0415 - as above

    return NumberDataPoint(dict(sample.labels), times.start_ns, times.now_ns, value)


def _histogram_point(sample: Sample, value: HistogramValue, times: ExportTimes) -> "HistogramDataPoint":
    """The least and the greatest value are not known: None, which the exporter leaves out."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint  # noqa: PLC0415 - as above

    return HistogramDataPoint(
        attributes=dict(sample.labels),
        start_time_unix_nano=times.start_ns,
        time_unix_nano=times.now_ns,
        count=value.num,
        sum=value.total,
        bucket_counts=value.counts,
        explicit_bounds=value.edges,
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar_of(one) for one in value.exemplars if one is not None],
    )


def _exemplar_of(seen: Exemplar) -> "OtlpExemplar":
    """Its span is not known: zeros, which collectors read as none. With None the exporter would leave the trace out."""
    from opentelemetry.sdk.metrics import Exemplar as OtlpExemplar  # noqa: PLC0415 - as above

    return OtlpExemplar({}, seen.value, int(seen.at_s * 1e9), span_id=0, trace_id=int(seen.trace_id, 16))
