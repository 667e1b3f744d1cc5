"""One process under a supervisor.

             ┌──────────── exit ───────────┐
             v                             │
start ─> STARTING ── probe answers ─> READY ──exit──> RESTARTING ── back-off ──> STARTING …
             └────── exit, too often before the stack was ready ──> ProcessFailed

A start that the machine refuses (no process, no descriptor, no room on the disk) counts as an exit.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weir.core.clock import Backoff, Clock, SystemClock
from weir.core.errors import WeirError
from weir.core.process import ProcessIdentity
from weir.runtime.stack.plan import ProcessSpec
from weir.runtime.stack.processes import try_identify
from weir.runtime.stack.starter import ProcessStarter, StartedProcess
from weir.runtime.stack.state import ProcessPhase, ProcessState

_EXIT_USAGE = 2
_KILL_S = 5.0
MAX_LOG_BYTES = 16 * 1024 * 1024
_TAIL_BYTES = 16 * 1024

Shortage = OSError | RuntimeError
"""What the machine refuses; RuntimeError is how Python says that it can start no thread."""


class ProcessFailed(WeirError):
    """A process could not be brought up; says which, how it ended, and what it logged last."""


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """How often a process may fail before the stack was ready, and how often it is probed until it is.

    One that was ready for `healthy_s` starts again at once; else delays double from `first_backoff_s` to
    `max_backoff_s`.
    """

    max_failures: int = 3
    probe_interval_s: float = 0.05
    log_check_s: float = 5.0
    first_backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    healthy_s: float = 10.0


class SupervisedProcess:
    """Starts a process, sees when it is ready, and starts it again when it dies, until stopped.

    `on_change` is called after every change of `state`. `on_trouble`: what the machine refused while a process was
    watched, once a kind, and why; it is tried again.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        policy: StartPolicy,
        starter: ProcessStarter,
        on_change: Callable[["SupervisedProcess"], None],
        on_trouble: Callable[[str, Shortage], None],
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self.start_error: Shortage | None = None
        """Why the last start made no process; None if it made one."""
        self._policy = policy
        self._starter = starter
        self._on_change = on_change
        self._on_trouble = on_trouble
        self._reported: set[str] = set()
        self._clock = clock or SystemClock()
        self._backoff = Backoff(policy.first_backoff_s, policy.max_backoff_s)
        self._process: StartedProcess | None = None
        self._identity: ProcessIdentity | None = None
        self._phase: ProcessPhase = "starting"
        self._address = ""
        self._num_starts = 0
        self._started_at = 0.0
        self._ready_at_s: float | None = None
        self._restarts_for_ever = False
        self._stopping = asyncio.Event()

    @property
    def state(self) -> ProcessState:
        return ProcessState(
            name=self.spec.name,
            role=self.spec.role,
            phase=self._phase,
            identity=self._identity,
            num_restarts=max(0, self._num_starts - 1),
            started_at=self._started_at,
            address=self._address,
            metrics_url=self.spec.metrics_url,
            log_path=str(self.spec.log_path),
            ready_file=str(self.spec.ready_file),
            credentials=str(self.spec.credentials.folder) if self.spec.credentials is not None else "",
            model=self.spec.model,
        )

    def restart_for_ever(self) -> None:
        """From now on no number of failures ends `run`: the stack was ready, its configuration works."""
        self._restarts_for_ever = True

    async def run(self) -> None:
        """Returns after `stop`. Raises ProcessFailed when the process fails too often before the stack was ready."""
        rotate(self.spec.log_path)
        while not self._stopping.is_set():
            exit_code = await self._try_run_once()
            if self._stopping.is_set():
                break
            ready_for_s = 0.0 if self._ready_at_s is None else self._clock.now_s() - self._ready_at_s
            gives_up = exit_code == _EXIT_USAGE or self._num_starts >= self._policy.max_failures
            if gives_up and not self._restarts_for_ever:
                raise ProcessFailed(self._failure_text(exit_code))
            self._enter("restarting")
            if ready_for_s >= self._policy.healthy_s:
                self._backoff.reset()
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._backoff.next_delay_s())
        self._enter("stopped")

    def end_restarts(self) -> None:
        """The next exit is the last: `run` returns then."""
        self._stopping.set()

    async def stop(self, limit_s: float) -> None:
        """SIGTERM, and SIGKILL after `limit_s`; may be called again, with less time.

        `run` then returns, unless the process waits for something in the kernel that no signal ends.
        """
        self.end_restarts()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._enter("stopping")
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            self.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_S)

    def kill(self) -> None:
        """SIGKILL at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _try_run_once(self) -> int | None:
        """Start to exit; returns the exit code, negative for a signal. None: `start_error` says why there was none."""
        self._num_starts += 1
        self._ready_at_s = None
        self.start_error = None
        try:
            process = await self._launch()
        except (OSError, RuntimeError) as error:
            self.start_error = error
            return None
        watching = asyncio.create_task(self._watch(process.pid))
        try:
            return await process.wait()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            self.ready.clear()
            self._identity = None

    async def _launch(self) -> StartedProcess:
        self.spec.ready_file.unlink(missing_ok=True)
        log = open_for_child(self.spec.log_path)
        try:
            self._process = await self._starter.start(self.spec, log)
        finally:
            os.close(log)
        self._started_at = time.time()
        try:
            self._identity = try_identify(self._process.pid)
        except OSError as error:  # it runs all the same, and carries the tag of its instance
            self._report_once(f"{self.spec.name}: its start time cannot be read", error)
        if self._stopping.is_set():  # asked while the process was being made: it has nothing to end in order
            self.kill()
        self._enter("starting")
        return self._process

    async def _watch(self, pid: int) -> None:
        """Waits until the process is ready, then keeps its log small, until cancelled."""
        # Polled: no event shows when another process has written a file or listens on a port.
        while (address := await self._try_reach(pid)) is None:  # noqa: ASYNC110
            await asyncio.sleep(self._policy.probe_interval_s)
        self._address = address
        self._ready_at_s = self._clock.now_s()
        self.ready.set()
        if not self._stopping.is_set():
            self._enter("ready")
        while True:
            await asyncio.sleep(self._policy.log_check_s)
            try:
                await asyncio.to_thread(trim, self.spec.log_path)
            except (OSError, RuntimeError) as error:
                self._report_once(f"{self.spec.log_path} cannot be kept small", error)

    async def _try_reach(self, pid: int) -> str | None:
        try:
            return await self.spec.probe.try_reach(pid)
        except OSError as error:
            self._report_once(f"{self.spec.name} cannot be asked whether it is ready", error)
            return None

    def _report_once(self, what: str, error: Shortage) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._on_trouble(what, error)

    def _enter(self, phase: ProcessPhase) -> None:
        self._phase = phase
        self._on_change(self)

    def _failure_text(self, exit_code: int | None) -> str:
        if exit_code is None:
            return f"{self.spec.name} could not be started (start {self._num_starts}): {self.start_error}"
        ended = f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name
        tries = "" if self._num_starts == 1 else f" (start {self._num_starts})"
        lines = last_lines(self.spec.log_path) or ["(it said nothing)"]
        return "\n  ".join(
            [f"{self.spec.name} ended with {ended}{tries}; its last words in {self.spec.log_path}:", *lines]
        )


def rotate(path: Path) -> None:
    """Puts the log of the last start aside as `.1`; only for a log that nobody writes to."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))


def open_for_child(path: Path) -> int:
    """A descriptor to hand to a process. Appending, so that `trim` can empty the file under its writer."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def trim(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Copies a log that is too long to `.1` and empties it. Lines written in between are lost."""
    try:
        if path.stat().st_size <= max_bytes:
            return False
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    except FileNotFoundError:
        return False
    return True


def last_lines(path: Path, num_lines: int = 15) -> list[str]:
    """The end of a log; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]
    except FileNotFoundError:
        return []
