"""The stack that is disturbed: `weir up` with two of all that can stand in for each other, over a NATS server and
small file systems of the driver's own, with relays wherever a connection is to be cut."""

import contextlib
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import grpc
from tests.chaos.driver.file_system import SmallFileSystem
from tests.chaos.driver.nats import KeptNats
from tests.chaos.driver.worker_relays import WORKER_HOST, WorkerRelays
from tests.chaos.relay import Relay

from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.state import StackState, try_read_state
from weir.runtime.stack.supervised import last_lines
from weir.testing.stack import ProcessView, Stack

_MIB = 1 << 20
_NUM_LINES = 12
_ARENA_BYTES = 320 * _MIB
"""Less than 64 streams could reserve, so that some queue and some give way."""
_SHM_BYTES = 640 * _MIB
_STORE_BYTES = 256 * _MIB


class _Part(Protocol):
    def close(self) -> None: ...


_PartT = TypeVar("_PartT", bound=_Part)


class ChaosStack:
    """`hands_off`: decode workers leave every prompt to prefill workers."""

    def __init__(self, folder: Path, *, hands_off: bool = False) -> None:
        self._closing = contextlib.ExitStack()
        self._folder = folder
        self.store = self._own(SmallFileSystem(folder / "store", _STORE_BYTES))
        self.shm = self._own(SmallFileSystem(folder / "shm", _SHM_BYTES))
        self.nats = self._own(KeptNats(self.store.folder / "jetstream", folder / "nats.log"))
        self.nats_relay = self._own(Relay("127.0.0.1", self.nats.port))
        flags = ("--schedulers", "2", "--gateways", "2", "--arena-bytes", str(_ARENA_BYTES))
        nats = ("--nats", f"nats://127.0.0.1:{self.nats_relay.port}")
        config = ("--config", str(self._write_config(hands_off=hands_off)))
        self._stack = Stack(folder / "run", num_prefill=2, num_decode=2, flags=(*flags, *nats, *config))
        self._paths = InstancePaths((folder / "run").resolve() / self._stack.instance)
        self.worker_relays = self._own(WorkerRelays(self._worker_pids))

    @property
    def grpc_addresses(self) -> list[str]:
        """Of the gateways, in the order of their numbers."""
        endpoints = self._state().endpoints
        return [where for what, where in endpoints.items() if what.startswith("gRPC")]

    @property
    def folder(self) -> Path:
        """Of the instance: logs are in it."""
        return self._paths.folder

    def views(self, role: str = "") -> list[ProcessView]:
        """Read from the supervisor's file: `weir status` takes longer than some faults."""
        views = [
            ProcessView(
                name=process.name,
                role=process.role,
                pid=process.identity.pid if process.identity else 0,
                address=process.address.replace(WORKER_HOST, "127.0.0.1"),
                state=process.phase if process.identity else "restarting",
                num_restarts=process.num_restarts,
            )
            for process in self._state().processes
        ]
        views.append(ProcessView("nats", "nats", self.nats.pid, "", "ready" if self.nats.is_ready else "starting", 0))
        return [view for view in views if role in ("", view.role)]

    def metrics(self, process: ProcessView) -> dict[str, float]:
        """Over a new connection. Raises grpc.RpcError."""
        return self._stack.metrics(process)

    def integrity_errors(self) -> list[str]:
        return [
            f"{view.name}: {error}"
            for view in self.views()
            if view.role != "nats"
            for error in self._stack.describe(view).integrity_errors
        ]

    def try_find_leader(self) -> dict[str, float] | None:
        """Its metrics; None while there is not exactly one."""
        leaders = []
        for view in self.views("scheduler"):
            with contextlib.suppress(grpc.RpcError):
                metrics = self.metrics(view)
                if metrics.get("is_leader"):
                    leaders.append(metrics)
        return leaders[0] if len(leaders) == 1 else None

    def last_lines(self, name: str) -> list[str]:
        """Of a process's log."""
        return last_lines(self._paths.log_file(name), _NUM_LINES)

    def signal(self, process: ProcessView, number: signal.Signals) -> None:
        """Nothing, if it is gone already."""
        with contextlib.suppress(ProcessLookupError):
            if process.pid > 0:  # 0 would be the driver's own group
                os.kill(process.pid, number)

    def _worker_pids(self) -> set[int]:
        state = try_read_state(self._paths.state_file)
        processes = state.processes if state is not None else ()
        return {one.identity.pid for one in processes if one.identity and one.role in ("prefill", "decode")}

    def _state(self) -> StackState:
        state = try_read_state(self._paths.state_file)
        if state is None:
            raise RuntimeError(f"{self._paths.state_file} names no stack")
        return state

    def _own(self, part: _PartT) -> _PartT:
        self._closing.callback(part.close)
        return part

    def _write_config(self, *, hands_off: bool) -> Path:
        path = self._folder / "weir.toml"
        serves_locally = "false" if hands_off else "true"
        path.write_text(
            f'[transfer]\nsegment_dir = "{self.shm.folder}"\n'
            f'[prefill]\nadvertise_host = "{WORKER_HOST}"\n'
            f'[decode]\nadvertise_host = "{WORKER_HOST}"\nswap_dir = "{self.shm.folder}"\n'
            f"serves_locally = {serves_locally}\n"
            "[gateway]\nresume_s = 10.0\n"
        )
        return path

    def __enter__(self) -> "ChaosStack":
        try:
            self._stack.__enter__()
        except BaseException:
            self._closing.close()
            raise
        self._closing.push(self._stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)
