"""Long work is done in threads, in which tenants take turns."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest

from weir.core.clock import ManualClock, SystemClock
from weir.core.errors import Overloaded, QuotaExceeded, Unavailable
from weir_gateway.tenant_threads import TenantThreads
from weir_gateway.work_shares import WorkShares


class Peer(NamedTuple):
    tenant: str
    has_peers: bool = True


A, B, C = Peer("a"), Peer("b"), Peer("c")
ALONE = Peer("a", has_peers=False)
UNBOUNDED = WorkShares(1e6, 1e6, SystemClock())


class Work:
    """Goes on until it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)

    def named(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            assert self._may_end.acquire(timeout=10)
            return name

        return work

    def let_go(self, num: int = 1) -> None:
        self._may_end.release(num)

    async def until(self, begun: str) -> None:
        for _ in range(1000):
            if "".join(self.begun) == begun:
                return
            await asyncio.sleep(0.002)
        pytest.fail(f"begun: {self.begun}, not {begun}")


@pytest.fixture
async def threads() -> AsyncIterator[TenantThreads]:
    made = TenantThreads(2, "test", UNBOUNDED)
    yield made
    made.close()


async def test_tenants_take_turns_whoever_came_first() -> None:
    threads, work = TenantThreads(1, "test", UNBOUNDED), Work()
    async with asyncio.TaskGroup() as tasks:
        for caller, names in ((A, "12345"), (B, "xy"), (C, "z")):
            for name in names:
                tasks.create_task(threads.run(caller, work.named(name), is_short=False))
            await asyncio.sleep(0)
        for begun in itertools.accumulate("12xz3y45"):
            await work.until(begun)
            work.let_go()
    assert threads.num_waiting == 0
    threads.close()


async def test_a_tenant_with_peers_leaves_one_thread_free(threads: TenantThreads) -> None:
    work = Work()
    async with asyncio.TaskGroup() as tasks:
        for name in "123":
            tasks.create_task(threads.run(A, work.named(name), is_short=False))
        await work.until("1")
        assert await asyncio.wait_for(threads.run(B, lambda: "at once", is_short=False), 10) == "at once"
        assert work.begun == ["1"]
        work.let_go(3)


async def test_the_only_tenant_has_all_threads(threads: TenantThreads) -> None:
    work = Work()
    async with asyncio.TaskGroup() as tasks:
        for name in "123":
            tasks.create_task(threads.run(ALONE, work.named(name), is_short=False))
        await work.until("12")
        work.let_go(3)


async def test_what_is_short_is_done_here_and_now(threads: TenantThreads) -> None:
    assert await threads.run(A, threading.current_thread, is_short=True) is threading.current_thread()
    assert await threads.run(A, threading.current_thread, is_short=False) is not threading.current_thread()


async def test_what_the_work_raises_is_raised(threads: TenantThreads) -> None:
    def work() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await threads.run(A, work, is_short=False)


async def test_one_who_leaves_before_his_turn_costs_nothing_and_one_amid_it_keeps_the_thread(
    threads: TenantThreads,
) -> None:
    work = Work()
    running, waiting = (asyncio.create_task(threads.run(A, work.named(name), is_short=False)) for name in "12")
    await work.until("1")
    assert threads.num_waiting == 1
    for task in (waiting, running):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert threads.num_waiting == 0
    third = asyncio.create_task(threads.run(A, work.named("3"), is_short=False))
    await asyncio.sleep(0.02)
    assert work.begun == ["1"], "its thread is busy still, and the tenant has one"
    work.let_go(2)
    assert await third == "3"
    assert work.begun == ["1", "3"]


async def test_what_waits_at_the_end_is_not_done(threads: TenantThreads) -> None:
    work = Work()
    tasks = [asyncio.create_task(threads.run(A, work.named(name), is_short=False)) for name in "12"]
    await work.until("1")
    threads.close()
    work.let_go()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert ends[0] == "1"
    assert isinstance(ends[1], Unavailable)
    with pytest.raises(Unavailable, match="shutting down") as late:
        await asyncio.wait_for(threads.run(B, work.named("3"), is_short=False), 10)
    assert late.value.retry_after_s == 1.0
    assert (threads.num_waiting, work.begun) == (0, ["1"])


def busy(for_s: float) -> None:
    """Takes so much of a core."""
    ends_s = time.thread_time() + for_s
    while time.thread_time() < ends_s:
        pass


async def test_a_tenant_that_has_had_its_share_of_a_core_waits_while_others_ask() -> None:
    clock = ManualClock()
    shares = WorkShares(share=0.25, burst_s=0.01, clock=clock)
    threads = TenantThreads(2, "test", shares)
    for caller in (B, A):
        await threads.run(caller, lambda: busy(0.05), is_short=False)
    waiting = asyncio.create_task(threads.run(A, lambda: "done", is_short=False))
    assert await asyncio.wait_for(threads.run(C, lambda: "at once", is_short=False), 5) == "at once"
    assert not waiting.done()
    assert threads.has_had_its_share(A)
    assert not threads.has_had_its_share(C)
    clock.advance(0.05 / 0.25 + 0.2)
    assert await asyncio.wait_for(waiting, 5) == "done"
    threads.close()


async def test_a_turn_that_does_not_come_in_time_is_refused_with_why() -> None:
    shares, work = WorkShares(share=0.25, burst_s=0.01, clock=ManualClock()), Work()
    threads = TenantThreads(1, "test", shares, max_wait_s=0.1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(threads.run(B, work.named("b"), is_short=False))
        await work.until("b")
        with pytest.raises(Overloaded, match=r"has waited 0\.1 s for its turn, behind others"):
            await threads.run(A, work.named("a"), is_short=False)
        threads.charge(A, 1.0)
        with pytest.raises(QuotaExceeded, match=r"tenant a: .* its share of a core \(prepare_share\)"):
            await threads.run(A, work.named("a"), is_short=False)
        assert threads.num_waiting == 0
        work.let_go()
    assert work.begun == ["b"]
    threads.close()


async def test_who_is_ended_while_a_thread_comes_free_is_not_begun() -> None:
    threads, work = TenantThreads(1, "test", UNBOUNDED), Work()
    first = asyncio.create_task(threads.run(A, work.named("1"), is_short=False))
    await work.until("1")
    second = asyncio.create_task(threads.run(B, work.named("2"), is_short=False))
    await asyncio.sleep(0)
    second.cancel()  # its future is cancelled now, its task runs later
    running = threads._num_running.copy()
    threads._num_running.clear()  # as where the first one's end is seen in the same turn of the loop
    threads._start_next()
    assert not threads._num_running
    threads._num_running.update(running)
    work.let_go(2)
    await first
    await asyncio.gather(second, return_exceptions=True)
    assert await threads.run(C, lambda: "next", is_short=False) == "next"
    assert work.begun == ["1"]
    threads.close()


async def test_what_was_done_elsewhere_counts_and_a_tenant_alone_waits_for_nothing() -> None:
    clock = ManualClock()
    threads = TenantThreads(2, "test", WorkShares(share=0.25, burst_s=0.01, clock=clock))
    await threads.run(B, lambda: None, is_short=True)
    for caller in (A, ALONE):
        threads.charge(caller, 100.0)
    assert threads.has_had_its_share(A)
    assert not threads.has_had_its_share(ALONE)
    clock.advance(11)
    assert not threads.has_had_its_share(A), "nobody else has asked for ten seconds"
    threads.close()


async def test_what_is_long_and_refused_comes_once_in_four_seconds_by_the_default_share() -> None:
    clock = ManualClock()
    threads = TenantThreads(2, "test", WorkShares(share=0.25, burst_s=0.01, clock=clock))
    await threads.run(B, lambda: None, is_short=True)
    threads.charge_refused(A)
    clock.advance(3.9)
    assert threads.has_had_its_share(A)
    clock.advance(0.1)
    assert not threads.has_had_its_share(A)
    threads.close()
