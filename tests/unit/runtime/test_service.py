"""The life of a process on the spine, from its start to its answers, seen from outside."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.unit.runtime.services import Service, health, tokenize, wait_alive

from weir.core.addresses import free_port
from weir.core.errors import InternalError, InvalidRequest, Unavailable
from weir.rpc.errors import from_rpc_error
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_service_becomes_ready_describes_itself_and_ends_with_0(service_folder: Path) -> None:
    service = Service(service_folder, "--index", "3", "--model", "m")
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
        figures = admin_pb2_grpc.AdminStub(channel).Describe(admin_pb2.DescribeRequest(figures_only=True), timeout=5)
        assert (figures.metrics["fakes_total"], list(figures.integrity_errors)) == (3.0, [])
        assert tokenize(channel, "four").token_ids == [4]
    assert service.end() == 0
    assert service.events == ["start", "drain 10", "stop", "recording False", "released, still served: False"]
    assert not service.ready_file.exists()


def test_every_service_can_be_found_by_reflection(service_folder: Path) -> None:
    service = Service(service_folder)
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
        names = {entry.name for entry in answer.list_services_response.service}
    assert {"weir.v1.Inference", "weir.v1.Admin", "grpc.health.v1.Health"} <= names
    assert service.end() == 0


def test_a_service_that_warms_up_is_alive_but_refuses_work(service_folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    service = Service(service_folder, "--listen", address, "--start-s", "60")
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
    assert service.events[-3:-1] == ["stop", "recording False"]


@pytest.mark.parametrize(
    ("fail", "code", "line"),
    [
        ("build", 1, "the arena cannot be made"),
        ("start", 1, "no arena at unix:/nowhere"),
        ("setting", 2, "arena_bytes 5: too small"),
        ("model", 2, "no model 'm'"),
        ("folder", 2, "/cache/kernels has mode 0777"),
    ],
)
def test_a_failed_start_is_one_clear_line(service_folder: Path, fail: str, code: int, line: str) -> None:
    service = Service(service_folder, "--fail", fail)
    assert service.process.wait(20) == code
    errors = [text for text in service.log.splitlines() if "ERROR" in text]
    assert len(errors) == 1
    assert errors[0].endswith(f"could not start: {line}")
    assert "Traceback" not in service.log
    assert not service.ready_file.exists()


def test_a_defect_at_the_start_leaves_a_traceback(service_folder: Path) -> None:
    service = Service(service_folder, "--fail", "defect")
    assert service.process.wait(20) == 1
    assert "could not start: unexpected error" in service.log
    assert "ZeroDivisionError: a defect" in service.log
    assert "stop" in service.events


def test_a_port_that_is_taken_is_an_error(service_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service = Service(service_folder, "--listen", address)
        assert service.process.wait(20) == 1
    assert f"could not start: cannot listen on {address}: in use" in service.log


def test_a_service_listens_on_a_unix_socket_whose_folder_it_makes(service_folder: Path) -> None:
    path = service_folder / "run" / "arena.sock"
    service = Service(service_folder, "--listen", f"unix:{path}")
    assert service.wait_ready()["address"] == f"unix:{path}"
    with grpc.insecure_channel(f"unix:{path}") as channel:
        assert tokenize(channel, "four").token_ids == [4]
    assert service.end() == 0
    assert service.events[-1] == "released, still served: False"
    assert not path.exists()


def test_a_second_service_on_the_same_files_leaves_those_of_the_first(service_folder: Path) -> None:
    path = service_folder / "run" / "arena.sock"
    first = Service(service_folder, "--listen", f"unix:{path}")
    first.wait_ready()
    second = Service(service_folder, "--listen", f"unix:{path}")
    assert second.process.wait(20) == 1
    assert f"could not start: cannot listen on unix:{path}: in use by another process" in second.log
    assert first.ready_file.exists()
    with grpc.insecure_channel(f"unix:{path}") as channel:
        assert tokenize(channel, "four").token_ids == [4]
    assert first.end() == 0
    assert not path.exists()


def test_a_wildcard_address_is_advertised_by_a_name_that_others_can_use(service_folder: Path) -> None:
    service = Service(service_folder, "--listen", "0.0.0.0:0", "--insecure-listen", "--advertise-host", "localhost")
    address = service.wait_ready()["address"]
    assert address.startswith("localhost:")
    with grpc.insecure_channel(address) as channel:
        assert health(channel, "") == SERVING
    assert service.end() == 0


def test_errors_of_a_servicer_have_their_status_and_defects_are_counted(service_folder: Path) -> None:
    service = Service(service_folder)
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


def test_logs_can_be_json(service_folder: Path) -> None:
    service = Service(service_folder, "--log-format", "json")
    process_id = service.wait_ready()["process_id"]
    assert service.end() == 0
    lines = [json.loads(line) for line in service.log.splitlines()]
    assert {line["process_id"] for line in lines} == {process_id}
    assert [line["message"] for line in lines if line["message"] in ("ready", "stopped")] == ["ready", "stopped"]
