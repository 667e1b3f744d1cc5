"""Several hosts of one instance on this machine: each has a runtime folder, an arena and workers of its own, and all
share one NATS, scheduler and gateway, as `weir serve` runs them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Protocol
from uuid import uuid4

import grpc

from weir.bus.nats_users import NATS_ROLES, NatsRole, make_seed, public_key, server_config
from weir.bus.server import nats_server_command
from weir.bus.subjects import Subjects
from weir.core.addresses import LOOPBACK, free_port
from weir.runtime.config import ROLES
from weir.testing.stack import DESCRIBE_TIMEOUT_S, START_TIMEOUT_S, wait_until
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

_END_TIMEOUT_S = 30.0
_MIB = 1 << 20
_ARENA_BYTES = 512 * _MIB
OpenChannel = Callable[[str, str], grpc.Channel]
"""To the address of a process of this role."""
_NATS_ROLES: Mapping[str, NatsRole] = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "transfer": "transfer",
    "prefill": "worker",
    "decode": "worker",
}
_LEASE = ("--lease-ttl-ms", "8000")
"""Nobody starts a worker again that was killed for its silence on a busy machine."""


class Certified(Protocol):
    """What makes the processes of a cluster prove who they are."""

    def flags(self, role: str, instance: str) -> Sequence[str]: ...

    def open(self, address: str, role: str, instance: str) -> grpc.Channel: ...


class Served:
    """One process of `weir serve`, ready once it has written its ready file."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str], open_channel: OpenChannel
    ) -> None:
        self.name = name
        self._open_channel = open_channel
        self._log_path = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.ready.json"
        is_service = command[0] == sys.executable
        ready = ("--ready-file", str(self._ready_file)) if is_service else ()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen([*command, *ready], env=dict(environ), stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.log[-4000:]}")
        return self._ready_file.exists() and json.loads(self._ready_file.read_text())["pid"] == self.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        wait_until(lambda: self.is_ready, timeout_s=START_TIMEOUT_S, what=f"{self.name} is ready")

    def metrics(self) -> dict[str, float]:
        return dict(self.describe().metrics)

    @property
    def address(self) -> str:
        """Of one that is ready."""
        return str(json.loads(self._ready_file.read_text())["address"])

    def describe(self) -> admin_pb2.DescribeResponse:
        role = next(role for role in ROLES if role in self.name)
        with contextlib.closing(self._open_channel(self.address, role)) as channel:
            return admin_pb2_grpc.AdminStub(channel).Describe(admin_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_TIMEOUT_S)

    def end(self) -> None:
        if self.is_alive:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass
class Host:
    """`transfer` first: workers wait for it, as for everything."""

    transfer: Served
    workers: list[Served]

    @property
    def processes(self) -> list[Served]:
        return [self.transfer, *self.workers]

    def kill(self) -> None:
        """All of it at once, as when the machine is gone."""
        for process in self.processes:
            process.send(signal.SIGKILL)
        for process in self.processes:
            process.kill()

    def num_pages_held(self) -> float:
        metrics = self.transfer.metrics()
        return metrics["total_pages"] - metrics["free_pages"] - metrics["cached_pages"]


class Cluster:
    """NATS, `num_schedulers` schedulers and one gateway; hosts are added and go. Ends all that it has started."""

    def __init__(
        self,
        folder: Path,
        *,
        num_schedulers: int = 1,
        environ: Mapping[str, str] | None = None,
        certified: Certified | None = None,
        listen_host: str = LOOPBACK,
    ) -> None:
        """`listen_host`: where all but transfer services listen; not on loopback NATS knows roles by keys."""
        self.instance = f"t{uuid4().hex[:8]}"
        self.grpc_port = free_port()
        self.http_port = free_port()
        self.nats_port = free_port()
        self.schedulers: list[Served] = []
        self.hosts: list[Host] = []
        self._num_schedulers = num_schedulers
        self._certified = certified
        self._listen_host = listen_host
        self._seed_files: dict[NatsRole, Path] = {}
        self._folder = folder
        self._environ = {**os.environ, **(environ or {})}
        self._arena_folder = Path(mkdtemp(prefix=f"weir-{self.instance}-", dir="/dev/shm"))
        self._processes: list[Served] = []

    @property
    def grpc_address(self) -> str:
        return f"{self._listen_host}:{self.grpc_port}"

    @property
    def nats_url(self) -> str:
        return f"nats://{self._listen_host}:{self.nats_port}"

    def start(self) -> None:
        config = None if self._listen_host == LOOPBACK else self._write_nats_config()
        store, host = self._folder / "nats", self._listen_host
        self.nats = self._run("nats", nats_server_command(self.nats_port, store, host=host, config_file=config))
        for index in range(self._num_schedulers):
            self.schedulers.append(self.serve("scheduler", index=index))
        ports = ("--listen", self.grpc_address, "--http-host", self._listen_host, "--http-port", str(self.http_port))
        self.gateway = self.serve("gateway", *ports)
        for process in (*self.schedulers, self.gateway):
            process.wait_ready()

    def serve(self, role: str, *flags: str, index: int = 0, nats_url: str = "", name: str = "") -> Served:
        """Returns at once; `nats_url` is another way to the same server."""
        command = (sys.executable, "-m", f"weir_{role}", "--instance", self.instance, "--index", str(index))
        common = ("--nats-url", nats_url or self.nats_url, "--runtime-dir", str(self._folder), "--grace-s", "3")
        listen = ("--listen", f"{self._listen_host}:0")
        own = () if self._certified is None else self._certified.flags(role, self.instance)
        if self._seed_files:
            own = (*own, "--nats-seed-file", str(self._seed_files[_NATS_ROLES[role]]))
        return self._run(name or f"{role}-{index}", (*command, *common, *listen, *own, *flags))

    def add_host(self, name: str, *, num_prefill: int = 1, num_decode: int = 1, flags: Sequence[str] = ()) -> Host:
        """Ready when this returns. The same name again: the host that was gone has come back."""
        transfer = self.serve_transfer(name)
        own = ("--runtime-dir", str(self._folder / name), *flags)
        swap = ("--swap-dir", str(self._arena_folder / name))
        workers = [
            self.serve(role, *own, *extra, index=index, name=f"{name}-{role}-{index}")
            for role, number, extra in (("prefill", num_prefill, ()), ("decode", num_decode, swap))
            for index in range(number)
        ]
        host = Host(transfer, workers)
        for process in host.processes:
            process.wait_ready()
        self.hosts.append(host)
        return host

    def serve_transfer(self, name: str) -> Served:
        """That of a new host, or the next one of a host whose transfer service is gone. Returns at once."""
        segment_dir, runtime_dir = self._arena_folder / name, self._folder / name
        segment_dir.mkdir(exist_ok=True)
        listen = ("--listen", f"unix:{runtime_dir / self.instance / 'arena.sock'}")
        arena = ("--segment-dir", str(segment_dir), "--arena-bytes", str(_ARENA_BYTES), *_LEASE)
        return self.serve("transfer", "--runtime-dir", str(runtime_dir), *listen, *arena, name=f"{name}-transfer")

    def metric(self, role: str, name: str) -> float:
        """Of the leader, or of the gateway."""
        found = [process.metrics() for process in (self.schedulers if role == "scheduler" else [self.gateway])]
        return sum(metrics.get(name, 0.0) for metrics in found)

    def integrity_errors(self) -> list[str]:
        """Of all that run, but for NATS."""
        return [
            f"{process.name}: {error}"
            for process in self._processes
            if process is not self.nats and process.is_alive
            for error in process.describe().integrity_errors
        ]

    def stop(self) -> None:
        """The latest first, so that nobody goes before those who need it."""
        for process in reversed(self._processes):
            process.end()
        for folder in (*self._arena_folder.iterdir(), self._arena_folder):
            if folder.is_dir() and folder is not self._arena_folder:
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
        self._arena_folder.rmdir()

    def _write_nats_config(self) -> Path:
        seeds = {role: make_seed() for role in NATS_ROLES}
        for role, seed in seeds.items():
            self._seed_files[role] = self._folder / f"nats-{role}.seed"
            self._seed_files[role].touch(mode=0o600)
            self._seed_files[role].write_text(seed)
        config = self._folder / "nats.conf"
        config.write_text(
            server_config({role: public_key(seed) for role, seed in seeds.items()}, Subjects(self.instance))
        )
        return config

    def _open_channel(self, address: str, role: str) -> grpc.Channel:
        if self._certified is None or address.startswith("unix:"):
            return grpc.insecure_channel(address)
        return self._certified.open(address, role, self.instance)

    def _run(self, name: str, command: Sequence[str]) -> Served:
        process = Served(name, command, self._folder, self._environ, self._open_channel)
        self._processes.append(process)
        return process

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
