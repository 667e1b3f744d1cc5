"""Stacks of fake processes, and supervisors for them in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from weir.runtime.stack.config import IDLE_GRACE_S
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.plan import STOP_ORDER, ProcessSpec, StackPlan
from weir.runtime.stack.state import StackState, try_read_state
from weir.runtime.stack.supervised import StartPolicy

HERE = Path(__file__).parent
FAST = StartPolicy(probe_interval_s=0.01, first_backoff_s=0.02, max_backoff_s=0.2, healthy_s=5.0, log_check_s=0.05)


class FileProbe:
    """Ready once the fake process has written its ready file."""

    def __init__(self, ready_file: Path) -> None:
        self._ready_file = ready_file

    async def try_reach(self, pid: int) -> str | None:
        try:
            facts = json.loads(self._ready_file.read_text())
        except FileNotFoundError:
            return None
        return str(facts["address"]) if facts["pid"] == pid else None


def fake_spec(paths: InstancePaths, name: str, *flags: str) -> ProcessSpec:
    """`name` is ROLE-INDEX, or `nats`."""
    ready_file = paths.ready_file(name)
    return ProcessSpec(
        name=name,
        role=name.partition("-")[0],
        command=(sys.executable, "-S", "-E", str(HERE / "fake_process.py"), str(ready_file), *flags),
        log_path=paths.log_file(name),
        ready_file=ready_file,
        probe=FileProbe(ready_file),
    )


def fake_plan(
    paths: InstancePaths, specs: Sequence[ProcessSpec], *, start_timeout_s: float = 20.0, grace_s: float = 2.0
) -> StackPlan:
    stage_grace_s = (grace_s, *[min(grace_s, IDLE_GRACE_S)] * (len(STOP_ORDER) - 1))
    return StackPlan(paths, tuple(specs), {"gRPC": "127.0.0.1:1"}, start_timeout_s, stage_grace_s)


@dataclass(frozen=True)
class FakeProcess:
    """What `Driver` is to start."""

    name: str
    flags: tuple[str, ...] = ()


class Driver:
    """`drive_stack.py` in a process of its own: a supervisor that can be signalled and killed."""

    def __init__(
        self,
        folder: Path,
        processes: Sequence[FakeProcess],
        *,
        start_timeout_s: float = 20.0,
        grace_s: float = 2.0,
    ) -> None:
        self.paths = InstancePaths(folder)
        specs = json.dumps([[process.name, *process.flags] for process in processes])
        times = (str(start_timeout_s), str(grace_s))
        command = [sys.executable, str(HERE / "drive_stack.py"), str(folder), *times, specs]
        root = str(HERE.parents[2])
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )

    def state(self) -> StackState:
        state = try_read_state(self.paths.state_file)
        assert state is not None
        return state

    def pids(self) -> dict[str, int]:
        return {p.name: p.identity.pid for p in self.state().processes if p.identity is not None}

    def wait_phase(self, phase: str, timeout_s: float = 20.0) -> StackState:
        def reached() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            state = try_read_state(self.paths.state_file)
            return state is not None and state.phase == phase and state.supervisor.pid == self.process.pid

        wait_until(reached, timeout_s)
        return self.state()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 20.0) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def __enter__(self) -> "Driver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """A zombie counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
