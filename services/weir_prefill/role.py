"""What makes a worker a prefill worker: it starts prompts, and hands them off after the first token."""

import logging
from collections.abc import Mapping

from opentelemetry.trace import Tracer

from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.memory.pages import PagePool
from weir.engine.messages import EngineReport, HandOffReady, SequenceEnded, SequenceForgotten, SequenceKey
from weir.engine.plan import ModelRunner
from weir.kv.arena.segment import Segment
from weir.kv.arena.watermark import watermark_pages
from weir.kv.messages import HandedOff
from weir.kv.records.record import SequenceParams
from weir.worker.arena.arrivals import pages_of
from weir.worker.engine.model_loading import LoadedModel
from weir.worker.requests.spans import PrefillSpans
from weir.worker.requests.streams import GatewayStream
from weir.worker.role import RoleParts
from weir_prefill.hand_offs import HandOffs

_log = logging.getLogger(__name__)
_WATERMARK_SLOTS = 2


class PrefillRole:
    """Implements `weir.worker.role.Role`."""

    serves_locally = False

    def __init__(self, parts: RoleParts, tracer: Tracer) -> None:
        self._arena = parts.arena
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
        pool = PagePool(reserve_pages=watermark_pages(segment.geometry.num_pages), reserve_slots=_WATERMARK_SLOTS)
        return PrefillBatcher(limits, pool, segment.record)

    def on_start(self, stream: GatewayStream, params: SequenceParams, decode_worker_id: str) -> None:
        if self._manager.try_start(stream, params):
            self._prompts[SequenceKey(params.request_id, params.attempt)] = params, decode_worker_id
            self._spans.begin(params)

    def on_handed_off(self, handed_off: HandedOff) -> None:
        _log.error("request %s was handed to a prefill worker; it is freed", handed_off.request_id)
        self._keeper.give_back(pages_of(self._arena.segment, handed_off))

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
