"""What makes a worker a decode worker: it takes over what is handed to it, and reads the prompts that the scheduler
gives to it whole."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from opentelemetry.trace import Tracer

from weir.core.errors import FieldViolation, InvalidRequest
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.local import LocalBatcher
from weir.engine.batching.running import RunningSettings
from weir.engine.counters import fingerprint_of
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    EngineReport,
    Failure,
    FailureReason,
    PageBatch,
    SequenceEnded,
    SequenceKey,
    TakenOver,
    TokenSampled,
)
from weir.kv.arena.segment import Segment
from weir.kv.arena.watermark import watermark_pages
from weir.kv.geometry import ArenaGeometry
from weir.kv.messages import HandedOff
from weir.kv.records.record import SequenceParams
from weir.wire.v1 import worker_pb2
from weir.worker.arena.intake import UnreadableRecord, bundle_of, read_arrival
from weir.worker.assembly import RoleParts
from weir.worker.requests.convert import ModelLimits, StartOrder, start_from_pb
from weir.worker.requests.output_collector import SequenceEnd, Update
from weir.worker.requests.spans import DecodeSpans, PrefillSpans
from weir.worker.requests.streams import GatewayStream

_log = logging.getLogger(__name__)


class DecodeRole:
    """Implements `weir.worker.role.Role`."""

    def __init__(
        self,
        parts: RoleParts,
        worker_id: str,
        limits: BatchLimits,
        model: ModelLimits,
        tracer: Tracer,
        settings_over: Callable[[ArenaGeometry], RunningSettings] = lambda geometry: RunningSettings(),
    ) -> None:
        """`settings_over`: what they are, given the arena's size."""
        self._arena = parts.arena
        self._keeper = parts.keeper
        self._manager = parts.manager
        self._worker_id = worker_id
        self._limits = limits
        self._model = model
        self._settings_over = settings_over
        self._prompts: dict[SequenceKey, SequenceParams] = {}
        """Of those that started here, until their first token."""
        self._prompt_spans = PrefillSpans(tracer)
        self._spans = DecodeSpans(tracer)
        self._num_local = 0
        self._num_unreadable = 0
        self._num_unwanted = 0
        self._counters: Mapping[str, int] = {}

    def make_batcher(self, segment: Segment) -> Batcher:
        longest = min(self._limits.max_context_tokens, segment.geometry.max_context_tokens)
        limits = replace(self._limits, max_context_tokens=longest)
        self._model = replace(self._model, max_context_tokens=longest)
        pool = PagePool(reserve_pages=watermark_pages(segment.geometry.num_pages), reserve_slots=0)
        return LocalBatcher(limits, pool, segment.record, self._settings_over(segment.geometry))

    def on_start(self, stream: GatewayStream, key: SequenceKey, start: worker_pb2.Start) -> None:
        """A prompt with a wrong field is refused alone: the other requests of its gateway go on."""
        try:
            params = self._checked(start_from_pb(start, stream.gateway_id, self._model))
        except InvalidRequest as error:
            _log.warning("gateway %s: request %s refused: %s", stream.gateway_id, key.request_id, error)
            stream.answer(Update(key, ending=SequenceEnd(failure=Failure(FailureReason.INTERNAL, str(error)))))
            return
        if self._manager.try_start(stream, params):
            self._num_local += 1
            self._prompts[key] = params
            self._prompt_spans.begin(params)

    def on_handed_off(self, handed_off: HandedOff) -> None:
        """Takes the sequence over, or frees it if nobody wants it any more."""
        segment = self._arena.segment
        try:
            arrival = read_arrival(segment, handed_off)
        except UnreadableRecord as error:
            self._num_unreadable += 1
            _log.error("%s; it is freed", error)
            self._keeper.give_back(bundle_of(segment, handed_off))
            return
        if self._manager.try_take_over(arrival):
            self._spans.begin(arrival.params, len(arrival.output_token_ids))
        else:
            self._num_unwanted += 1
            self._keeper.give_back(PageBatch(arrival.block_table, (handed_off.slot,)))

    def on_report(self, report: EngineReport) -> None:
        self._counters = report.counters
        self._prompt_spans.on_report(report)
        self._spans.on_report(report)
        ended = {event.key for event in report.events if isinstance(event, SequenceEnded)}
        for event in report.events:
            match event:
                case TakenOver(key, page_ids):
                    fingerprint = fingerprint_of(key.request_id, page_ids)
                    _log.debug("request %s: %d pages (%012x)", key.request_id, len(page_ids), fingerprint)
                case TokenSampled(key) if key in self._prompts:
                    params = self._prompts.pop(key)
                    if key not in ended:
                        self._spans.begin(params, num_output_tokens=1)
                case SequenceEnded(key):
                    self._prompts.pop(key, None)
                case _:
                    pass

    async def stop(self) -> None:
        """Nothing of this role waits."""

    def metrics(self) -> Mapping[str, float]:
        num_served = self._counters.get("taken_over", 0) + self._num_local
        return {
            "preemption_rate": self._counters.get("preemptions", 0) / max(1, num_served),
            "served_locally_total": float(self._num_local),
            "unreadable_hand_offs_total": float(self._num_unreadable),
            "unwanted_hand_offs_total": float(self._num_unwanted),
            "num_open_spans": float(self._spans.num_open + self._prompt_spans.num_open),
        }

    def _checked(self, order: StartOrder) -> SequenceParams:
        """Raises InvalidRequest for a prompt that another worker is to decode."""
        if order.decode_worker_id != self._worker_id:
            problem = f"{order.decode_worker_id}: this is decode worker {self._worker_id}, which hands nothing off"
            raise InvalidRequest([FieldViolation("start.decode_worker_id", problem)])
        return order.params
