"""What makes a worker a prefill worker: it starts prompts, and hands them off after the first token, one call each."""

import asyncio
import logging
import time
from collections.abc import Mapping

from opentelemetry.trace import Span, Status, StatusCode, Tracer

from weir.core.errors import DeadlineExceeded, InternalError, Unavailable
from weir.core.trace_context import sampled_trace_id
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.counters import fingerprint_of
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    Arrival,
    Command,
    EngineReport,
    FailSequence,
    Failure,
    FailureReason,
    ForgetSequence,
    HandOffReady,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
)
from weir.engine.plan import ModelRunner
from weir.kv.arena.segment import Segment
from weir.kv.geometry import watermark_pages
from weir.kv.messages import HandedOff
from weir.kv.records.record import SequenceParams
from weir.telemetry.catalog.histograms import CALL_EDGES, HAND_OFF
from weir.telemetry.described import HistogramFigure
from weir.telemetry.histogram import Histogram
from weir.worker.engine.model_loading import LoadedModel
from weir.worker.requests.drain import Untaken
from weir.worker.requests.spans import PrefillSpans
from weir.worker.requests.streams import GatewayStream
from weir.worker.role import RoleParts
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)
_WATERMARK_SLOTS = 2
_MAX_AT_A_TIME = 8
_STOP_TIMEOUT_S = 1.0


class HandOffs:
    """A bounded number at a time. Every HandOffReady is answered with exactly one Forget or Fail; if the engine does
    not take that, the process ends."""

    def __init__(self, parts: RoleParts, spans: PrefillSpans) -> None:
        self._arena = parts.arena
        self._prefixes = parts.prefixes
        self._manager = parts.manager
        self._post = parts.post
        self._spans = spans
        self._concurrency = asyncio.Semaphore(_MAX_AT_A_TIME)
        self._tasks = WorkerTasks(parts.request_shutdown)
        self.seconds = Histogram(CALL_EDGES)
        """Of the calls that committed one."""
        self._num_bytes_copied = 0
        self._num_refused = 0
        self._num_in_doubt = 0

    def begin(self, ready: HandOffReady, params: SequenceParams, decode_worker_id: str) -> None:
        hand_off = self._hand_off(ready, params, decode_worker_id)
        self._tasks.spawn(hand_off, f"hand-off of {ready.key.request_id}")

    async def stop(self) -> None:
        """Waits a little for what is under way; what is cut off then is the transfer service's to settle."""
        await self._tasks.stop(_STOP_TIMEOUT_S)

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
        hashes, began_s = self._prefixes.hashes_of(key), time.monotonic()
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
        self.seconds.observe_traced(time.monotonic() - began_s, sampled_trace_id(span), time.time())
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


class PrefillRole:
    """Implements `weir.worker.role.Role`."""

    serves_locally = False

    def __init__(self, parts: RoleParts, tracer: Tracer) -> None:
        self._keeper = parts.keeper
        self._manager = parts.manager
        self._spans = PrefillSpans(tracer)
        self._prompts: dict[SequenceKey, tuple[SequenceParams, str]] = {}
        """Each with the decode worker that it is to be handed to."""
        self._hand_offs = HandOffs(parts, self._spans)

    def make_runner(self, model: LoadedModel, segment: Segment) -> ModelRunner:
        del segment
        return model.runner

    def make_batcher(self, segment: Segment, limits: BatchLimits) -> Batcher:
        pool = PagePool(watermark_pages=watermark_pages(segment.geometry.num_pages), watermark_slots=_WATERMARK_SLOTS)
        return PrefillBatcher(limits, pool, segment.record)

    def on_start(self, stream: GatewayStream, prompt: Arrival, decode_worker_id: str) -> None:
        params = prompt.params
        if self._manager.try_start(stream, prompt):
            self._prompts[SequenceKey.of(params)] = params, decode_worker_id
            self._spans.begin(params)

    def on_handed_off(self, handed_off: HandedOff) -> None:
        _log.error("request %s was handed to a prefill worker; it is freed", handed_off.request_id)
        self._keeper.give_back_sequence(handed_off.slot)

    def hand_over(self, untaken: Untaken) -> None:
        """A prompt half read goes on elsewhere from its full pages."""

    def on_report(self, report: EngineReport) -> None:
        self._spans.on_report(report)
        for event in report.events:
            match event:
                case HandOffReady(key):
                    self._hand_offs.begin(event, *self._prompts[key])
                case SequenceEnded(key) | SequenceForgotten(key):
                    self._prompts.pop(key, None)
                case _:
                    pass

    async def stop(self) -> None:
        await self._hand_offs.stop()

    def metrics(self) -> Mapping[str, float]:
        return self._hand_offs.metrics() | {"num_open_spans": float(self._spans.num_open)}

    def histograms(self) -> tuple[HistogramFigure, ...]:
        return (HistogramFigure(HAND_OFF.name, self._hand_offs.seconds.value()),)
