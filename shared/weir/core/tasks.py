"""Ending tasks that wait on a bus."""

import asyncio
from collections.abc import Iterable
from typing import Any

_ASK_AGAIN_S = 0.1


async def end_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels the tasks and returns when all have ended, whatever they raised.

    Asks again, since until Python 3.12 `asyncio.wait_for`, which the NATS client uses, swallows a cancellation that
    comes together with the result that it waits for.
    """
    all_tasks = set(tasks)
    pending = {task for task in all_tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_ASK_AGAIN_S)
    for task in all_tasks:
        if not task.cancelled():
            task.exception()  # else it is logged as one that nobody has looked at
