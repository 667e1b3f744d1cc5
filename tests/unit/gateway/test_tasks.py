"""Ending tasks for certain."""

import asyncio

from weir_gateway.tasks import end_tasks


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    num_cancellations = 0

    async def stubborn() -> None:
        nonlocal num_cancellations
        while num_cancellations < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                num_cancellations += 1
        await asyncio.sleep(60)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks(task)
    assert task.done()
    assert num_cancellations == 3


async def test_a_task_that_failed_before_is_no_error() -> None:
    async def fail() -> None:
        raise ValueError("before")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await end_tasks(task)
    assert task.done()
