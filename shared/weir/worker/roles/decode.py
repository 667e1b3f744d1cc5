"""What makes a worker a decode worker: it takes over what is handed to it, and serves the prompts whole that the
scheduler places there."""

import logging
from collections.abc import Mapping

from opentelemetry.trace import Tracer

from weir.core.errors import FieldViolation, InvalidRequest
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.running import RunningBatcher
from weir.engine.counters import fingerprint_of
from weir.engine.memory.pages import PagePool
from weir.engine.memory.swapping import PageSwapper, swapping_runner
from weir.engine.messages import (
    Arrival,
    EngineReport,
    HandOffReady,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
    TakenOver,
    TokenSampled,
)
from weir.engine.plan import ModelRunner
from weir.kv.arena.segment import Segment
from weir.kv.geometry import num_reservable_pages, watermark_pages
from weir.kv.memory.swap import SwapFile, num_swap_slots
from weir.kv.messages import HandedOff
from weir.kv.records.record import SequenceParams
from weir.telemetry.described import HistogramFigure
from weir.worker.arena.arena import UnreadableRecord, read_arrival
from weir.worker.engine.model_loading import LoadedModel
from weir.worker.requests.drain import Untaken
from weir.worker.requests.spans import DecodeSpans, PrefillSpans
from weir.worker.requests.streams import GatewayStream
from weir.worker.role import RoleParts
from weir.worker.roles.config import DecodeConfig
from weir.worker.roles.hand_overs import HandOvers

_log = logging.getLogger(__name__)


class DecodeRole:
    """Implements `weir.worker.role.Role`."""

    def __init__(self, parts: RoleParts, config: DecodeConfig, tracer: Tracer) -> None:
        self._worker_id = parts.worker_id
        self._arena = parts.arena
        self._keeper = parts.keeper
        self._manager = parts.manager
        self._config = config
        self.serves_locally = config.serves_locally
        self._prompts: dict[SequenceKey, SequenceParams] = {}
        """Those that started here, until their first token."""
        self._prompt_spans = PrefillSpans(tracer)
        self._spans = DecodeSpans(tracer)
        self._hand_overs = HandOvers(parts)
        self._num_local = 0
        self._num_unreadable = 0
        self._num_unwanted = 0
        self._counters: Mapping[str, int] = {}

    def make_runner(self, model: LoadedModel, segment: Segment) -> ModelRunner:
        num_slots = num_swap_slots(self._config.swap_bytes, segment.geometry)
        if num_slots == 0:
            return model.runner
        swap_file = SwapFile(self._config.swap_dir, segment.geometry.page_bytes, num_slots)
        return swapping_runner(model.runner, PageSwapper(model.pages, swap_file))

    def make_batcher(self, segment: Segment, limits: BatchLimits) -> Batcher:
        geometry = segment.geometry
        num_slots = num_swap_slots(self._config.swap_bytes, geometry)
        settings = self._config.running_settings(num_slots, num_reservable_pages(geometry.num_pages))
        pool = PagePool(watermark_pages=watermark_pages(geometry.num_pages), watermark_slots=0)
        return RunningBatcher(limits, pool, segment.record, settings)

    def on_start(self, stream: GatewayStream, prompt: Arrival, decode_worker_id: str) -> None:
        if decode_worker_id != self._worker_id:
            problem = f"{decode_worker_id}: this is decode worker {self._worker_id}, which hands nothing off"
            raise InvalidRequest([FieldViolation("start.decode_worker_id", problem)])
        params = prompt.params
        if self._manager.try_start(stream, prompt):
            self._num_local += 1
            self._prompts[SequenceKey.of(params)] = params
            self._prompt_spans.begin(params)

    def on_handed_off(self, handed_off: HandedOff) -> None:
        """Takes the sequence over, or frees it if nobody wants it any more."""
        try:
            arrival = read_arrival(self._arena.segment, handed_off)
        except UnreadableRecord as error:
            self._num_unreadable += 1
            _log.error("%s; it is freed", error)
            self._keeper.give_back_sequence(handed_off.slot)
            return
        if self._manager.try_take_over(arrival):
            self._spans.begin(arrival.params, len(arrival.output_token_ids))
        else:
            self._num_unwanted += 1
            self._keeper.give_back_sequence(handed_off.slot)

    def hand_over(self, untaken: Untaken) -> None:
        self._hand_overs.ask(untaken)

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
                        self._spans.begin(params, event.index + 1)
                case HandOffReady():
                    self._hand_overs.begin(event)
                case SequenceEnded(key) | SequenceForgotten(key):
                    self._prompts.pop(key, None)
                case _:
                    pass

    async def stop(self) -> None:
        await self._hand_overs.stop()

    def histograms(self) -> tuple[HistogramFigure, ...]:
        return ()

    def metrics(self) -> Mapping[str, float]:
        num_served = self._counters.get("taken_over", 0) + self._counters.get("adopted", 0) + self._num_local
        return self._hand_overs.metrics() | {
            "preemption_rate": self._counters.get("preemptions", 0) / max(1, num_served),
            "served_locally_total": float(self._num_local),
            "unreadable_hand_offs_total": float(self._num_unreadable),
            "unwanted_hand_offs_total": float(self._num_unwanted),
            "num_open_spans": float(self._spans.num_open + self._prompt_spans.num_open),
        }
