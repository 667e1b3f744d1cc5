"""`weir up`: all processes of a stack, from the first start to the last exit."""

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from weir.core.errors import Unavailable, WeirError
from weir.core.process import own_identity
from weir.core.roles import WORKER_ROLES
from weir.core.tasks import end_tasks
from weir.runtime.stack.leftovers import Removed, remove_leftovers
from weir.runtime.stack.plan import STOP_ORDER, ProcessSpec, StackPlan
from weir.runtime.stack.processes import tag
from weir.runtime.stack.readiness import read_notes
from weir.runtime.stack.starter import ProcessStarter
from weir.runtime.stack.state import Phase, ProcessState, StackState, read_boot_id, write_state
from weir.runtime.stack.supervised import Shortage, StartPolicy, SupervisedProcess

# What a service may take beyond its grace period to stop in order, before it is killed.
_STOP_MARGIN_S = 6.0
_LAST_EXITS_S = 5.0


class NotReadyInTime(WeirError):
    """Some processes did not become ready; names them."""


class Reporter(Protocol):
    """Tells a user what happens."""

    def found_leftovers(self, removed: Removed) -> None: ...

    def process_ready(self, name: str, after_s: float) -> None: ...

    def note(self, text: str) -> None:
        """What a process says of itself when it is ready, such as how large its arena is."""
        ...

    def process_died(self, name: str, log_path: str) -> None: ...

    def warn(self, text: str) -> None:
        """Something that the machine refuses; the stack goes on."""
        ...

    def state_not_written(self, path: str, error: OSError) -> None:
        """Others do not find the stack by its name while that is so; reported once."""
        ...

    def stack_ready(self, endpoints: Mapping[str, str], after_s: float) -> None: ...

    def stopping(self) -> None: ...


class Supervisor:
    """Runs one stack. Whatever ends `run`, nothing of the stack is left then.

    Only for who holds the lock of the instance.
    """

    def __init__(
        self,
        plan: StackPlan,
        reporter: Reporter,
        environ: Mapping[str, str],
        policy: StartPolicy | None = None,
    ) -> None:
        self._plan = plan
        self._reporter = reporter
        self._phase: Phase = "starting"
        self._is_state_written = True
        self._notes: dict[str, tuple[str, ...]] = {}
        """By the process's name."""
        self._started_at = time.time()
        self._boot_id = read_boot_id()
        self._identity = own_identity()
        self._asked_to_stop = asyncio.Event()
        self._hurry = asyncio.Event()
        # gRPC's own INFO lines name every connection that ends.
        tags = tag(plan.paths.folder, self._identity)
        tagged = {"GRPC_VERBOSITY": "ERROR", **environ, **tags, "PYTHONUNBUFFERED": "1"}
        start_policy = policy or StartPolicy()
        self._starter = starter = ProcessStarter(tagged)

        def supervise(spec: ProcessSpec) -> SupervisedProcess:
            return SupervisedProcess(spec, start_policy, starter, self._on_change, self._on_trouble)

        self._supervise = supervise
        self._processes = [supervise(spec) for spec in plan.specs]
        self._running: list[asyncio.Task[None]] = []
        """Named as their processes."""

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def is_serving(self) -> bool:
        """Whether all of its processes are ready."""
        return self._phase == "ready" and all(process.state.phase == "ready" for process in self._processes)

    @property
    def states(self) -> list[ProcessState]:
        return [process.state for process in self._processes]

    async def run(self) -> bool:
        """Returns after SIGINT, SIGTERM or SIGHUP: whether the stack was ready before.

        Raises ProcessFailed or NotReadyInTime if the start fails.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with self._starter.forking(self._plan.specs):
                # What others wait for goes first, and what wants the most of the cores last.
                in_order = sorted(self._processes, key=lambda process: process.spec.role in WORKER_ROLES)
                self._running = [self._spawn(process) for process in in_order]
                is_ready = await self._wait_ready()
            if is_ready:
                await self._stay()
            return is_ready
        finally:
            await self._stop()

    async def start_more(self, specs: Sequence[ProcessSpec]) -> None:
        """Processes beside those that run. Returns when all are ready; else none of them is left, and it raises
        ProcessFailed, NotReadyInTime, or Unavailable while the stack stops."""
        more = [self._supervise(spec) for spec in specs]
        self._processes += more
        tasks = [self._spawn(process) for process in more]
        ready = asyncio.create_task(_all_ready(more))
        try:
            awaited: set[asyncio.Task[None]] = {ready, *tasks}
            done, _ = await asyncio.wait(
                awaited, timeout=self._plan.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            if done.intersection(tasks) or self._phase != "ready":
                raise Unavailable("the stack is stopping")
            late = ", ".join(process.spec.name for process in more if not process.ready.is_set())
            if late:
                logs = self._plan.paths.supervisor_log.parent
                raise NotReadyInTime(f"not ready within {self._plan.start_timeout_s:.0f} s: {late}; logs: {logs}")
            for process in more:
                process.restart_for_ever()
        except BaseException:
            await self._end(more, tasks)
            raise
        finally:
            ready.cancel()
        self._running += tasks

    async def end_some(self, names: Sequence[str]) -> None:
        """Stage by stage, as the whole stack ends; nobody starts them again."""
        ending = [process for process in self._processes if process.spec.name in names]
        tasks = [task for task in self._running if task.get_name() in names]
        self._running = [task for task in self._running if task not in tasks]
        await self._end(ending, tasks)

    async def _end(self, ending: Sequence[SupervisedProcess], tasks: "Sequence[asyncio.Task[None]]") -> None:
        for process in ending:
            process.end_restarts()
        await self._stop_in_order(ending)
        _, stuck = await asyncio.wait(tasks, timeout=_LAST_EXITS_S) if tasks else ((), ())
        await end_tasks(stuck)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._processes = [process for process in self._processes if process not in ending]
        self._write_state()

    def _spawn(self, process: SupervisedProcess) -> "asyncio.Task[None]":
        return asyncio.create_task(process.run(), name=process.spec.name)

    async def _stop_in_order(self, processes: Sequence[SupervisedProcess]) -> None:
        for number, roles in enumerate(STOP_ORDER):
            stage = [process for process in processes if process.spec.role in roles]
            await asyncio.gather(*(process.stop(self._stage_limit_s(number)) for process in stage))

    async def _wait_ready(self) -> bool:
        """False if asked to stop meanwhile."""
        all_ready = asyncio.create_task(_all_ready(self._processes))
        asked = asyncio.create_task(self._asked_to_stop.wait())
        done = await self._first_of(all_ready, asked, timeout_s=self._plan.start_timeout_s)
        if not done:
            late = ", ".join(process.spec.name for process in self._processes if not process.ready.is_set())
            limit = f"{self._plan.start_timeout_s:.0f} s"
            raise NotReadyInTime(f"not ready within {limit}: {late}; logs: {self._plan.paths.supervisor_log.parent}")
        return all_ready in done and asked not in done

    async def _first_of(
        self, *awaited: "asyncio.Task[Any]", timeout_s: float | None = None
    ) -> "set[asyncio.Task[Any]]":
        """Which of `awaited` came first; raises what a process failed with, should that happen before."""
        try:
            done, _ = await asyncio.wait(
                {*awaited, *self._running}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in awaited:
                task.cancel()
        for task in done.intersection(self._running):
            task.result()
        return done

    async def _stay(self) -> None:
        for process in self._processes:
            process.restart_for_ever()
        self._phase = "ready"
        self._write_state()
        self._report(lambda: self._reporter.stack_ready(self._plan.endpoints, time.time() - self._started_at))
        while not self._asked_to_stop.is_set():  # processes that were taken away have ended in between
            await self._first_of(asyncio.create_task(self._asked_to_stop.wait()))

    async def _stop(self) -> None:
        """Stage by stage, each bounded; a second signal cuts all of them short."""
        self._phase = "stopping"
        self._report(self._reporter.stopping)
        for process in self._processes:
            process.end_restarts()
        hurrying = asyncio.create_task(self._kill_when_hurried())
        try:
            await self._stop_in_order(self._processes)
            await self._wait_exits()
        finally:
            hurrying.cancel()
            with suppress(asyncio.CancelledError):
                await hurrying
        await remove_leftovers(self._plan.paths, term_s=0.0)

    async def _wait_exits(self) -> None:
        """What does not exit although it was killed is left to `remove_leftovers`, which kills it again or names it."""
        if self._running:
            done, stuck = await asyncio.wait(self._running, timeout=_LAST_EXITS_S)
            await asyncio.gather(*done, return_exceptions=True)
            await end_tasks(stuck)

    async def _kill_when_hurried(self) -> None:
        await self._hurry.wait()
        await asyncio.gather(*(process.stop(0.0) for process in self._processes))

    def _stage_limit_s(self, number: int) -> float:
        return self._plan.stage_grace_s[number] + _STOP_MARGIN_S

    def _on_signal(self) -> None:
        if self._asked_to_stop.is_set():
            self._hurry.set()
        self._asked_to_stop.set()

    def _on_change(self, process: SupervisedProcess) -> None:
        state, error = process.state, process.start_error
        new_notes = self._take_notes(process) if state.phase == "ready" else ()
        self._write_state()
        if state.phase == "ready":
            self._report(lambda: self._reporter.process_ready(state.name, time.time() - state.started_at))
            for text in new_notes:
                self._report(partial(self._reporter.note, text))
        elif state.phase == "restarting" and error is not None:
            self._on_trouble(f"{state.name} could not be started", error)
        elif state.phase == "restarting":
            self._report(lambda: self._reporter.process_died(state.name, state.log_path))

    def _take_notes(self, process: SupervisedProcess) -> tuple[str, ...]:
        """Those that it did not have when it was ready before."""
        name, notes = process.spec.name, read_notes(process.spec.ready_file)
        known, self._notes[name] = self._notes.get(name, ()), notes
        return tuple(text for text in notes if text not in known)

    def _on_trouble(self, what: str, error: Shortage) -> None:
        self._report(lambda: self._reporter.warn(f"{what} ({error}); trying again"))

    def _report(self, report: Callable[[], None]) -> None:
        """A full disk, or a terminal that is gone, ends nothing and leaves nobody running."""
        with suppress(OSError):
            report()

    def _write_state(self) -> None:
        state = StackState(
            instance=self._plan.paths.folder.name,
            boot_id=self._boot_id,
            supervisor=self._identity,
            phase=self._phase,
            started_at=self._started_at,
            stop_limit_s=_STOP_MARGIN_S + sum(self._stage_limit_s(number) for number in range(len(STOP_ORDER))),
            endpoints=self._plan.endpoints,
            processes=tuple(process.state for process in self._processes),
            notes=tuple(text for notes in self._notes.values() for text in notes),
        )
        try:
            write_state(self._plan.paths.state_file, state)
        except OSError as caught:  # a full disk, or a folder that was cleaned away: the processes still have to end
            error = caught
            if self._is_state_written:
                self._report(lambda: self._reporter.state_not_written(str(self._plan.paths.state_file), error))
            self._is_state_written = False
        else:
            self._is_state_written = True


async def _all_ready(processes: Sequence[SupervisedProcess]) -> None:
    """One that was ready and died again while others still start counts as not ready."""
    while waiting := [process for process in processes if not process.ready.is_set()]:
        await waiting[0].ready.wait()
