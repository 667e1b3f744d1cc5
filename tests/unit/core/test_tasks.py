"""Ending tasks."""

import asyncio

from weir.core.tasks import end_tasks


async def test_a_task_that_swallows_a_cancellation_is_asked_again() -> None:
    num_cancels = 0

    async def stubborn() -> None:
        nonlocal num_cancels
        while num_cancels < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                num_cancels += 1

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task]), 5)
    assert (task.done(), num_cancels) == (True, 2)


async def test_whatever_the_tasks_raised_is_collected() -> None:
    async def fail() -> None:
        raise RuntimeError("cannot")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await end_tasks([task, asyncio.create_task(asyncio.sleep(60))])
    await end_tasks([])
    assert isinstance(task.exception(), RuntimeError)


async def test_tasks_that_have_ended_are_not_waited_for() -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    ending = end_tasks([task])
    try:
        ending.send(None)
    except StopIteration:
        return
    ending.close()
    raise AssertionError("it waits")
