"""How `weir up` shows a stack that starts, runs and ends."""

import time
from collections.abc import Mapping
from types import TracebackType

from weir.cli.console import stderr, stdout
from weir.runtime.stack.leftovers import Removed
from weir.runtime.stack.state import StackState


def print_endpoints(endpoints: Mapping[str, str], after_s: float, instance: str) -> None:
    """The one thing that goes to stdout."""
    stdout.print(f"ready after {after_s:.1f} s: instance {instance}", style="bold green", markup=False, soft_wrap=True)
    for what, where in endpoints.items():
        stdout.print(f"  {what:<7} {where}", markup=False, soft_wrap=True)


class ConsoleReporter:
    """Lines on the terminal of `weir up`, or in its log."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def found_leftovers(self, removed: Removed) -> None:
        if removed.pids:
            pids = " ".join(str(pid) for pid in removed.pids)
            stderr.print(f"ended processes that an earlier `weir up` had left: {pids}", style="yellow", markup=False)
        for path in removed.files:
            stderr.print(f"removed {path}, left by an earlier run", style="yellow", markup=False, soft_wrap=True)

    def process_ready(self, name: str, after_s: float) -> None:
        stderr.print(f"  {name:<12} ready after {after_s:.1f} s", markup=False)

    def process_died(self, name: str, log_path: str) -> None:
        line = f"  {name:<12} died; starting it again (log: {log_path})"
        stderr.print(line, style="yellow", markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        stderr.print(f"  {text}", style="yellow", markup=False, soft_wrap=True)

    def state_not_written(self, path: str, error: OSError) -> None:
        problem = f"{path} cannot be written ({error.strerror or error}): `weir status` has nothing to show;"
        ends_it = f"`weir down --instance {self._instance}` or Ctrl-C ends this stack"
        stderr.print(f"{problem} {ends_it}", style="red", markup=False, soft_wrap=True)

    def stack_ready(self, endpoints: Mapping[str, str], after_s: float) -> None:
        print_endpoints(endpoints, after_s, self._instance)
        stderr.print("Ctrl-C ends it", style="dim")

    def stopping(self) -> None:
        stderr.print("stopping: running requests may end first; Ctrl-C again does not wait", style="dim")


class DetachedProgress:
    """A status line on the terminal of `weir up --detach`, read from the supervisor's state file."""

    def __init__(self) -> None:
        self._status = stderr.status("starting")
        self._shown: set[str] = set()

    def show(self, state: StackState) -> None:
        ready = [process.name for process in state.processes if process.phase == "ready"]
        for name in ready:
            if name not in self._shown:
                self._shown.add(name)
                stderr.print(f"  {name:<12} ready after {time.time() - state.started_at:.1f} s", markup=False)
        waiting = [process.name for process in state.processes if process.name not in ready]
        self._status.update(f"waiting for {', '.join(waiting)}" if waiting else "all processes are ready")

    def __enter__(self) -> "DetachedProgress":
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
