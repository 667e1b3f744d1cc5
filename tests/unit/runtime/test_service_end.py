"""How a process on the spine ends, in order or not."""

import signal
import time
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2
from tests.unit.runtime.services import Service, health, tokenize
from tests.unit.runtime.stacks import wait_until

from weir.core.addresses import free_port
from weir.testing.otlp import OtlpReceiver

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_on_sigterm_health_says_not_serving_before_work_is_drained(service_folder: Path) -> None:
    service = Service(service_folder, "--drain-s", "60", "--grace-s", "60")
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        assert health(channel, "weir.v1.Inference") == SERVING
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "drain 60" in service.events)
        assert health(channel, "weir.v1.Inference") == NOT_SERVING
        assert health(channel, "") == NOT_SERVING
        assert tokenize(channel, "four").token_ids == [4]  # what runs may go on
        assert not service.ready_file.exists()
        tokenize(channel, "drained")
    assert service.process.wait(20) == 0


def test_probes_by_http_say_when_it_serves_and_when_it_is_to_end(service_folder: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = ("--metrics-port", str(port), "--start-s", "0.5", "--drain-s", "60", "--grace-s", "60")
    service = Service(service_folder, *own)

    def status(path: str) -> int:
        try:
            return httpx.get(url + path, timeout=5).status_code
        except httpx.TransportError:
            return 0

    wait_until(lambda: status("/live") == 200)
    assert status("/ready") == (200 if service.ready_file.exists() else 503)
    service.wait_ready()
    assert status("/ready") == 200
    service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "drain 60" in service.events)
    assert (status("/live"), status("/ready")) == (200, 503)
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(20)


def test_drain_is_bounded_by_the_grace_period(service_folder: Path) -> None:
    service = Service(service_folder, "--drain-s", "60", "--grace-s", "0.2")
    service.wait_ready()
    began = time.monotonic()
    assert service.end(signal.SIGINT) == 0
    assert time.monotonic() - began < 20
    assert "drain took longer than 1.2 s; going on" in service.log
    assert "stop" in service.events


def test_a_drain_that_fails_does_not_keep_the_rest_from_happening(service_folder: Path) -> None:
    service = Service(service_folder, "--fail", "drain")
    service.wait_ready()
    assert service.end() == 0
    assert "drain failed; going on" in service.log
    assert "RuntimeError: drain broke" in service.log
    assert "stop" in service.events


def test_a_second_signal_ends_the_process_at_once(service_folder: Path) -> None:
    service = Service(service_folder, "--drain-s", "60", "--grace-s", "60")
    service.wait_ready()
    service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "drain 60" in service.events)
    assert service.end() == 128 + signal.SIGTERM
    assert "stop" not in service.events


def test_a_thread_that_never_ends_does_not_keep_the_process(service_folder: Path) -> None:
    service = Service(service_folder, "--fail", "thread", "--grace-s", "0")
    service.wait_ready()
    assert service.end() == 1
    assert "shutdown did not end within 11.0 s: exiting hard" in service.log


def test_a_component_can_end_its_process_which_then_counts_as_failed(service_folder: Path) -> None:
    service = Service(service_folder)
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        tokenize(channel, "shut down")
    assert service.process.wait(20) == 1
    assert "shutting down: asked by a request" in service.log
    assert "stop" in service.events


def test_traces_are_sent_before_the_process_ends(service_folder: Path) -> None:
    with OtlpReceiver() as receiver:
        service = Service(service_folder, "--otlp-endpoint", receiver.endpoint, "--instance", "i")
        process_id = service.wait_ready()["process_id"]
        assert service.end() == 0
        spans = receiver.spans
    assert "some traces were not sent" not in service.log
    assert [(span.name, span.service, span.process_id) for span in spans] == [
        ("last words", "weir-gateway", process_id)
    ]


def test_a_collector_that_is_away_neither_holds_up_nor_fills_the_log(service_folder: Path) -> None:
    service = Service(service_folder, "--otlp-endpoint", f"http://127.0.0.1:{free_port()}")
    service.wait_ready()
    began = time.monotonic()
    assert service.end() == 0
    assert time.monotonic() - began < 15  # the exporter by itself goes on for 30 s
    assert service.log.count("opentelemetry") <= 2, service.log
