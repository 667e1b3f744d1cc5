"""`weir restart --rolling`: the processes of a running stack one after the other, each by its own orderly end.

The supervisor sees a process end and starts it again, as it does after any death; so nobody has to be told, and a
restart that is broken off leaves a whole stack.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weir.core.clock import SystemClock
from weir.core.errors import NotFound, Unavailable, WeirError
from weir.core.process import ProcessIdentity
from weir.core.roles import WORKER_ROLES
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.processes import is_running, send_signal
from weir.runtime.stack.state import ProcessState, StackState, try_read_state

_ORDER = ("scheduler", "transfer", *WORKER_ROLES, "gateway", "nats")
"""Who is asked by many comes back before those who ask, and the bus last: all of them connect to it again."""
_POLL_S = 0.1


class RestartFailed(WeirError):
    """A process did not come back; those after it were not touched."""


@dataclass(frozen=True, slots=True)
class RestartStep:
    """Processes that end together, and are ready again before the next step begins."""

    names: tuple[str, ...]
    reason: str = ""
    """Why it is more than one."""


class RestartReporter(Protocol):
    """Tells a user what happens."""

    def step_begins(self, step: RestartStep) -> None: ...

    def worker_drained(self, name: str, after_s: float, problem: str) -> None:
        """`problem`: why it was not; its end drains it in any case. Empty: it was."""
        ...

    def step_ended(self, step: RestartStep, after_s: float) -> None: ...


def plan_restart(
    processes: Sequence[ProcessState], names: Collection[str], leader: str, mismatch: str
) -> tuple[RestartStep, ...]:
    """The steps for the named processes, or for all if none is named. `leader`: the name of the scheduler that leads,
    which comes after those that stand by. `mismatch`: why the arena cannot be kept; then its transfer service and all
    workers start cold, together. Empty: it is kept. Raises NotFound for a name that no process has.
    """
    known = {process.name: process for process in processes}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise NotFound("process", f"no process is named {unknown[0]!r}; there are: {', '.join(known)}")
    chosen = [process for process in processes if not names or process.name in names]
    chosen.sort(key=lambda process: (_ORDER.index(process.role), process.name == leader))
    cold = {process.name for process in processes if process.role in ("transfer", *WORKER_ROLES)} if mismatch else set()
    if not cold.intersection(process.name for process in chosen):
        return tuple(RestartStep((process.name,)) for process in chosen)
    together = RestartStep(tuple(process.name for process in processes if process.name in cold), mismatch)
    steps: list[RestartStep] = []
    for process in chosen:
        if process.name not in cold:
            steps.append(RestartStep((process.name,)))
        elif together not in steps:
            steps.append(together)
    return tuple(steps)


class RollingRestart:
    """`drain` of a worker's address returns when it is drained, or raises WeirError; `find_leader` gives the name of
    the scheduler that leads, None while none does."""

    def __init__(
        self,
        paths: InstancePaths,
        reporter: RestartReporter,
        drain: Callable[[str], Awaitable[None]],
        find_leader: Callable[[Sequence[ProcessState]], Awaitable[str | None]],
        timeout_s: float,
    ) -> None:
        """`timeout_s`: for one step, the drains not counted."""
        self._paths = paths
        self._reporter = reporter
        self._drain = drain
        self._find_leader = find_leader
        self._timeout_s = timeout_s
        self._clock = SystemClock()

    async def run(self, names: Collection[str], segments: Sequence[Path]) -> None:
        """Raises NotFound, Unavailable where nothing can be restarted, RestartFailed."""
        state = self._state()
        leader = await self._find_leader(state.processes) or ""
        # late, as it loads numpy, and `weir --help` this module
        from weir.kv.arena.segment import try_find_mismatch  # noqa: PLC0415

        mismatches = [await asyncio.to_thread(try_find_mismatch, segment) for segment in segments]
        mismatch = next((found for found in mismatches if found), "")
        for step in plan_restart(state.processes, names, leader, mismatch):
            self._reporter.step_begins(step)
            began_s = self._clock.now_s()
            await self._restart(step)
            self._reporter.step_ended(step, self._clock.now_s() - began_s)

    def _state(self) -> StackState:
        state = try_read_state(self._paths.state_file)
        name = self._paths.folder.name
        if state is None or not is_running(state.supervisor):
            raise Unavailable(f"{name} has no supervisor here that would start a process again")
        if state.phase != "ready":
            raise Unavailable(f"{name} is {state.phase}: only a stack that is ready is restarted")
        return state

    async def _restart(self, step: RestartStep) -> None:
        processes = {process.name: process for process in self._state().processes}
        before = [processes[name] for name in step.names]
        await asyncio.gather(*(self._drain_first(process) for process in before if process.role in WORKER_ROLES))
        for process in before:
            if process.identity is not None:
                send_signal(process.identity, signal.SIGTERM)
        ended = {process.name: process.identity for process in before}
        deadline_s = self._clock.now_s() + self._timeout_s
        # Polled: what the supervisor does shows in its state file alone.
        while late := await self._find_late(ended):
            if self._clock.now_s() > deadline_s:
                logs = ", ".join(process.log_path for process in before if process.name in late)
                raise RestartFailed(f"not ready {self._timeout_s:g} s after its end: {', '.join(late)}; see {logs}")
            await asyncio.sleep(_POLL_S)

    async def _drain_first(self, process: ProcessState) -> None:
        began_s, problem = self._clock.now_s(), ""
        try:
            await self._drain(process.address)
        except WeirError as error:
            problem = error.message
        self._reporter.worker_drained(process.name, self._clock.now_s() - began_s, problem)

    async def _find_late(self, ended: dict[str, ProcessIdentity | None]) -> list[str]:
        """Those that are not ready again. A scheduler is when one leads: it, or another."""
        processes = self._state().processes
        now = [process for process in processes if process.name in ended]
        late = [one.name for one in now if one.phase != "ready" or one.identity in (None, ended[one.name])]
        if not late and any(one.role == "scheduler" for one in now) and await self._find_leader(processes) is None:
            return [one.name for one in now]
        return late
