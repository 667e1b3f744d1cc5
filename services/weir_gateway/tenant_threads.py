"""Threads for what takes long, so that the event loop goes on with the others, and in which tenants take turns."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from weir.core.errors import Overloaded, QuotaExceeded, WeirError
from weir.core.shares import SHARE_BOUND, Holder
from weir.core.turns import TurnQueue
from weir_gateway.requests.request_end import RETRY_AFTER_S, shutting_down
from weir_gateway.work_shares import WorkShares

_REFUSED_S = 1.0
"""Of work: what a long text that is refused counts beside what it took. Nobody has any use for it, and on busy cores it
is in the way of what others use: so it comes seldom, one in four seconds by the default share of a tenant."""

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    caller: Holder
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class TenantThreads:
    """Owns its threads. A tenant that has peers never has the last free one, and has no more of a core's time than its
    share: whoever sends what takes long, in a row or all at once, waits for himself. Of one event loop."""

    def __init__(self, num_threads: int, name: str, shares: WorkShares, *, max_wait_s: float = 30.0) -> None:
        """`max_wait_s` for a turn."""
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._waiting: TurnQueue[_Job] = TurnQueue()
        self._num_running: Counter[str] = Counter()
        """By tenant."""
        self._shares = shares
        self._max_wait_s = max_wait_s
        self._timer: asyncio.TimerHandle | None = None
        """To look again at who has had his share."""
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, caller: Holder, work: Callable[[], _ResultT], *, is_short: bool) -> _ResultT:
        """What `work` returns or raises. What is short is done here and now. Once begun it is done to its end, also for
        one who has left meanwhile. Raises Unavailable after the end; Overloaded where its turn does not come in time,
        and QuotaExceeded where its tenant's share is why."""
        self.note(caller)
        if is_short:
            return work()
        if self._is_closed:
            raise shutting_down()
        job = _Job(caller, work, asyncio.get_running_loop().create_future())
        self._waiting.add(caller.tenant, job)
        self._start_next()
        expiring = asyncio.get_running_loop().call_later(self._max_wait_s, self._expire, job)
        try:
            result: _ResultT = await job.done
        except BaseException:
            self._waiting.try_remove(caller.tenant, job)
            raise
        finally:
            expiring.cancel()
        return result

    def note(self, caller: Holder) -> None:
        """It asks for something, also for what takes nothing of a thread: others' shares count from now on."""
        self._shares.note(caller.tenant)

    def charge(self, caller: Holder, work_s: float) -> None:
        """For what was done for it elsewhere."""
        self._shares.add(caller, work_s)

    def charge_refused(self, caller: Holder) -> None:
        """For what was long, and read in vain."""
        self._shares.add(caller, _REFUSED_S)

    async def wait_for_share(self, caller: Holder) -> None:
        """Returns when it may have more of a core. Its caller bounds that."""
        while (wait_s := self._shares.wait_s(caller)) > 0:  # noqa: ASYNC110 - time is all that it waits for
            await asyncio.sleep(wait_s)

    def has_had_its_share(self, caller: Holder) -> bool:
        return self._shares.wait_s(caller) > 0

    def refusal(self, caller: Holder, waited_s: float) -> WeirError:
        """Of what has waited for as long as it may."""
        if not self.has_had_its_share(caller):
            message = f"it has waited {waited_s:g} s for its turn, behind others; try again later"
            return Overloaded(message, retry_after_s=RETRY_AFTER_S)
        message = (
            f"tenant {caller.tenant}: it has waited {waited_s:g} s for its turn, since what the tenant sent before has "
            "taken its share of a core (prepare_share); try again later"
        )
        return QuotaExceeded(message, retry_after_s=RETRY_AFTER_S, tenant=caller.tenant, bound=SHARE_BOUND)

    def close(self) -> None:
        """Of what waits nothing is done."""
        self._is_closed = True
        while (head := next(self._waiting.heads(), None)) is not None:
            waiting = self._waiting.pop(head[0]).done
            if not waiting.done():
                waiting.set_exception(shutting_down())
        self._look_again_in(0.0)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        while self._num_running.total() < self._num_threads and (job := self._try_next()) is not None:
            self._waiting.pop(job.caller.tenant)
            if job.done.done():  # its caller is being ended, and has only not run since
                continue
            self._num_running[job.caller.tenant] += 1
            took_s: list[float] = []
            running = asyncio.get_running_loop().run_in_executor(self._executor, _timed, job.work, took_s)
            running.add_done_callback(partial(self._end, job, took_s))

    def _try_next(self) -> _Job | None:
        waits_s = []
        for tenant, job in self._waiting.heads():
            limit = max(1, self._num_threads - 1) if job.caller.has_peers else self._num_threads
            wait_s = self._shares.wait_s(job.caller)
            if self._num_running[tenant] < limit and not wait_s:
                return job
            waits_s.append(wait_s)
        self._look_again_in(min(filter(None, waits_s), default=0.0))
        return None

    def _look_again_in(self, wait_s: float) -> None:
        """0.0: when something ends or comes, and not before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wait_s:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._start_next)

    def _expire(self, job: _Job) -> None:
        if self._waiting.try_remove(job.caller.tenant, job) and not job.done.done():
            job.done.set_exception(self.refusal(job.caller, self._max_wait_s))

    def _end(self, job: _Job, took_s: list[float], ran: "asyncio.Future[Any]") -> None:
        self._shares.add(job.caller, sum(took_s))
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


def _timed(work: Callable[[], _ResultT], took_s: list[float]) -> _ResultT:
    """In a thread. Its own time: what it waited for the interpreter's lock others had."""
    began_s = time.thread_time()
    try:
        return work()
    finally:
        took_s.append(time.thread_time() - began_s)
