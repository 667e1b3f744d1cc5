"""An event loop whose time is the world's: it jumps to the next timer when nothing is ready, and knows whose each
callback is, so that a process can be stopped or killed between any two of them.

What must hold for the code under test: callbacks of one process run in the order in which they became ready.
"""

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

PROCESS: contextvars.ContextVar["SimProcess"] = contextvars.ContextVar("PROCESS")
"""Whose callback runs."""


class Stuck(Exception):
    """Nothing will ever happen any more, or too much happens: the story ends here."""


class ProcessDied(BaseException):
    """Raised inside a process that died in the middle of a callback. Nothing that it does on its way out counts."""


class SimProcess:
    """A process of the world. Its memory is what its callbacks refer to; dead, none of them runs any more."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self.is_dead = False
        self.is_stopped = False
        """As by SIGSTOP."""
        self.parked: deque[asyncio.Handle] = deque()
        self.on_death: list[Callable[[], None]] = []
        """What the kernel and the others notice; called once, not in its context."""
        self.graveyard: list[Any] = []
        self.num_writes = 0
        """Into segments, so far."""
        self.dies_at_write: int | None = None
        self.die: Callable[[SimProcess], None] = lambda process: None

    def count_write(self) -> bool:
        """False: it dies in this one, or is dead."""
        if self.is_dead:
            return False
        self.num_writes += 1
        if self.dies_at_write is not None and self.num_writes >= self.dies_at_write:
            self.die(self)
        return not self.is_dead

    def __repr__(self) -> str:
        return self.name


class SimLoop(asyncio.BaseEventLoop):
    """Without a selector, threads and sockets: what wants one of them fails."""

    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(self, rng: random.Random, max_events: int) -> None:
        super().__init__()
        self._now_s = 1000.0
        self._rng = rng
        self._max_events = max_events
        self._readers: dict[int, tuple[SimProcess | None, asyncio.Handle]] = {}
        self.num_events = 0
        self.numbers = itertools.count()
        """Of tasks and futures."""
        self.is_over = False
        self.after_event: Callable[[SimProcess | None], None] | None = None
        self.run_work: Callable[[Callable[[], None]], None] = lambda work: work()
        """What executors are given; by default in place, where it may not wait."""
        self.slow_callback_duration = float("inf")
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now_s

    def now_s(self) -> float:
        """The loop is the clock of every process too."""
        return self._now_s

    def create_future(self) -> "asyncio.Future[Any]":
        return _SimFuture(self)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Begun at once; the answer comes a little later, as from a thread."""
        del executor
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result, error = func(*args), None
            except Exception as raised:  # noqa: BLE001 - handed to whoever awaits it
                result, error = None, raised
            self.call_later(self._rng.random() * 0.002, _settle, future, result, error)

        self.run_work(work)
        return future

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Of the world's own descriptors only; `make_readable` calls it."""
        handle = asyncio.Handle(callback, args, self, contextvars.copy_context())
        self._readers[fd] = PROCESS.get(None), handle

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def make_readable(self, fd: int) -> None:
        found = self._readers.get(fd)
        if found is not None:
            self._ready.append(found[1])

    def stop_process(self, process: SimProcess) -> None:
        process.is_stopped = True

    def continue_process(self, process: SimProcess) -> None:
        process.is_stopped = False
        if not process.is_dead:
            self._ready.extend(process.parked)
        process.parked.clear()

    def bury(self, process: SimProcess) -> None:
        """Its tasks never run again, and are not collected before the end either: no `finally` of theirs runs."""
        process.is_dead = True
        process.graveyard.extend(
            task for task in asyncio.all_tasks(self) if getattr(task, "sim_process", None) is process
        )
        process.graveyard.extend(process.parked)
        process.parked.clear()

    def end(self) -> None:
        """What is left is never run, and what is still called while it is collected does nothing."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._readers.clear()
        self.is_over = True
        self.close()

    def _check_closed(self) -> None:
        """What is collected after the end may still call."""

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        if not self.is_over:
            self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.is_over:
            heapq.heappush(self._scheduled, timer)
            timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _write_to_self(self) -> None:
        """There is no thread that could wait in a selector."""

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _run_once(self) -> None:
        self._take_due_timers()
        ready, after_event = self._ready, self.after_event
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None:
                if process.is_dead:
                    process.graveyard.append(handle)
                    continue
                if process.is_stopped:
                    process.parked.append(handle)
                    continue
            self.num_events += 1
            handle._run()
            if after_event is not None:
                after_event(process)
        if self.num_events > self._max_events:
            raise Stuck(f"more than {self._max_events} events: something goes round and round")

    def _take_due_timers(self) -> None:
        """Of the next time at which there is one, if nothing is ready now."""
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise Stuck("nothing will ever happen any more")
            self._now_s = max(self._now_s, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)


def _settle(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class _SimFuture(asyncio.Future):  # type: ignore[type-arg]
    """Sets have it where its number says, and not where its address does: what walks them does the same each time."""

    def __init__(self, loop: SimLoop) -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _SimTask(asyncio.Task):  # type: ignore[type-arg]
    """Knows whose it is; in sets as `_SimFuture`."""

    def __init__(self, coroutine: Any, loop: SimLoop, process: SimProcess | None, **more: Any) -> None:
        self._number = next(loop.numbers)
        self.sim_process = process
        super().__init__(coroutine, loop=loop, **more)

    def __hash__(self) -> int:
        return self._number


def _make_task(loop: SimLoop, coroutine: Any, context: contextvars.Context | None = None, **more: Any) -> _SimTask:
    process = PROCESS.get(None)
    if context is not None:
        owner = context.get(PROCESS)
        if owner is None and process is not None:
            context.run(PROCESS.set, process)  # a context of its own is no way out of a process
        else:
            process = owner
    return _SimTask(coroutine, loop, process, context=context, **more)
