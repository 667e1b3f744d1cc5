"""Threads for what takes long, so that the event loop goes on with the others, and in which tenants take turns."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from weir.core.errors import Unavailable
from weir.core.shares import Holder
from weir.core.turns import TurnQueue
from weir_gateway.requests.request_end import RETRY_AFTER_S

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    caller: Holder
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class TenantThreads:
    """Owns its threads. A tenant that has peers never has the last free one: whoever sends what takes long, in a row or
    all at once, waits for himself. Of one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._waiting: TurnQueue[_Job] = TurnQueue()
        self._num_running: Counter[str] = Counter()
        """By tenant."""
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, caller: Holder, work: Callable[[], _ResultT], *, is_short: bool) -> _ResultT:
        """What `work` returns or raises. What is short is done here and now. Once begun it is done to its end, also for
        one who has left meanwhile. Raises Unavailable after the end."""
        if is_short:
            return work()
        if self._is_closed:
            raise _closed()
        job = _Job(caller, work, asyncio.get_running_loop().create_future())
        self._waiting.add(caller.tenant, job)
        self._start_next()
        try:
            result: _ResultT = await job.done
        except BaseException:
            self._waiting.try_remove(caller.tenant, job)
            raise
        return result

    def close(self) -> None:
        """Of what waits nothing is done."""
        self._is_closed = True
        while (head := next(self._waiting.heads(), None)) is not None:
            waiting = self._waiting.pop(head[0]).done
            if not waiting.done():
                waiting.set_exception(_closed())
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        while self._num_running.total() < self._num_threads and (job := self._try_next()) is not None:
            self._waiting.pop(job.caller.tenant)
            self._num_running[job.caller.tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, job.work)
            running.add_done_callback(partial(self._end, job))

    def _try_next(self) -> _Job | None:
        for tenant, job in self._waiting.heads():
            limit = max(1, self._num_threads - 1) if job.caller.has_peers else self._num_threads
            if self._num_running[tenant] < limit:
                return job
        return None

    def _end(self, job: _Job, ran: "asyncio.Future[Any]") -> None:
        self._num_running[job.caller.tenant] -= 1
        if not self._num_running[job.caller.tenant]:
            del self._num_running[job.caller.tenant]
        error = None if ran.cancelled() else ran.exception()
        if job.done.done():  # nobody waits for it any more
            pass
        elif ran.cancelled():
            job.done.cancel()
        elif error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(ran.result())
        self._start_next()


def _closed() -> Unavailable:
    return Unavailable("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
