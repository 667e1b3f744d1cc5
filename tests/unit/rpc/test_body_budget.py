"""Room for bodies that are being read: never more than there is, in the order of asking, and none is lost."""

import asyncio
import random

import pytest

from weir.core.errors import Overloaded
from weir.rpc.body_budget import BodyBudget


async def test_whoever_waits_is_served_in_order_as_room_comes_free() -> None:
    budget, served = BodyBudget(10, wait_s=5.0), []
    await budget.take(10)

    async def take(num_bytes: int) -> None:
        await budget.take(num_bytes)
        served.append(num_bytes)

    async with asyncio.TaskGroup() as tasks:
        for num_bytes in (8, 1, 3):
            tasks.create_task(take(num_bytes))
            await asyncio.sleep(0)
        budget.give_back(2)
        await asyncio.sleep(0)
        assert served == []  # the 1 does not go before the 8 that asked first
        budget.give_back(8)
        await asyncio.sleep(0.01)
        assert served == [8, 1]
        budget.give_back(8)
    assert (served, budget.num_bytes) == ([8, 1, 3], 4)


async def test_who_gets_no_room_in_time_is_told_when_to_try_again_and_holds_nothing() -> None:
    budget = BodyBudget(10, wait_s=0.05)
    await budget.take(7)
    with pytest.raises(Overloaded, match="bodies of more than 10 bytes are being read at once") as refused:
        await budget.take(4)
    assert refused.value.retry_after_s == 1.0
    await budget.take(3)
    assert budget.num_bytes == 10


async def test_one_who_gives_up_lets_those_behind_him_through() -> None:
    budget = BodyBudget(10, wait_s=5.0)
    await budget.take(7)
    large = asyncio.create_task(budget.take(9))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(2))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait_for(small, 1.0)
    assert budget.num_bytes == 9


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_cancelled_in_whatever_moment_all_room_comes_back(seed: int) -> None:
    draw, budget = random.Random(seed), BodyBudget(100, wait_s=0.02)
    held = most = 0

    async def read() -> None:
        nonlocal held, most
        num_bytes = draw.randint(1, 100)
        await budget.take(num_bytes)
        try:
            held += num_bytes
            most = max(most, held)
            await asyncio.sleep(draw.choice((0, 0, 0.001, 0.01)))
        finally:
            held -= num_bytes
            budget.give_back(num_bytes)

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
    await budget.take(100)
