"""Fake services in processes of their own, and what a peer can ask them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.unit.runtime.stacks import wait_until

from weir.wire.v1 import inference_pb2, inference_pb2_grpc

SCRIPT = Path(__file__).with_name("fake_service.py")


class Service:
    """One fake service in a process of its own."""

    def __init__(self, folder: Path, *flags: str, limits: str = "") -> None:
        """`limits`: flags of the shell's `ulimit` that it is started under."""
        self.ready_file = folder / "ready.json"
        self.events_file = folder / "events"
        self._log_path = folder / "log"
        own = ("--ready-file", str(self.ready_file), "--events-file", str(self.events_file))
        with self._log_path.open("wb") as log:
            shell = ["sh", "-c", f'ulimit {limits}; exec "$0" "$@"'] if limits else []
            command = [*shell, sys.executable, "-W", "error", str(SCRIPT), *own, *flags]
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


def health(channel: grpc.Channel, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    status: int = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
    return status


def tokenize(channel: grpc.Channel, text: str) -> inference_pb2.TokenizeResponse:
    stub = inference_pb2_grpc.InferenceStub(channel)
    return stub.Tokenize(inference_pb2.TokenizeRequest(text=text), timeout=5)


def wait_alive(channel: grpc.Channel) -> None:
    grpc.channel_ready_future(channel).result(timeout=20)


def kill_all(folder: Path) -> list[int]:
    """Kills whatever was started with a path in `folder` among its arguments, and returns its pids.

    Not by the means of the code under test, which may be what is broken.
    """
    killed: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command:
            os.kill(int(entry.name), signal.SIGKILL)
            killed.append(int(entry.name))
    return killed
