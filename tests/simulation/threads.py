"""Threads of the world's processes: greenlets that the event loop resumes, so that they wait on virtual time, stop and
die with their process, and interleave the same way each time.

A thread gives way where it waits, and now and then before it takes a lock; what is between two of these points is one
event. The loop's own code never waits: where it would, the real one would stand still.
"""

import contextvars
import random
from collections.abc import Callable
from typing import Any

import greenlet

from tests.simulation.loop import PROCESS, SimLoop, SimProcess

_LONGEST_WAKE_S = 0.0002
"""From when a thread may go on until it does."""
_GIVES_WAY = 0.1
"""Probability before a lock is taken."""


class SimThread:
    """`threading.Thread`."""

    def __init__(self, threads: "SimThreads", target: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._threads = threads
        self._target = target
        self._args = args
        self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.gr_context = contextvars.copy_context()
        self._num_waits = 0
        self._is_waiting = False
        self._was_woken = False
        self._joining: list[Callable[[], None]] = []
        self.process: SimProcess | None = PROCESS.get(None)
        self.num_locks = 0
        """That it has: it gives way to nobody meanwhile."""

    def start(self) -> None:
        self._threads.alive[self._greenlet] = self
        self._resume_later(self._threads.draw_wake_s(), 0, True)

    def start_here(self) -> None:
        """Runs until it waits for the first time, before this returns."""
        self._threads.alive[self._greenlet] = self
        self._resume(0, True)

    def is_alive(self) -> bool:
        return self._greenlet in self._threads.alive

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            me = self._threads.require_current()
            self._joining.append(me.waker())
            me.wait(timeout)

    def waker(self) -> Callable[[], None]:
        """Ends the next `wait`, and none after that."""
        number = self._num_waits + 1
        return lambda: self._resume_later(self._threads.draw_wake_s(), number, True)

    def wait(self, timeout_s: float | None) -> bool:
        """Until somebody calls a waker that was made before. False: its time was over."""
        if self._threads.is_over:
            raise greenlet.GreenletExit
        self._num_waits += 1
        if timeout_s is not None:
            self._resume_later(timeout_s, self._num_waits, False)
        self._is_waiting = True
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()
        return self._was_woken

    def end(self) -> None:
        """At the end of the world: what its `finally` does has no effect any more."""
        if self._greenlet:
            self._greenlet.throw()

    def _resume_later(self, delay_s: float, number: int, was_woken: bool) -> None:
        context = None if self.process is None else self.process.context
        self._threads.loop.call_later(delay_s, self._resume, number, was_woken, context=context)

    def _resume(self, number: int, was_woken: bool) -> None:
        is_due = self._is_waiting if number else not self._greenlet
        if number != self._num_waits or not is_due or self._threads.is_over:
            return
        self._is_waiting, self._was_woken = False, was_woken
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.switch()

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._threads.alive.pop(self._greenlet, None)
            for wake in self._joining:
                wake()


class SimThreads:
    """Those of a world; in the place of the module `threading`."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self._rng = rng
        self.alive: dict[greenlet.greenlet, SimThread] = {}
        """Of the dead too: what is collected would run its `finally`."""
        self.is_over = False

    def current_thread(self) -> SimThread | None:
        """None: the event loop's code runs."""
        return self.alive.get(greenlet.getcurrent())

    def require_current(self) -> SimThread:
        thread = self.current_thread()
        if thread is None and self.is_over:
            raise greenlet.GreenletExit
        assert thread is not None, "the event loop would stand still"
        return thread

    def Thread(  # noqa: N802 - as in `threading`
        self, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "", *, daemon: bool = False
    ) -> SimThread:
        del name, daemon
        return SimThread(self, target, args)

    def Lock(self) -> "SimLock":  # noqa: N802
        return SimLock(self)

    def Condition(self) -> "SimCondition":  # noqa: N802
        return SimCondition(self)

    def run(self, work: Callable[[], None]) -> None:
        """In a thread of its own, which begins at once."""
        SimThread(self, work, ()).start_here()

    def num_of(self, process: SimProcess) -> int:
        return sum(thread.process is process for thread in self.alive.values())

    def draw_wake_s(self) -> float:
        return self._rng.random() * _LONGEST_WAKE_S

    def maybe_give_way(self) -> None:
        thread = self.current_thread()
        if thread is not None and not thread.num_locks and not self.is_over and self._rng.random() < _GIVES_WAY:
            thread.wait(self.draw_wake_s())

    def end(self) -> None:
        self.is_over = True
        for thread in list(self.alive.values()):
            thread.end()


class SimLock:
    """`threading.Lock`: nobody waits while having it, so nobody finds it taken."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._holder: SimThread | None = None

    def __enter__(self) -> None:
        self._threads.maybe_give_way()
        self._take()

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _take(self) -> None:
        self._holder = self._threads.current_thread()
        if self._holder is not None:
            self._holder.num_locks += 1

    def _give_back(self) -> None:
        if self._holder is not None:
            self._holder.num_locks -= 1


class SimCondition(SimLock):
    """`threading.Condition`."""

    def __init__(self, threads: SimThreads) -> None:
        super().__init__(threads)
        self._waiting: dict[SimThread, Callable[[], None]] = {}

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._threads.require_current()
        self._waiting[thread] = thread.waker()
        self._give_back()
        try:
            return thread.wait(timeout)
        finally:
            self._waiting.pop(thread, None)
            self._take()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        ends_at_s = None if timeout is None else self._threads.loop.time() + timeout
        while not (holds := predicate()):
            left_s = None if ends_at_s is None else ends_at_s - self._threads.loop.time()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return holds

    def notify_all(self) -> None:
        for wake in self._waiting.values():
            wake()
        self._waiting.clear()
