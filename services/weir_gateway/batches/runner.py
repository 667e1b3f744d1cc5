"""Answers the lines of batches, as many at once as it may, and ends batches. One a gateway; they share the store."""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from weir.core.errors import InternalError, Overloaded, Unavailable, WeirError
from weir.core.tasks import end_tasks
from weir_gateway.batches.database import Database
from weir_gateway.batches.files import FileStore
from weir_gateway.batches.records import ClaimedLine, LineResult
from weir_gateway.batches.store import BatchStore

logger = logging.getLogger(__name__)

_NUM_RENEWALS = 3  # that may come too late one after the other, but for the last
_DROP_INTERVAL_S = 60.0
_COUNTS = ("lines_answered", "lines_failed", "lines_retried", "lines_lost", "ended", "store_failures")


class Answerer(Protocol):
    """Answers lines. `answer` raises WeirError for what another try may mend; `drop`: nobody wants what is left of a
    line."""

    async def answer(self, line: ClaimedLine) -> LineResult: ...

    def failed(self, line: ClaimedLine, error: WeirError) -> LineResult: ...

    def drop(self, line: ClaimedLine) -> None: ...


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """A line whose gateway died is claimed by another one `lease_s` later at most. A line that fails by no fault of its
    own is tried `max_tries` times; waiting for room is none."""

    max_at_once: int = 32
    lease_s: float = 15.0
    poll_s: float = 0.5
    max_tries: int = 8
    max_wait_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Stores:
    """Both are called by the database's threads."""

    database: Database
    batches: BatchStore
    files: FileStore


class BatchRunner:
    """Takes lines from `start` to `drain`; what runs at `stop` is given back to the store."""

    def __init__(self, owner: str, stores: Stores, answerer: Answerer, settings: RunnerSettings) -> None:
        self._owner = owner
        self._stores = stores
        self._batches = stores.batches
        self._answerer = answerer
        self._settings = settings
        self._running: dict[asyncio.Task[None], ClaimedLine] = {}
        self._wakes = asyncio.Event()
        self._has_tables = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """The database may come later."""
        turns = (self._take(), self._renew(), self._end(), self._drop_old())
        self._tasks = [asyncio.create_task(turn, name="batches") for turn in turns]

    def wake(self) -> None:
        """There may be lines, or a batch that has ended."""
        self._wakes.set()

    async def drain(self) -> None:
        """Takes no more lines."""
        await end_tasks(self._tasks[:1])

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        left = list(self._running.items())
        await end_tasks([task for task, _ in left])
        for _, line in left:
            await self._try_store(self._batches.release, line, 0.0, False)

    def metrics(self) -> dict[str, float]:
        counts = {f"batch_{name}_total": float(self._counts[name]) for name in _COUNTS}
        return counts | {"batch_lines_running": float(len(self._running))}

    async def _take(self) -> None:
        settings = self._settings
        await self._until_created()
        while True:
            self._wakes.clear()
            room = settings.max_at_once - len(self._running)
            claimed = await self._try_store(self._batches.claim, self._owner, room, settings.lease_s) if room else []
            for line in claimed or ():
                task = asyncio.create_task(self._answer(line), name=f"line {line.number} of {line.batch_id}")
                self._running[task] = line
                task.add_done_callback(self._on_done)
            await self._wait(settings.poll_s)

    async def _until_created(self) -> None:
        while await self._try_store(self._create) is None:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(self._settings.poll_s)
        self._has_tables.set()

    def _create(self) -> bool:
        self._stores.database.create()
        return True

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wakes.wait()
        except TimeoutError:
            pass

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        del self._running[task]
        self._wakes.set()

    async def _answer(self, line: ClaimedLine) -> None:
        if line.num_tries > self._settings.max_tries:  # it fells whoever tries it
            error = InternalError(f"given up after {self._settings.max_tries} tries that gateways ended amid")
            await self._finish(line, self._answerer.failed(line, error))
            return
        try:
            result = await self._answerer.answer(line)
        except WeirError as error:
            await self._retry(line, error)
            return
        except Exception as error:  # the boundary of one line
            logger.exception("line %d of %s failed", line.number, line.batch_id)
            await self._retry(line, InternalError(f"internal error: {type(error).__name__}; see the gateway's log"))
            return
        await self._finish(line, result)
        self._answerer.drop(line)

    async def _retry(self, line: ClaimedLine, error: WeirError) -> None:
        # Nobody has room, or is there: that says nothing of the line, and the batch's window is the end to it.
        counts = not isinstance(error, Overloaded | Unavailable)
        if counts and line.num_tries >= self._settings.max_tries:
            await self._finish(line, self._answerer.failed(line, error))
            return
        self._counts["lines_retried"] += 1
        wait_s = min(error.retry_after_s or 1.0, self._settings.max_wait_s)
        await self._try_store(self._batches.release, line, wait_s, counts)

    async def _finish(self, line: ClaimedLine, result: LineResult) -> None:
        """While the store is away it is tried again: the lease ends at some time, and then this line is another's."""
        finish = self._batches.finish
        while (is_written := await self._try_store(finish, line, result)) is None:  # noqa: ASYNC110 - as above
            await asyncio.sleep(self._settings.poll_s)
        name = ("lines_failed" if result.is_error else "lines_answered") if is_written else "lines_lost"
        self._counts[name] += 1

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / _NUM_RENEWALS)
            held = dict(self._running)
            if not held:
                continue
            lines = list(held.values())
            kept = await self._try_store(self._batches.renew, self._owner, lines, self._settings.lease_s)
            if kept is None:
                continue
            for task, line in held.items():
                if line not in kept and not task.done():
                    await end_tasks([task])
                    await self._try_store(self._batches.release, line, 0.0, False)
                    self._answerer.drop(line)

    async def _end(self) -> None:
        await self._has_tables.wait()
        while True:
            await asyncio.sleep(self._settings.poll_s)
            for record in await self._try_store(self._batches.end_due) or ():
                self._counts["ended"] += 1
                logger.info("%s is %s: %d lines", record.batch_id, record.status.value, record.num_lines)

    async def _drop_old(self) -> None:
        await self._has_tables.wait()
        while True:
            await asyncio.sleep(_DROP_INTERVAL_S)
            await self._try_store(self._batches.drop_old)
            await self._try_store(self._stores.files.drop_expired)

    async def _try_store(self, work: Any, *arguments: Any) -> Any:
        """None: the store is away."""
        try:
            return await self._stores.database.run(work, *arguments)
        except WeirError as error:
            if not self._counts["store_failures"]:
                logger.warning("batches: %s", error.message)
        except Exception:  # the boundary of one call: batches go on
            logger.exception("a call of the batches' store failed")
        self._counts["store_failures"] += 1
        return None
