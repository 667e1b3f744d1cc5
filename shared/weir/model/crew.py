"""The threads of a worker's forward pass."""

import logging
import threading
from collections.abc import Callable

from weir.model.core_share import CoreShare
from weir.ops.simd.barrier import BarrierState, abandon, make_barrier, num_arrivals

_log = logging.getLogger(__name__)

Work = Callable[[BarrierState, int, int, int], None]
"""(barrier, base, thread, num_threads): compiled, without the interpreter's lock; passes the barrier at its end."""


class CrewFailed(Exception):
    """A thread of the crew could not do its part; the log says why."""


class Crew:
    """Runs one piece of work at a time on 1 to `share.most` threads, the caller's own among them.

    The others sleep between pieces of work. They are daemons: nothing waits for them at the process's end.
    """

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._barrier = make_barrier()
        self._work: Work = _no_work
        self._base = 0
        self._num_threads = 1
        self._has_failed = False
        self._starts = [threading.Semaphore(0) for _ in range(share.most - 1)]
        for number, start in enumerate(self._starts, 1):
            threading.Thread(target=self._help, args=(number, start), name=f"crew {number}", daemon=True).start()

    def run(self, work: Work) -> None:
        """Returns when all threads have passed the last barrier of `work`.

        Raises:
            CrewFailed: a thread has failed, now or earlier: the crew is of no use any more.
        """
        num_threads = self._share.begin()
        try:
            self._work = work
            self._num_threads = num_threads
            self._base = num_arrivals(self._barrier)
            for start in self._starts[: num_threads - 1]:
                start.release()
            work(self._barrier, self._base, 0, num_threads)
        except BaseException:
            self._fail()
            raise
        finally:
            self._share.end()
        if self._has_failed:
            raise CrewFailed("a thread of the forward pass has failed")

    def _help(self, number: int, start: threading.Semaphore) -> None:
        while True:
            start.acquire()
            try:
                self._work(self._barrier, self._base, number, self._num_threads)
            except Exception:  # noqa: BLE001 - a thread's boundary: the others must not wait for it
                _log.exception("thread %d of the forward pass has failed", number)
                self._fail()

    def _fail(self) -> None:
        self._has_failed = True  # before anybody is let through
        abandon(self._barrier)


def _no_work(barrier: BarrierState, base: int, thread: int, num_threads: int) -> None:
    del barrier, base, thread, num_threads
