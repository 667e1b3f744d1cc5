"""A whole Weir of real processes, started as a user would: `weir up`, in a session of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from uuid import uuid4

import grpc

from weir.bus.nats_users import NatsRole
from weir.core.addresses import free_port
from weir.core.credentials import key_metadata
from weir.core.roles import WORKER_ROLES
from weir.runtime.stack.instances import end_instance
from weir.runtime.stack.observe import try_observe
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.state import try_read_state
from weir.runtime.stack.supervised import open_for_child, rotate
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

_ARENA_BYTES = "512MiB"
"""Unless a test wants another: a quarter of what the machine would give, whose every page each process maps, costs a
third less of processor time to start."""
TINY_MODEL = ("--model", "dummy:tiny")
"""Flags for tests to which it does not matter what answers say, nor how long they take. A start takes three fifths of
the processor time that it takes with the built-in model."""
START_TIMEOUT_S = 180.0  # the first start on a machine compiles the kernels
COMMAND_TIMEOUT_S = 60.0
_POLL_S = 0.05
DESCRIBE_TIMEOUT_S = 30.0  # ten times what a process needs amid the stacks of other tests


_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process as `weir status --json` shows it."""

    name: str
    role: str
    pid: int
    address: str
    state: str
    num_restarts: int


class Stack:
    """One instance on ports of its own, ended on exit; nothing of it may be left then."""

    def __init__(
        self,
        runtime_dir: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.instance = f"t{uuid4().hex[:8]}"
        self.runtime_dir = runtime_dir
        self.grpc_port = free_port()
        self.http_port = free_port()
        self._environ = {**os.environ, "WEIR_RUNTIME_DIR": str(runtime_dir), **(environ or {})}
        self._up_flags = [
            *("--prefill", str(num_prefill), "--decode", str(num_decode)),
            *("--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)),
            *("--arena-bytes", _ARENA_BYTES),
            *flags,
        ]

    @property
    def _paths(self) -> InstancePaths:
        return InstancePaths(self.runtime_dir.resolve() / self.instance)

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def nats_seed_file(self, role: NatsRole) -> str:
        """What proves to the stack's NATS that somebody is of this role."""
        return str(self._paths.nats_seed_file(role))

    def weir(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Runs the command line program against nothing in particular."""
        command = [sys.executable, "-m", "weir.cli.main", *arguments]
        return subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self) -> None:
        """Returns when the stack is ready. Raises RuntimeError with what `weir up` printed if it is not.

        `weir up --detach` would do the same by a second program, which imports all for half a second and then waits."""
        paths = self._paths
        paths.make()
        rotate(paths.supervisor_log)
        log = open_for_child(paths.supervisor_log)
        command = [sys.executable, "-m", "weir.cli.main", "up", "--instance", self.instance, *self._up_flags]
        try:
            supervisor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ, start_new_session=True
            )
        finally:
            os.close(log)
        threading.Thread(target=supervisor.wait, daemon=True).start()  # or it would be there, dead, as long as this one
        ends_at_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready(supervisor.pid):
            if supervisor.returncode is not None or time.monotonic() > ends_at_s:
                raise RuntimeError(f"weir up: {supervisor.returncode}:\n{paths.supervisor_log.read_text()}")
            time.sleep(_POLL_S)

    def _is_ready(self, supervisor_pid: int) -> bool:
        state = try_read_state(self._paths.state_file)
        return state is not None and state.supervisor.pid == supervisor_pid and state.phase == "ready"

    def stop(self) -> None:
        """Ends the stack as `weir down` does. Raises what that tells, and RuntimeError if something of it is left."""
        _complete(end_instance(self._paths))
        left = [path.name for path in Path("/dev/shm").iterdir() if self.instance in path.name]
        if left:
            raise RuntimeError(f"left in /dev/shm after weir down: {left}")

    def status(self) -> dict[str, Any]:
        """What `weir status --json` prints, without a process of its own. Raises RuntimeError if nothing runs."""
        report = _complete(try_observe(self._paths))
        if report is None:
            raise RuntimeError(f"{self.instance} does not run")
        return asdict(report)

    def processes(self, role: str = "") -> list[ProcessView]:
        """The processes of one role, or all."""
        views = [
            ProcessView(
                name=entry["name"],
                role=entry["role"],
                pid=entry["pid"] or 0,
                address=entry["address"] or "",
                state=entry["state"],
                num_restarts=entry["num_restarts"],
            )
            for entry in self.status()["processes"]
        ]
        return [view for view in views if role in ("", view.role)]

    def http_urls(self) -> list[str]:
        """Of every gateway, in the order of their names."""
        endpoints = self.status()["endpoints"]
        return [where.removesuffix("/v1") for what, where in endpoints.items() if what.startswith("OpenAI")]

    def describe(self, process: ProcessView) -> admin_pb2.DescribeResponse:
        """Counters and integrity of one process."""
        metadata = key_metadata(self._paths.try_read_admin_key() or "")
        with grpc.insecure_channel(process.address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            return stub.Describe(admin_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S, metadata=metadata)

    def metrics(self, process: ProcessView) -> dict[str, float]:
        """All metrics of one process; a plain dict, since a protobuf map gives 0 for a name that is not there."""
        return dict(self.describe(process).metrics)

    def metric(self, role: str, name: str) -> float:
        """Sum of a metric over the processes of a role. Raises KeyError for one that a process does not have."""
        return sum(self.metrics(process)[name] for process in self.processes(role))

    def metric_of_leader(self, name: str) -> float:
        """Of the scheduler that leads. Raises KeyError while none does."""
        for process in self.processes("scheduler"):
            metrics = self.metrics(process)
            if metrics.get("is_leader"):
                return metrics[name]
        raise KeyError("no scheduler leads")

    def integrity_errors(self) -> list[str]:
        """What check_integrity() finds wrong, in every process that has an Admin service."""
        return [
            f"{process.name}: {error}"
            for process in self.processes()
            if process.role != "nats"
            for error in self.describe(process).integrity_errors
        ]

    def is_idle(self) -> bool:
        """Whether all are ready, a scheduler leads and knows every worker, nobody holds a request or a page, and every
        book is in order."""
        entries = [entry for entry in self.status()["processes"] if entry["role"] != "nats"]
        num_workers = sum(entry["role"] in WORKER_ROLES for entry in entries)
        leaders = [entry["metrics"] for entry in entries if entry["metrics"].get("is_leader")]
        return (
            any(metrics["workers"] >= num_workers for metrics in leaders)
            and all(entry["state"] == "ready" and not entry["integrity_errors"] for entry in entries)
            and all(_holds_nothing(entry["role"], entry["metrics"]) for entry in entries)
        )

    def kill(self, process: ProcessView, number: signal.Signals = signal.SIGKILL) -> None:
        """Raises RuntimeError for one that is just being restarted, and has no process."""
        if process.pid <= 0:  # it would be pytest's own group
            raise RuntimeError(f"{process.name} has no process now: it is {process.state}")
        os.kill(process.pid, number)

    def has_restarted(self, killed: ProcessView) -> bool:
        """Another process has its place, and is ready."""
        now = next(process for process in self.processes(killed.role) if process.name == killed.name)
        return now.pid not in {0, killed.pid} and now.state == "ready"

    def __enter__(self) -> "Stack":
        try:
            self.start()
        except BaseException:  # also a test's time-out: what was started is detached, and would stay
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _complete(work: Coroutine[Any, Any, _ResultT]) -> _ResultT:
    """In a thread, as the caller's may run an event loop; in this process, as another one imports for a second."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result(COMMAND_TIMEOUT_S)


_HELD = {
    "scheduler": ("queued", "granted", "reserved_pages"),
    "gateway": ("requests_in_flight",),
    "prefill": ("num_live",),
    "decode": ("num_live",),
}


def _holds_nothing(role: str, metrics: Mapping[str, float]) -> bool:
    """`metrics` lack what a standby scheduler does not count."""
    if role == "transfer":
        has_all_pages = metrics["free_pages"] + metrics["cached_pages"] == metrics["total_pages"]
        return has_all_pages and metrics["free_slots"] == metrics["total_slots"]
    return not any(metrics.get(name) for name in _HELD[role])


def wait_until(holds: Callable[[], bool], *, timeout_s: float, what: str, interval_s: float = 0.1) -> None:
    """Raises TimeoutError naming `what` unless `holds()` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(interval_s)
