"""What makes a worker a decode worker: it takes over what is handed to it, and starts nothing itself."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from opentelemetry.trace import Tracer

from weir.engine.batcher import Batcher, BatchLimits
from weir.engine.counters import fingerprint_of
from weir.engine.decode import DecodeBatcher
from weir.engine.messages import EngineReport, Failure, FailureReason, PageLot, SequenceKey, TakenOver
from weir.engine.pages import PagePool
from weir.engine.running import RunningSettings
from weir.kv.geometry import ArenaGeometry
from weir.kv.messages import HandedOff
from weir.kv.segment import Segment
from weir.wire.v1 import worker_pb2
from weir.worker.assembly import RoleParts
from weir.worker.delivery import Ending, Update
from weir.worker.intake import UnreadableRecord, lot_of, read_arrival
from weir.worker.reserve import reserve_pages
from weir.worker.spans import DecodeSpans
from weir.worker.streams import GatewayStream

_log = logging.getLogger(__name__)


class DecodeRole:
    """Implements `weir.worker.role.Role`."""

    def __init__(
        self,
        parts: RoleParts,
        limits: BatchLimits,
        tracer: Tracer,
        settings_over: Callable[[ArenaGeometry], RunningSettings] = lambda geometry: RunningSettings(),
    ) -> None:
        """`settings_over`: what they are, given the arena's size."""
        self._arena = parts.arena
        self._keeper = parts.keeper
        self._desk = parts.desk
        self._limits = limits
        self._settings_over = settings_over
        self._spans = DecodeSpans(tracer)
        self._num_unreadable = 0
        self._num_unwanted = 0
        self._counters: Mapping[str, int] = {}

    def make_batcher(self, segment: Segment) -> Batcher:
        longest = min(self._limits.max_context_tokens, segment.geometry.max_context_tokens)
        limits = replace(self._limits, max_context_tokens=longest)
        pool = PagePool(reserve_pages=reserve_pages(segment.geometry), reserve_slots=0)
        return DecodeBatcher(limits, pool, self._settings_over(segment.geometry))

    def on_start(self, stream: GatewayStream, key: SequenceKey, start: worker_pb2.Start) -> None:
        """The scheduler sends prompts to prefill workers."""
        del start
        failure = Failure(FailureReason.INTERNAL, "start: this is a decode worker, prompts go to prefill workers")
        stream.answer(Update(key, ending=Ending(failure=failure)))

    def on_handed_off(self, handed_off: HandedOff) -> None:
        """Takes the sequence over, or frees it if nobody wants it any more."""
        segment = self._arena.segment
        try:
            arrival = read_arrival(segment, handed_off)
        except UnreadableRecord as error:
            self._num_unreadable += 1
            _log.error("%s; it is freed", error)
            self._keeper.give_back(lot_of(segment, handed_off))
            return
        if self._desk.try_take_over(arrival):
            self._spans.begin(arrival.facts, len(arrival.output_token_ids))
        else:
            self._num_unwanted += 1
            self._keeper.give_back(PageLot(arrival.block_table, (handed_off.slot,)))

    def on_report(self, report: EngineReport) -> None:
        self._counters = report.counters
        self._spans.on_report(report)
        for event in report.events:
            if isinstance(event, TakenOver):
                fingerprint = fingerprint_of(event.key.request_id, event.page_ids)
                _log.debug("request %s: %d pages (%012x)", event.key.request_id, len(event.page_ids), fingerprint)

    async def stop(self) -> None:
        """Nothing of this role waits."""

    def metrics(self) -> Mapping[str, float]:
        num_taken_over = self._counters.get("taken_over", 0)
        return {
            "preemption_rate": self._counters.get("preemptions", 0) / max(1, num_taken_over),
            "unreadable_hand_offs_total": float(self._num_unreadable),
            "unwanted_hand_offs_total": float(self._num_unwanted),
            "num_open_spans": float(self._spans.num_open),
        }
