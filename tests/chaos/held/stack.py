"""A stack of real processes around a hash for a model: NATS, scheduler, transfer service, one worker of each kind and
one gateway. No supervisor: a test kills and starts them itself, and holds their steps where it wants."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from tests.chaos.held.gate import Gate, Order
from tests.chaos.held.process import MODEL_DIGEST, PAGE_BYTES, run_role
from tests.unit.gateway.fake_model import MAX_CONTEXT

from weir.bus.server import nats_server_command
from weir.client.workers import WorkersClient
from weir.core.addresses import free_port
from weir.core.errors import Unavailable
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import layout_of
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

NUM_PAGES = 48
NUM_SLOTS = 12
START_TIMEOUT_S = 60.0
LIMITS = """
default_lane = "standard"
[lanes.urgent]
max_queued = 100
max_wait_s = 60
[lanes.standard]
max_queued = 100
max_wait_s = 60
[lanes.narrow]
max_queued = 100
max_wait_s = 60
max_batch = 1
"""
ROLES = ("transfer", "scheduler", "prefill", "decode", "gateway")
_WORKERS = ("prefill", "decode")
_LEASE_TTL_MS = 8000
"""Nobody starts a worker again at once that was killed for its silence on a busy machine."""
_DESCRIBE_S = 20.0


class _Child:
    """One process, and the file in which it says that it is ready. Forked from one that has imported everything."""

    def __init__(self, role: str, arguments: list[str], directory: Path) -> None:
        self.role = role
        self.ready_file = directory / f"{role}.ready"
        self.ready_file.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([run_role.__module__])
        arguments = [*arguments, "--ready-file", str(self.ready_file)]
        self.process = context.Process(target=run_role, args=(role, arguments, directory / f"{role}.log"))
        self.process.start()
        self.address = ""

    def try_become_ready(self) -> bool:
        """Raises RuntimeError if it ended instead."""
        if not self.process.is_alive():
            raise RuntimeError(f"{self.role} ended with {self.process.exitcode} while it started; see its log")
        if self.ready_file.exists():
            self.address = json.loads(self.ready_file.read_text())["address"]
        return bool(self.address)

    def end(self) -> None:
        self.process.kill()
        self.process.join(timeout=10)


class HeldStack:
    """Entered: all are ready. Left: all are gone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._order_names = (f"order {number}" for number in itertools.count(1))
        self._nats: subprocess.Popen[bytes] | None = None
        self._nats_port = -1
        self._children: dict[str, _Child] = {}
        self.http_port = free_port()
        self.gates = {role: Gate(directory, role) for role in _WORKERS}

    @property
    def grpc_address(self) -> str:
        return self._children["gateway"].address

    def __enter__(self) -> "HeldStack":
        try:
            self.start_nats()
            for role in ("transfer", "scheduler"):
                self.start(role)
            self.wait_ready()
            for role in ("prefill", "decode", "gateway"):
                self.start(role)
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.open_gates()
        for role in reversed(ROLES):
            if role in self._children:
                self._children.pop(role).end()
        self.kill_nats()

    # -- processes --

    def start_nats(self) -> None:
        """On the port that it had."""
        store, folder = self._directory / "store", self._directory
        command = nats_server_command(self._nats_port, store, ports_file_dir=folder)
        with (folder / "nats.log").open("ab") as log:
            self._nats = subprocess.Popen(command, stdout=log, stderr=log)
        ports_file = folder / f"nats-server_{self._nats.pid}.ports"
        wait_for(lambda: ports_file.exists() and ports_file.read_text() != "", "nats-server listens", START_TIMEOUT_S)
        self._nats_port = int(json.loads(ports_file.read_text())["nats"][0].rsplit(":", 1)[1])

    def kill_nats(self) -> None:
        """kill -9; what it has on disk stays."""
        if self._nats is not None:
            self._nats.kill()
            self._nats.wait(timeout=10)
            self._nats = None

    def start(self, role: str) -> None:
        """In the place of one that is gone."""
        if role in self._children:
            self._children.pop(role).end()
        self._children[role] = _Child(role, self._arguments(role), self._directory)

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self._children[role].process.pid
        assert pid is not None
        os.kill(pid, number)

    def is_running(self, role: str) -> bool:
        return self._children[role].process.is_alive()

    def is_ready(self, role: str) -> bool:
        """False also while it drains."""
        return self._children[role].ready_file.exists()

    def wait_ready(self) -> None:
        for child in self._children.values():
            wait_for(child.try_become_ready, f"{child.role} is ready", START_TIMEOUT_S)

    def wait_gone(self, role: str) -> None:
        wait_for(lambda: not self.is_running(role), f"{role} has ended", 30.0)

    def restart_missing(self) -> None:
        """Whoever is gone has a successor, all are ready, and the scheduler places requests on the workers that there
        are, and on no other."""
        for role in ROLES:
            if not self.is_running(role):
                self.start(role)
        self.wait_ready()
        addresses = {self._children[role].address for role in _WORKERS}
        with WorkersClient([self._children["scheduler"].address]) as workers:
            wait_for(lambda: _serving(workers) == addresses, "workers are known, the dead missed", START_TIMEOUT_S)

    # -- gates --

    def close_gate(self, role: str, *, num_steps: int = 0, swapped_seed: int | None = None) -> Order:
        order = Order(next(self._order_names), num_steps, swapped_seed)
        self.gates[role].close(order)
        return order

    def open_gates(self) -> None:
        for gate in self.gates.values():
            gate.open()

    # -- what they say of themselves --

    def metrics(self, role: str) -> dict[str, float]:
        """Raises grpc.RpcError."""
        return dict(self._describe(role).metrics)

    def has_metric(self, role: str, name: str, value: float) -> bool:
        """False also while it does not answer."""
        try:
            return self.metrics(role)[name] == value
        except grpc.RpcError:
            return False

    def leftovers(self) -> dict[str, object]:
        """What is not as it is in an idle stack; empty: nothing is held anywhere, and every book is in order."""
        found: dict[str, object] = {}
        for role in ROLES:
            try:
                description = self._describe(role)
            except grpc.RpcError as error:
                return {role: str(error)}
            metrics = dict(description.metrics)
            held = {name: metrics[name] for name in _HELD[role] if metrics[name]}
            if role == "transfer":
                held |= _missing(metrics)
            if held or description.integrity_errors:
                found[role] = (held, list(description.integrity_errors))
        return found

    def num_finished(self) -> float:
        """Sequences that workers have computed to their ends since they started."""
        return sum(self.metrics(role)["finished_total"] for role in _WORKERS)

    def num_gateways_missed(self) -> int:
        """How often workers have cancelled what a gateway had that was gone."""
        logs = [(self._directory / f"{role}.log").read_text() for role in _WORKERS]
        return sum(log.count("has gone: ") for log in logs)

    def describe_leftovers(self) -> str:
        return f"nothing is left of {self.leftovers()}"

    def _describe(self, role: str) -> admin_pb2.DescribeResponse:
        with grpc.insecure_channel(self._children[role].address) as channel:
            return admin_pb2_grpc.AdminStub(channel).Describe(admin_pb2.DescribeRequest(), timeout=_DESCRIBE_S)

    def _arguments(self, role: str) -> list[str]:
        socket = self._directory / "arena.sock"
        flags: dict[str, object] = {
            "instance": "held",
            "nats-url": f"nats://127.0.0.1:{self._nats_port}",
            "runtime-dir": self._directory,
            "grace-s": 20,
        }
        if role == "transfer":
            flags |= {"listen": f"unix:{socket}", "segment-dir": self._directory, "arena-bytes": _ARENA_BYTES}
            flags |= {"page-bytes": PAGE_BYTES, "max-context-tokens": MAX_CONTEXT, "model-digest": MODEL_DIGEST}
            flags |= {"num-slots": NUM_SLOTS, "lease-ttl-ms": _LEASE_TTL_MS}
        elif role == "scheduler":
            limits_file = self._directory / "limits.toml"
            limits_file.write_text(LIMITS)
            flags |= {"limits-file": limits_file, "page-overcommit": 3}
        if role in _WORKERS:
            flags |= {"arena-socket": socket, "max-num-seqs": 8, "max-stall-s": 60}
        if role == "decode":
            flags |= {"swap-dir": self._directory, "swap-bytes": PAGE_BYTES * NUM_PAGES}
        if role == "gateway":
            flags |= {"listen": "127.0.0.1:0", "http-port": self.http_port, "worker-lost-s": 3}
        pairs = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        return [*pairs, "--no-serves-locally"] if role == "decode" else pairs


_ARENA_BYTES = layout_of(ArenaGeometry(PAGE_BYTES, NUM_PAGES, NUM_SLOTS, MAX_CONTEXT)).memory_bytes + 4096
_WORKER = ("num_live", "num_running", "num_waiting", "num_held_pages")
_HELD = {
    "transfer": ("orphaned_slots",),
    "scheduler": ("queued", "granted", "reserved_pages"),
    "prefill": (*_WORKER, "hand_offs_under_way", "num_open_spans"),
    "decode": (*_WORKER, "num_open_spans"),
    "gateway": ("requests_in_flight", "requests_open", "worker_subscriptions"),
}


def _missing(metrics: dict[str, float]) -> dict[str, float]:
    num_pages = metrics["total_pages"] - metrics["free_pages"] - metrics["cached_pages"]
    num_slots = metrics["total_slots"] - metrics["free_slots"]
    return {name: number for name, number in (("pages", num_pages), ("slots", num_slots)) if number}


def _serving(workers: WorkersClient) -> set[str]:
    """Addresses of those that take work; none while the scheduler does not answer."""
    try:
        return {worker.address for worker in workers.list() if worker.duty == "serving"}
    except Unavailable:
        return set()


def wait_for(holds: Callable[[], bool], what: str | Callable[[], str], timeout_s: float) -> None:
    """Raises TimeoutError naming `what` unless it becomes true in time."""
    ends_at_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends_at_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)
