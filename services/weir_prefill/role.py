"""What makes a worker a prefill worker: it starts prompts, and hands them off after the first token."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from opentelemetry.trace import Tracer

from weir.core.errors import InvalidRequest
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    EngineReport,
    Failure,
    FailureReason,
    HandOffReady,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
)
from weir.kv.arena.segment import Segment
from weir.kv.arena.watermark import watermark_pages
from weir.kv.messages import HandedOff
from weir.wire.v1 import worker_pb2
from weir.worker.arena.intake import bundle_of
from weir.worker.assembly import RoleParts
from weir.worker.requests.convert import ModelLimits, StartOrder, start_from_pb
from weir.worker.requests.output_collector import SequenceEnd, Update
from weir.worker.requests.spans import PrefillSpans
from weir.worker.requests.streams import GatewayStream
from weir_prefill.hand_offs import HandOffs

_log = logging.getLogger(__name__)
_RESERVE_SLOTS = 2


class PrefillRole:
    """Implements `weir.worker.role.Role`."""

    def __init__(self, parts: RoleParts, limits: BatchLimits, model: ModelLimits, tracer: Tracer) -> None:
        self._arena = parts.arena
        self._keeper = parts.keeper
        self._manager = parts.manager
        self._limits = limits
        self._model = model
        self._spans = PrefillSpans(tracer)
        self._orders: dict[SequenceKey, StartOrder] = {}
        self._hand_offs = HandOffs(parts, self._spans)

    def make_batcher(self, segment: Segment) -> Batcher:
        longest = min(self._limits.max_context_tokens, segment.geometry.max_context_tokens)
        self._model = replace(self._model, max_context_tokens=longest)
        pool = PagePool(reserve_pages=watermark_pages(segment.geometry.num_pages), reserve_slots=_RESERVE_SLOTS)
        return PrefillBatcher(replace(self._limits, max_context_tokens=longest), pool, segment.record)

    def on_start(self, stream: GatewayStream, key: SequenceKey, start: worker_pb2.Start) -> None:
        """A prompt with a wrong field is refused alone: the other requests of its gateway go on."""
        try:
            order = start_from_pb(start, stream.gateway_id, self._model)
        except InvalidRequest as error:
            _log.warning("gateway %s: request %s refused: %s", stream.gateway_id, key.request_id, error)
            stream.answer(Update(key, ending=SequenceEnd(failure=Failure(FailureReason.INTERNAL, str(error)))))
            return
        if self._manager.try_start(stream, order.params):
            self._orders[key] = order
            self._spans.begin(order.params)

    def on_handed_off(self, handed_off: HandedOff) -> None:
        _log.error("request %s was handed to a prefill worker; it is freed", handed_off.request_id)
        self._keeper.give_back(bundle_of(self._arena.segment, handed_off))

    def on_report(self, report: EngineReport) -> None:
        self._spans.on_report(report)
        for event in report.events:
            match event:
                case HandOffReady(key):
                    self._hand_offs.begin(event, self._orders[key])
                case SequenceEnded(key) | SequenceForgotten(key):
                    self._orders.pop(key, None)
                case _:
                    pass

    async def stop(self) -> None:
        await self._hand_offs.stop()

    def metrics(self) -> Mapping[str, float]:
        return self._hand_offs.metrics() | {"num_open_spans": float(self._spans.num_open)}
