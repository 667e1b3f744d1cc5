"""Room for bodies that are being read: bounded, in turn, a share for each tenant, and none of it is lost."""

import asyncio
import random
from typing import NamedTuple

import pytest

from weir.core.errors import Overloaded, QuotaExceeded
from weir.core.shares import NOBODY
from weir.rpc.body_budget import BodyBudget


class Peer(NamedTuple):
    """One of several tenants."""

    tenant: str
    has_peers: bool = True


A, B = Peer("a"), Peer("b")


async def test_whoever_waits_is_served_in_order_as_room_comes_free() -> None:
    budget, served = BodyBudget(10, wait_s=60.0), []
    await budget.take(10, NOBODY)

    async def take(num_bytes: int) -> None:
        await budget.take(num_bytes, NOBODY)
        served.append(num_bytes)

    async with asyncio.TaskGroup() as tasks:
        for num_bytes in (8, 1, 3):
            tasks.create_task(take(num_bytes))
            await asyncio.sleep(0)
        budget.give_back(2, NOBODY)
        await asyncio.sleep(0)
        assert served == []  # the 1 does not go before the 8 that asked first
        budget.give_back(8, NOBODY)
        await asyncio.sleep(0.01)
        assert served == [8, 1]
        budget.give_back(8, NOBODY)
    assert (served, budget.num_bytes) == ([8, 1, 3], 4)


async def test_who_gets_no_room_in_time_learns_when_to_try_again_and_holds_nothing() -> None:
    budget = BodyBudget(10, wait_s=0.05)
    await budget.take(7, NOBODY)
    with pytest.raises(Overloaded, match="of the 10 bytes for bodies that are read at once are taken") as refused:
        await budget.take(4, NOBODY)
    assert refused.value.retry_after_s == 1.0
    await budget.take(3, NOBODY)
    assert budget.num_bytes == 10


async def test_one_who_gives_up_lets_those_behind_him_through() -> None:
    budget = BodyBudget(10, wait_s=60.0)
    await budget.take(7, NOBODY)
    large = asyncio.create_task(budget.take(9, NOBODY))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(2, NOBODY))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait_for(small, 10)
    assert budget.num_bytes == 9


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_cancelled_in_whatever_moment_all_room_comes_back(seed: int) -> None:
    draw, budget = random.Random(seed), BodyBudget(100, wait_s=0.02)
    held = most = 0

    async def read() -> None:
        nonlocal held, most
        num_bytes = draw.randint(1, 100)
        await budget.take(num_bytes, NOBODY)
        try:
            held += num_bytes
            most = max(most, held)
            await asyncio.sleep(draw.choice((0, 0, 0.001, 0.01)))
        finally:
            held -= num_bytes
            budget.give_back(num_bytes, NOBODY)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(read()))
        if draw.random() < 0.5:
            await asyncio.sleep(0)
        if draw.random() < 0.3:
            draw.choice(tasks).cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends} <= {type(None), Overloaded, asyncio.CancelledError}
    assert 50 < most <= 100
    assert budget.num_bytes == 0
    await budget.take(100, NOBODY)


async def test_a_tenant_that_has_peers_leaves_a_part_for_them() -> None:
    budget = BodyBudget(100, wait_s=0.05)
    for _ in range(8):
        await budget.take(10, A)
    with pytest.raises(QuotaExceeded, match="tenant a: it has 80 of the 100 bytes for bodies") as refused:
        await budget.take(1, A)
    assert (refused.value.tenant, refused.value.bound, refused.value.retry_after_s) == ("a", "tenant_share", 1.0)
    await budget.take(16, B)
    with pytest.raises(QuotaExceeded, match="tenant b: it has 16 of the 100 bytes"):
        await budget.take(1, B)
    budget.give_back(30, A)
    await budget.take(10, B)
    assert budget.num_bytes == 76


async def test_what_waits_behind_what_is_over_the_share_has_its_turn_when_that_is_refused() -> None:
    budget = BodyBudget(100, wait_s=0.05)
    await budget.take(70, A)
    first, second = await asyncio.gather(budget.take(20, A), budget.take(1, A), return_exceptions=True)
    assert isinstance(first, QuotaExceeded)
    assert (second, budget.num_bytes) == (None, 71)


async def test_who_waits_behind_what_is_too_large_of_another_tenant_is_not_told_of_his_share() -> None:
    budget, waiting = BodyBudget(100, sure_bytes=30, wait_s=0.1), []
    await budget.take(85, NOBODY)
    for num_bytes, caller in ((20, A), (5, B), (20, A)):
        waiting.append(asyncio.create_task(budget.take(num_bytes, caller)))
        await asyncio.sleep(0.02)
    for refused in await asyncio.gather(*waiting, return_exceptions=True):
        assert type(refused) is Overloaded


async def test_what_fits_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(100)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: pytest.fail("nothing is to be waited for"))
    for _ in range(2):
        await budget.take(10, A)
    assert budget.num_bytes == 20


async def test_the_only_tenant_has_all_of_it() -> None:
    budget = BodyBudget(100, wait_s=0.05)
    await budget.take(100, Peer("a", has_peers=False))
    assert budget.num_bytes == 100


async def test_a_tenant_has_what_is_sure_whatever_others_hold_if_there_is_room() -> None:
    budget = BodyBudget(100, sure_bytes=10, wait_s=0.05)
    await budget.take(90, NOBODY)
    await budget.take(10, A)
    with pytest.raises(Overloaded, match="of the 100 bytes for bodies that are read at once are taken"):
        await budget.take(1, B)


async def test_who_waits_for_his_share_keeps_no_other_tenant_waiting() -> None:
    budget = BodyBudget(100, wait_s=60.0)
    await budget.take(80, A)
    waiting = [asyncio.create_task(budget.take(10, A)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.wait_for(budget.take(10, B), 10)
    assert not any(task.done() for task in waiting)
    budget.give_back(80, A)
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert budget.num_bytes == 40


async def test_what_is_large_is_not_kept_waiting_by_what_is_small_of_others() -> None:
    budget, large, small = BodyBudget(10, wait_s=60.0), Peer("a", has_peers=False), Peer("b", has_peers=False)
    await budget.take(8, NOBODY)
    waiting = [asyncio.create_task(budget.take(num_bytes, caller)) for num_bytes, caller in ((8, large), (1, small))]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting), "its turn comes first"
    budget.give_back(8, NOBODY)
    await asyncio.wait_for(asyncio.gather(*waiting), 10)


async def test_tenants_take_turns_as_room_comes_free() -> None:
    budget, served = BodyBudget(10, wait_s=60.0), []
    await budget.take(10, NOBODY)

    async def take(caller: Peer) -> None:
        await budget.take(1, caller)
        served.append(caller.tenant)

    async with asyncio.TaskGroup() as tasks:
        for caller in (A, A, A, A, B, B):
            tasks.create_task(take(caller))
            await asyncio.sleep(0)
        budget.give_back(10, NOBODY)
    assert "".join(served) == "ababaa"
