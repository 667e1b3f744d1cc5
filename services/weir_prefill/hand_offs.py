"""Hand-offs to decode workers: one call each, a bounded number at a time."""

import asyncio
import logging

from opentelemetry.trace import Span, Status, StatusCode

from weir.core.errors import DeadlineExceeded, InternalError, Unavailable
from weir.core.tasks import end_tasks
from weir.engine.counters import fingerprint_of
from weir.engine.messages import (
    Command,
    FailSequence,
    Failure,
    FailureReason,
    ForgetSequence,
    HandOffReady,
    SequenceEnded,
    SequenceKey,
)
from weir.kv.records.record import SequenceParams
from weir.worker.requests.spans import PrefillSpans
from weir.worker.role import RoleParts

_log = logging.getLogger(__name__)
_MAX_AT_A_TIME = 8
_STOP_TIMEOUT_S = 1.0


class HandOffs:
    """Every HandOffReady is answered with exactly one Forget or Fail."""

    def __init__(self, parts: RoleParts, spans: PrefillSpans) -> None:
        self._arena = parts.arena
        self._prefixes = parts.prefixes
        self._manager = parts.manager
        self._post = parts.post
        self._spans = spans
        self._concurrency = asyncio.Semaphore(_MAX_AT_A_TIME)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_bytes_copied = 0
        self._num_refused = 0
        self._num_in_doubt = 0

    def begin(self, ready: HandOffReady, params: SequenceParams, decode_worker_id: str) -> None:
        hand_off = self._hand_off(ready, params, decode_worker_id)
        task = asyncio.create_task(hand_off, name=f"hand-off of {ready.key.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        """Waits a little for what is under way; what is cut off then is the transfer service's to settle."""
        if not self._tasks:
            return
        _, pending = await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)
        await end_tasks(pending)

    def metrics(self) -> dict[str, float]:
        return {
            "hand_off_bytes_copied_total": float(self._num_bytes_copied),
            "hand_offs_refused_total": float(self._num_refused),
            "hand_offs_in_doubt_total": float(self._num_in_doubt),
            "hand_offs_under_way": float(len(self._tasks)),
        }

    async def _hand_off(self, ready: HandOffReady, params: SequenceParams, decode_worker_id: str) -> None:
        key = ready.key
        async with self._concurrency:
            if not self._manager.is_wanted(key):  # the engine knows, and ends it as cancelled
                self._post(FailSequence(key, Failure(FailureReason.HAND_OFF_REFUSED, "cancelled before the hand-off")))
                return
            with self._spans.hand_off(params, decode_worker_id, len(ready.page_ids)) as span:
                self._post(await self._settle(ready, decode_worker_id, span))

    async def _settle(self, ready: HandOffReady, receiver: str, span: Span) -> Command:
        """What the engine is to do with the sequence, once the transfer service has answered."""
        key = ready.key
        hashes = self._prefixes.hashes_of(key)
        try:
            receipt = await self._arena.hand_off(ready.slot, key.request_id, key.attempt, receiver, hashes)
        except (Unavailable, InternalError, ValueError) as error:
            self._num_refused += 1
            _log.warning("request %s: not handed off to %s: %s", key.request_id, receiver, error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            return FailSequence(
                key, Failure(FailureReason.HAND_OFF_REFUSED, f"worker {receiver} did not take it: {error}")
            )
        except DeadlineExceeded as error:
            _log.warning("request %s: whether %s has it is not known: %s", key.request_id, receiver, error)
            return self._leave_in_doubt(key, FailureReason.HAND_OFF_REFUSED, "was not confirmed in time", span)
        except Exception as error:  # noqa: BLE001 - the boundary of a task: its gateway must not wait for ever
            _log.exception("request %s: the hand-off to %s failed", key.request_id, receiver)
            return self._leave_in_doubt(key, FailureReason.INTERNAL, f"failed: {type(error).__name__}", span)
        self._num_bytes_copied += receipt.num_bytes_copied
        fingerprint = fingerprint_of(key.request_id, ready.page_ids)
        _log.debug("request %s: %d pages (%012x) to %s", key.request_id, receipt.num_pages, fingerprint, receiver)
        return ForgetSequence(key)

    def _leave_in_doubt(self, key: SequenceKey, reason: FailureReason, problem: str, span: Span) -> Command:
        """Slot and pages may be another's by now. Should the sequence have arrived, its gateway cancels it there."""
        self._num_in_doubt += 1
        message = f"the hand-off {problem}"
        span.set_status(Status(StatusCode.ERROR, message))
        self._manager.on_event(SequenceEnded(key, failure=Failure(reason, message)), step=0)
        return ForgetSequence(key)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # The engine did not take the command: its inbox is full, which ends this process by other ways.
            _log.error("%s failed", task.get_name(), exc_info=task.exception())
