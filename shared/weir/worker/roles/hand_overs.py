"""Gives running sequences away while a worker is emptied: another worker of the same memory goes on with them, with all
that is computed."""

import asyncio
import logging

from weir.core.errors import InternalError, Unavailable
from weir.engine.loop import InboxFull
from weir.engine.messages import (
    Command,
    FailSequence,
    Failure,
    FailureReason,
    ForgetSequence,
    HandOffReady,
    HandOverSequences,
    TakeBackSequence,
)
from weir.worker.requests.drain import Untaken
from weir.worker.role import RoleParts
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)
_MAX_AT_A_TIME = 8
_TIMEOUT_S = 5.0
_RETRY_S = 1.0
"""After nobody took one: what goes on here is paused for a moment by each attempt."""
_STOP_TIMEOUT_S = 1.0


class HandOvers:
    """A bounded number at a time. Every HandOffReady is answered with exactly one command; if the engine does not take
    that, the process ends."""

    def __init__(self, parts: RoleParts) -> None:
        self._arena = parts.arena
        self._prefixes = parts.prefixes
        self._manager = parts.manager
        self._post = parts.post
        self._untaken = Untaken.GOES_ON
        self._again_at_s = 0.0
        self._concurrency = asyncio.Semaphore(_MAX_AT_A_TIME)
        self._tasks = WorkerTasks(parts.request_shutdown)
        self._num_untaken = 0
        self._num_in_doubt = 0

    def ask(self, untaken: Untaken) -> None:
        """Has the engine say what can be given away, and gives it away. May be called often."""
        if untaken is Untaken.GOES_ON and asyncio.get_running_loop().time() < self._again_at_s:
            return
        self._untaken = untaken
        try:
            self._post(HandOverSequences(with_preempted=untaken is not Untaken.GOES_ON))
        except InboxFull as error:  # called again
            _log.warning("nothing is handed over now: %s", error)

    def begin(self, ready: HandOffReady) -> None:
        self._tasks.spawn(self._hand_over(ready), f"hand-over of {ready.key.request_id}")

    async def stop(self) -> None:
        """Waits a little for what is under way; what is cut off then goes on as after a death of this process."""
        await self._tasks.stop(_STOP_TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        return {
            "hand_overs_under_way": float(len(self._tasks)),
            "hand_overs_untaken_total": float(self._num_untaken),
            "hand_overs_in_doubt_total": float(self._num_in_doubt),
        }

    async def _hand_over(self, ready: HandOffReady) -> None:
        async with self._concurrency:
            if self._manager.is_wanted(ready.key):
                self._post(await self._settle(ready))
            else:  # the engine knows, and ends it as cancelled
                self._post(TakeBackSequence(ready.key))

    async def _settle(self, ready: HandOffReady) -> Command:
        """What the engine is to do with the sequence, once the transfer service has answered."""
        key = ready.key
        hashes = self._prefixes.hashes_of(key)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._arena.hand_off(ready.slot, key.request_id, key.attempt, "", hashes)
        except (Unavailable, InternalError, ValueError) as error:
            self._num_untaken += 1
            return self._keep(ready, error)
        except Exception as error:  # noqa: BLE001 - no answer in time, or the boundary of a task: it may be another's now
            self._num_in_doubt += 1
            _log.warning("request %s: whether another worker has it is not known: %r", key.request_id, error)
        return ForgetSequence(key, is_adoption=True)

    def _keep(self, ready: HandOffReady, error: Exception) -> Command:
        """What becomes of a sequence that nobody takes now."""
        key, record = ready.key, self._arena.segment.record(ready.slot)
        if self._untaken is Untaken.LEFT and isinstance(error, Unavailable):
            _log.info("request %s is left to a successor of this worker: %s", key.request_id, error)
            return ForgetSequence(key, is_adoption=True)  # the lease keeps slot and pages until it ends
        summary = record.summarize()
        if summary is not None and (summary.request_id, summary.attempt) != key:
            _log.warning("request %s: its slot is another sequence's by now: %s", key.request_id, error)
            return ForgetSequence(key, is_adoption=True)
        if self._untaken is Untaken.GOES_ON and summary is not None:
            self._again_at_s = asyncio.get_running_loop().time() + _RETRY_S
            _log.debug("request %s goes on here: %s", key.request_id, error)
            return TakeBackSequence(key)
        message = f"this worker drains, and no other one of its memory takes the sequence: {error}"
        return FailSequence(key, Failure(FailureReason.DRAINING, message))
