"""What `make compose-test` is made of, where it needs no container."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from tests.containers import trace_store
from tests.containers.__main__ import lock
from tests.containers.engine import CommandFailed, Engine
from tests.containers.leftovers import HostBefore, on_host
from tests.containers.packages import Tools
from tests.containers.stack import Ports

from weir.testing.otlp import OtlpReceiver
from weir.testing.stack import wait_until


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """One that was never started."""
    return Engine(Tools(tmp_path / "cache"), tmp_path / "run-of-a-test", tmp_path / "data")


def test_the_store_answers_with_a_trace_in_jaegers_form() -> None:
    with OtlpReceiver() as receiver:
        provider = TracerProvider(resource=Resource({"service.name": "weir-gateway"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=receiver.endpoint, insecure=True)))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span("request"), tracer.start_as_current_span("queue"):
            pass
        provider.shutdown()
        received = receiver.wait_for(lambda spans: len(spans) == 2, timeout_s=10)
        status, body = trace_store.answer(receiver, f"/api/traces/{received[0].trace_id}")
        unknown, _ = trace_store.answer(receiver, f"/api/traces/{'0' * 32}")
    assert (status, unknown) == (200, 404)
    data: Any = body["data"]
    trace = data[0]
    by_name = {span["operationName"]: span for span in trace["spans"]}
    assert by_name["queue"]["references"] == [{"refType": "CHILD_OF", "spanID": by_name["request"]["spanID"]}]
    assert trace["processes"][by_name["queue"]["processID"]] == {"serviceName": "weir-gateway"}


def test_what_is_left_of_a_run_is_seen(engine: Engine) -> None:
    before = HostBefore.now()
    assert on_host(before, engine, []) == []
    engine.folder.mkdir()
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(engine.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as left:
        assert left.stdout is not None
        left.stdout.readline()
        seen = on_host(before, engine, [])
        left.communicate(timeout=10)
    assert [line.split()[0] for line in seen] == ["process", "folder"]
    assert str(left.pid) in seen[0]
    engine.folder.rmdir()
    wait_until(lambda: on_host(before, engine, []) == [], timeout_s=10, what="nothing is left")


def test_a_program_that_fails_says_why_and_one_that_hangs_ends_with_what_it_started(engine: Engine) -> None:
    with pytest.raises(CommandFailed, match=r"ended with 3:\nno such thing"):
        engine.run(["sh", "-c", "echo no such thing >&2; exit 3"], timeout_s=10)
    marker = f"1{id(engine)}"
    with pytest.raises(subprocess.TimeoutExpired):
        engine.run(["sh", "-c", f"sleep {marker} & wait"], timeout_s=0.5)

    def is_gone() -> bool:
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=10, check=True)
        return f"sleep {marker}" not in listed.stdout.splitlines()

    wait_until(is_gone, timeout_s=10, what="the hanging program's child is gone")


def test_a_second_run_is_refused_while_one_uses_the_images(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(BlockingIOError, match="wait until it has ended"), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass


def test_each_gateway_gets_a_port_of_each_kind_of_its_own() -> None:
    ports = Ports.free()
    assert len(set(ports.all)) == len(ports.all)
    assert ports.variables()["HTTP_PORT"] == f"{ports.http}-{ports.http + 1}"
