"""A real transfer process for the tests of this folder."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weir.core.process import ProcessIdentity, try_read_start_ticks
from weir.kv.arena.segment import Segment, segment_path
from weir.rpc.channel import make_channel
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

PAGE_BYTES = 65536
MODEL_DIGEST = "digest"
_START_TIMEOUT_S = 60.0


class TransferProcess:
    """`python -m weir_transfer` on a socket in `directory`, over a segment in `directory` too."""

    def __init__(self, directory: Path, lease_ttl_ms: int, flags: Mapping[str, str] | None = None) -> None:
        """`flags`: further ones."""
        self.socket_path = directory / "arena.sock"
        self.segment_path = segment_path("test", directory)
        self._ready_file = directory / "ready.json"
        self._flags: dict[str, object] = {
            "instance": "test",
            "listen": f"unix:{self.socket_path}",
            "segment-dir": directory,
            "runtime-dir": directory,
            "ready-file": self._ready_file,
            "page-bytes": PAGE_BYTES,
            "max-context-tokens": 256,
            "model-digest": MODEL_DIGEST,
            "arena-bytes": 40 * PAGE_BYTES,
            "num-slots": 8,
            "lease-ttl-ms": lease_ttl_ms,
            "heartbeat-interval-ms": 50,
            "grace-s": 1,
            **(flags or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when it is ready."""
        self._ready_file.unlink(missing_ok=True)
        self._process = self._spawn()
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not self._ready_file.exists():
                assert self._process.poll() is None, "the transfer process ended while it started"
                await asyncio.sleep(0.02)
        assert json.loads(self._ready_file.read_text())["pid"] == self._process.pid

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command())

    def _command(self, **changed: object) -> list[str]:
        flags = [part for name, value in {**self._flags, **changed}.items() for part in (f"--{name}", str(value))]
        return [sys.executable, "-m", "weir_transfer", *flags]

    def run_second(self, **changed: object) -> "subprocess.CompletedProcess[str]":
        """Another one with the same flags, but for those `changed`, that is expected to end by itself."""
        command = self._command(**changed)
        return subprocess.run(command, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False)

    @property
    def is_ready(self) -> bool:
        return self._ready_file.exists()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=15)

    def open_segment(self) -> Segment:
        return Segment.open(self.segment_path)

    async def describe(self) -> dict[str, float]:
        """Its metrics; fails on integrity errors."""
        async with make_channel(f"unix:{self.socket_path}") as channel:
            stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
            response = await stub.Describe(admin_pb2.DescribeRequest(), timeout=10)
        assert list(response.integrity_errors) == []
        return dict(response.metrics)

    async def wait_for(self, metric: str, value: float, timeout_s: float = 15) -> None:
        ends_at_s = time.monotonic() + timeout_s
        while (metrics := await self.describe())[metric] != value:
            assert time.monotonic() < ends_at_s, f"{metric} is {metrics[metric]} after {timeout_s} s, not {value}"
            await asyncio.sleep(0.05)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Whatever happens inside, the process is gone and collected afterwards."""
    try:
        yield
    finally:
        process.kill()
        process.wait(timeout=15)


@contextmanager
def sleeping_process() -> Iterator[tuple["subprocess.Popen[bytes]", ProcessIdentity]]:
    """A process that does nothing, to stand for a worker in the lease table: what is fenced is never the tests."""
    with subprocess.Popen(["sleep", "600"]) as sleeper, ended(sleeper):
        start_ticks = try_read_start_ticks(sleeper.pid)
        assert start_ticks is not None
        yield sleeper, ProcessIdentity(sleeper.pid, start_ticks)
