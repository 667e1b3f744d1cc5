"""Ending tasks for certain."""

import asyncio
from typing import Any

_LOOK_AGAIN_S = 0.05


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels the tasks and waits until they are done; their results and errors are not looked at.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that comes together with its result, so one is not enough.
    """
    running = [task for task in tasks if not task.done()]
    while running:
        for task in running:
            task.cancel()
        _, still_running = await asyncio.wait(running, timeout=_LOOK_AGAIN_S)
        running = list(still_running)
    await asyncio.gather(*tasks, return_exceptions=True)
