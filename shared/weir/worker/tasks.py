"""Tasks of a worker: what one part of it has under way, with an owner that ends it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from weir.core.tasks import end_tasks

_log = logging.getLogger(__name__)


class WorkerTasks:
    """A task that fails ends the process in order: what it would have settled waits for ever otherwise."""

    def __init__(self, request_shutdown: Callable[[str], None]) -> None:
        self._request_shutdown = request_shutdown
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[None, None, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    async def stop(self, wait_s: float = 0.0) -> None:
        """Waits for at most `wait_s` for what is under way, and cancels the rest."""
        if self._tasks and wait_s:
            await asyncio.wait(self._tasks, timeout=wait_s)
        await end_tasks(self._tasks)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.critical("%s failed", task.get_name(), exc_info=task.exception())
            self._request_shutdown(f"{task.get_name()} failed: {task.exception()}")
