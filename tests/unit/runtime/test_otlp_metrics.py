"""Figures that are sent to a collector: the same as on the page, by a switch."""

from pathlib import Path

import pytest
from tests.unit.runtime.services import Service
from tests.unit.runtime.stacks import wait_until

from weir.core.addresses import free_port
from weir.runtime.config import ConfigError, ServiceConfig
from weir.runtime.otlp_metrics import MetricsExport, metrics_endpoint
from weir.telemetry.described import Described, HistogramFigure
from weir.telemetry.histogram import Histogram
from weir.testing.otlp import OtlpReceiver

FAST = ("--otlp-metrics-interval-s", "0.1")
URL = "http://collector:4317"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_what_is_sent_is_what_the_page_has() -> None:
    histogram = Histogram([0.5, 1.0])
    for value in (0.2, 3.0):
        histogram.observe(value)
    histogram.observe_traced(0.7, TRACE_ID, at_s=1000.5)
    figures = [HistogramFigure("weir_stage_seconds", histogram.value(), (("stage", "queue"),))]
    described = Described("scheduler", "scheduler-0-aa", {"granted_batch_total": 7.0, "queued": 3.0}, figures)
    with OtlpReceiver() as receiver:
        export = MetricsExport(ServiceConfig(instance="i"), receiver.endpoint, lambda: described)
        await export.start()
        await export.stop()
        [points] = receiver.metric_exports
    own = {"role": "scheduler", "process": "scheduler-0-aa"}
    shown = {point.name: (point.kind, point.value, point.attributes, point.counts) for point in points}
    assert shown == {
        "weir_lane_grants_total": ("sum", 7.0, {"lane": "batch", **own}, ()),
        "weir_scheduler_requests_queued": ("gauge", 3.0, own, ()),
        "weir_stage_seconds": ("histogram", pytest.approx(3.9), {"stage": "queue", **own}, (1, 1, 1)),
    }
    assert {(point.service, point.process_id) for point in points} == {("weir-scheduler", "scheduler-0-aa")}
    assert [(point.bounds, point.least) for point in points if point.kind == "histogram"] == [((0.5, 1.0), None)]
    assert [point.exemplars for point in points if point.kind == "histogram"] == [((0.7, TRACE_ID),)]
    assert all(point.start_ns for point in points if point.kind != "gauge")


def test_a_process_sends_again_and_again_and_once_more_at_its_end(service_folder: Path) -> None:
    with OtlpReceiver() as receiver:
        service = Service(service_folder, "--otlp-metrics-endpoint", receiver.endpoint, *FAST)
        process_id = service.wait_ready()["process_id"]
        wait_until(lambda: len(receiver.metric_exports) >= 3)
        assert service.end() == 0
        exports = receiver.metric_exports
    assert {(point.service, point.process_id) for points in exports for point in points} == {
        ("weir-gateway", process_id)
    }
    assert "weir_process_rpc_internal_errors_total" in {point.name for point in exports[-1]}
    assert "failed; going on" not in service.log


def test_a_collector_of_metrics_that_is_away_neither_holds_up_nor_fills_the_log(service_folder: Path) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    service = Service(service_folder, "--otlp-metrics-endpoint", away, *FAST)
    service.wait_ready()
    assert service.end() == 0
    assert service.log.count("opentelemetry") <= 2, service.log


@pytest.mark.parametrize(
    ("settings", "environ", "endpoint"),
    [
        ({}, {}, ""),
        ({"otlp_endpoint": URL}, {}, ""),
        ({"otlp_metrics_endpoint": URL}, {"OTEL_METRICS_EXPORTER": "none"}, URL),
        ({}, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": URL}, URL),
        ({}, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": URL, "OTEL_METRICS_EXPORTER": "none"}, ""),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, ""),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_METRICS_EXPORTER": "otlp"}, URL),
        ({"otlp_endpoint": URL}, {"OTEL_METRICS_EXPORTER": "otlp"}, URL),
    ],
)
def test_metrics_are_sent_where_a_setting_or_opentelemetrys_variables_say(
    settings: dict[str, str], environ: dict[str, str], endpoint: str
) -> None:
    assert metrics_endpoint(ServiceConfig(**settings), environ) == endpoint  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, r"OTEL_METRICS_EXPORTER 'prometheus': must be otlp or none"),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, "no endpoint is named: set otlp_metrics_endpoint"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "collector:4317"}, r"'collector:4317': must start with http://"),
    ],
)
def test_variables_that_cannot_be_followed_are_named(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        metrics_endpoint(ServiceConfig(), environ)
