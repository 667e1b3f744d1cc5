"""The life of a process on the spine, seen from outside."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.unit.runtime.stacks import wait_until

from weir.core.errors import InternalError, InvalidRequest, Unavailable
from weir.rpc.errors import from_rpc_error
from weir.testing.otlp import OtlpReceiver
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SCRIPT = Path(__file__).with_name("fake_service.py")


class Service:
    """One fake service in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.ready_file = folder / "ready.json"
        self.events_file = folder / "events"
        self._log_path = folder / "log"
        own = ("--ready-file", str(self.ready_file), "--events-file", str(self.events_file))
        with self._log_path.open("wb") as log:
            command = [sys.executable, "-W", "error", str(SCRIPT), *own, *flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_ready(self) -> dict[str, Any]:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return self.ready_file.exists()

        wait_until(is_ready, 20)
        facts: dict[str, Any] = json.loads(self.ready_file.read_text())
        return facts

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def events(self) -> list[str]:
        return self.events_file.read_text().splitlines() if self.events_file.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Whatever a test started is gone afterwards."""
    yield tmp_path
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(tmp_path).encode() in command:
            os.kill(int(entry.name), signal.SIGKILL)


def health(channel: grpc.Channel, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    status: int = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
    return status


def tokenize(channel: grpc.Channel, text: str) -> inference_pb2.TokenizeResponse:
    stub = inference_pb2_grpc.InferenceStub(channel)
    return stub.Tokenize(inference_pb2.TokenizeRequest(text=text), timeout=5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_alive(channel: grpc.Channel) -> None:
    grpc.channel_ready_future(channel).result(timeout=20)


def test_a_service_becomes_ready_describes_itself_and_ends_with_0(folder: Path) -> None:
    service = Service(folder, "--index", "3", "--model", "m")
    facts = service.wait_ready()
    assert facts["pid"] == service.process.pid
    assert facts["role"] == "gateway"
    assert facts["process_id"].startswith("gateway-3-")
    with grpc.insecure_channel(facts["address"]) as channel:
        assert health(channel, "") == SERVING
        assert health(channel, "weir.v1.Inference") == SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health(channel, "weir.v1.Nothing")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        described = admin_pb2_grpc.AdminStub(channel).Describe(admin_pb2.DescribeRequest(), timeout=5)
        assert (described.role, described.model, described.pid) == ("gateway", "m", service.process.pid)
        assert described.process_id == facts["process_id"]
        assert described.metrics["fakes_total"] == 3.0
        assert list(described.integrity_errors) == ["one page is missing"]
        assert tokenize(channel, "four").token_ids == [4]
    assert service.end() == 0
    assert service.events == ["start", "drain 10", "stop", "recording False"]
    assert not service.ready_file.exists()


def test_every_service_can_be_found_by_reflection(folder: Path) -> None:
    service = Service(folder)
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
        names = {entry.name for entry in answer.list_services_response.service}
    assert {"weir.v1.Inference", "weir.v1.Admin", "grpc.health.v1.Health"} <= names
    assert service.end() == 0


def test_a_service_that_warms_up_is_alive_but_refuses_work(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    service = Service(folder, "--listen", address, "--start-s", "60")
    with grpc.insecure_channel(address) as channel:
        wait_alive(channel)
        assert health(channel, "") == SERVING
        assert health(channel, "weir.v1.Inference") == NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            tokenize(channel, "four")
        error = from_rpc_error(refused.value)
        assert isinstance(error, Unavailable)
        assert error.retry_after_s == 1.0
        described = admin_pb2_grpc.AdminStub(channel).Describe(admin_pb2.DescribeRequest(), timeout=5)
        assert described.uptime_ms < 60_000
    assert not service.ready_file.exists()
    began = time.monotonic()
    assert service.end() == 0
    assert time.monotonic() - began < 5
    assert service.events[-2:] == ["stop", "recording False"]


def test_on_sigterm_health_says_not_serving_before_work_is_drained(folder: Path) -> None:
    service = Service(folder, "--drain-s", "1.5")
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        assert health(channel, "weir.v1.Inference") == SERVING
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "drain 10" in service.events)
        assert health(channel, "weir.v1.Inference") == NOT_SERVING
        assert health(channel, "") == NOT_SERVING
        assert tokenize(channel, "four").token_ids == [4]  # what runs may go on
        assert not service.ready_file.exists()
    assert service.process.wait(10) == 0


def test_drain_is_bounded_by_the_grace_period(folder: Path) -> None:
    service = Service(folder, "--drain-s", "60", "--grace-s", "0.2")
    service.wait_ready()
    began = time.monotonic()
    assert service.end(signal.SIGINT) == 0
    assert time.monotonic() - began < 6
    assert "drain took longer than 1.2 s; going on" in service.log
    assert "stop" in service.events


def test_a_drain_that_fails_does_not_keep_the_rest_from_happening(folder: Path) -> None:
    service = Service(folder, "--fail", "drain")
    service.wait_ready()
    assert service.end() == 0
    assert "drain failed; going on" in service.log
    assert "RuntimeError: drain broke" in service.log
    assert "stop" in service.events


def test_a_second_signal_ends_the_process_at_once(folder: Path) -> None:
    service = Service(folder, "--drain-s", "60", "--grace-s", "60")
    service.wait_ready()
    service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "drain 60" in service.events)
    assert service.end() == 128 + signal.SIGTERM
    assert "stop" not in service.events


def test_a_thread_that_never_ends_does_not_keep_the_process(folder: Path) -> None:
    service = Service(folder, "--fail", "thread", "--grace-s", "0")
    service.wait_ready()
    assert service.end() == 1
    assert "shutdown did not end within 11.0 s: exiting hard" in service.log


@pytest.mark.parametrize(
    ("fail", "line"), [("build", "the arena cannot be made"), ("start", "no arena at unix:/nowhere")]
)
def test_a_failed_start_is_one_clear_line(folder: Path, fail: str, line: str) -> None:
    service = Service(folder, "--fail", fail)
    assert service.process.wait(20) == 1
    errors = [text for text in service.log.splitlines() if "ERROR" in text]
    assert len(errors) == 1
    assert errors[0].endswith(f"could not start: {line}")
    assert "Traceback" not in service.log
    assert not service.ready_file.exists()


def test_a_defect_at_the_start_leaves_a_traceback(folder: Path) -> None:
    service = Service(folder, "--fail", "defect")
    assert service.process.wait(20) == 1
    assert "could not start: unexpected error" in service.log
    assert "ZeroDivisionError: a defect" in service.log
    assert "stop" in service.events


def test_a_port_that_is_taken_is_an_error(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service = Service(folder, "--listen", address)
        assert service.process.wait(20) == 1
    assert f"could not start: cannot listen on {address}: in use" in service.log


def test_a_service_listens_on_a_unix_socket_whose_folder_it_makes(folder: Path) -> None:
    path = folder / "run" / "arena.sock"
    service = Service(folder, "--listen", f"unix:{path}")
    assert service.wait_ready()["address"] == f"unix:{path}"
    with grpc.insecure_channel(f"unix:{path}") as channel:
        assert tokenize(channel, "four").token_ids == [4]
    assert service.end() == 0
    assert not path.exists()


def test_a_wildcard_address_is_advertised_by_a_name_that_others_can_use(folder: Path) -> None:
    service = Service(folder, "--listen", "0.0.0.0:0", "--advertise-host", "localhost")
    address = service.wait_ready()["address"]
    assert address.startswith("localhost:")
    with grpc.insecure_channel(address) as channel:
        assert health(channel, "") == SERVING
    assert service.end() == 0


def test_a_component_can_end_its_process_which_then_counts_as_failed(folder: Path) -> None:
    service = Service(folder)
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        tokenize(channel, "shut down")
    assert service.process.wait(10) == 1
    assert "shutting down: asked by a request" in service.log
    assert "stop" in service.events


def test_errors_of_a_servicer_have_their_status_and_defects_are_counted(folder: Path) -> None:
    service = Service(folder)
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        for text, kind in (("bad", InvalidRequest), ("defect", InternalError), ("defect", InternalError)):
            with pytest.raises(grpc.RpcError) as caught:
                tokenize(channel, text)
            assert isinstance(from_rpc_error(caught.value), kind)
        tokenize(channel, "uncollected")
        metrics = admin_pb2_grpc.AdminStub(channel).Describe(admin_pb2.DescribeRequest(), timeout=5).metrics
    assert metrics["rpc_internal_errors_total"] == 2
    assert metrics["uncollected_errors_total"] == 1
    assert "KeyError: 'nobody thought of this'" in service.log
    assert "ZeroDivisionError" in service.log
    assert service.end() == 0


def test_traces_are_sent_before_the_process_ends(folder: Path) -> None:
    with OtlpReceiver() as receiver:
        service = Service(folder, "--otlp-endpoint", receiver.endpoint, "--instance", "i")
        process_id = service.wait_ready()["process_id"]
        assert service.end() == 0
        spans = receiver.spans
    assert "some traces were not sent" not in service.log
    assert [(span.name, span.service, span.process_id) for span in spans] == [
        ("last words", "weir-gateway", process_id)
    ]


def test_a_collector_that_is_away_neither_holds_up_nor_fills_the_log(folder: Path) -> None:
    service = Service(folder, "--otlp-endpoint", f"http://127.0.0.1:{free_port()}")
    service.wait_ready()
    began = time.monotonic()
    assert service.end() == 0
    assert time.monotonic() - began < 4
    assert service.log.count("opentelemetry") <= 2, service.log


def test_logs_can_be_json(folder: Path) -> None:
    service = Service(folder, "--log-format", "json")
    process_id = service.wait_ready()["process_id"]
    assert service.end() == 0
    lines = [json.loads(line) for line in service.log.splitlines()]
    assert {line["process_id"] for line in lines} == {process_id}
    assert [line["message"] for line in lines if line["message"] in ("ready", "stopped")] == ["ready", "stopped"]
