"""The threads of a worker's forward pass."""

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from weir.model.cpu.core_share import CoreShare
from weir.ops.simd.phases import PhaseState, abandon, make_phases, num_taken

_log = logging.getLogger(__name__)

_FEW_CHUNKS_A_THREAD = 2
_CHUNKS_A_THREAD = 4
_FEW_ROWS = 4

Work = Callable[[PhaseState, int, int], None]
"""(state, base, num_chunks): compiled, without the interpreter's lock; takes chunks of its phases until all are done
(`weir.ops.simd.phases`)."""


class ThreadTeamFailed(Exception):
    """A thread of the team could not do its part; the log says why."""


class _Call(NamedTuple):
    work: Work
    base: int
    num_chunks: int


def most_chunks(num_threads: int) -> int:
    """Of a phase, on at most so many threads."""
    return num_threads * _CHUNKS_A_THREAD


class ThreadTeam:
    """Runs one piece of work at a time on 1 to `share.most` threads, the caller's own among them.

    The others sleep between pieces of work. They are daemons: nothing waits for them at the process's end.
    """

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._state = make_phases()
        self._call = _Call(_no_work, 0, 1)
        self._has_failed = False
        self._starts = [threading.Semaphore(0) for _ in range(share.most - 1)]
        for number, start in enumerate(self._starts, 1):
            threading.Thread(target=self._help, args=(number, start), name=f"forward {number}", daemon=True).start()

    def run(self, work: Work, num_rows: int) -> None:
        """Returns when the last phase of `work` is done; `num_rows` says how large its phases are.

        Raises:
            ThreadTeamFailed: a thread has failed, now or earlier: the team is of no use any more.
        """
        num_threads = self._share.begin()
        try:
            # more chunks than threads: who is slower takes fewer
            chunks_a_thread = _FEW_CHUNKS_A_THREAD if num_rows <= _FEW_ROWS else _CHUNKS_A_THREAD
            num_chunks = num_threads * chunks_a_thread if num_threads > 1 else 1
            # one reference, set at once: a helper that is still on its way from the last call may see either
            self._call = call = _Call(work, num_taken(self._state), num_chunks)
            for start in self._starts[: num_threads - 1]:
                start.release()
            work(self._state, call.base, call.num_chunks)
        except BaseException:
            self._fail()
            raise
        finally:
            self._share.end()
        if self._has_failed:
            raise ThreadTeamFailed("a thread of the forward pass has failed")

    def _help(self, number: int, start: threading.Semaphore) -> None:
        while True:
            start.acquire()
            call = self._call
            try:
                call.work(self._state, call.base, call.num_chunks)
            except Exception:  # noqa: BLE001 - a thread's boundary: the others must not wait for it
                _log.exception("thread %d of the forward pass has failed", number)
                self._fail()

    def _fail(self) -> None:
        self._has_failed = True  # before any thread is let through
        abandon(self._state)


def _no_work(state: PhaseState, base: int, num_chunks: int) -> None:
    del state, base, num_chunks
