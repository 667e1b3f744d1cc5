"""A prefill and a decode engine over one small arena, turned by hand, with every delay and refusal from a seed."""

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from weir.core.clock import ManualClock
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules, TokenLogprobs
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher
from weir.engine.loop import EngineCore, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    EngineReport,
    Event,
    Failure,
    FailureReason,
    HandOffReady,
    PageBundle,
    PromptScored,
    ReleaseEnds,
    SequenceEnded,
    SequenceKey,
    TokenSampled,
)
from weir.engine.plan import StepPlan
from weir.kv.geometry import PAGE_TOKENS, ArenaGeometry
from weir.kv.layout import layout_of
from weir.kv.records.record import SequenceParams, SequenceRecord
from weir.testing.runner import HashRunner, LaunchingHashRunner

VOCAB_SIZE = 50
MAX_CONTEXT_TOKENS = 160
TICK_S = 0.1
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Request:
    """One request of a schedule."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    arrives_at: int
    cancelled_at: int | None
    num_reserved_pages: int
    sampling: SamplingParams = GREEDY
    """But for the seed."""
    min_tokens: int = 0


@dataclass(frozen=True)
class Schedule:
    """All that a run depends on."""

    requests: tuple[Request, ...]
    num_pages: int
    num_slots: int
    prefill_limits: BatchLimits
    decode_limits: BatchLimits
    watermark_pages: int
    seed: int


def limits(**changes: int) -> BatchLimits:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "chunk_tokens": 32} | changes
    values.setdefault("max_context_tokens", MAX_CONTEXT_TOKENS)
    return BatchLimits(**values, vocab_size=VOCAB_SIZE, max_stall_s=2.0)


def params(
    prompt_token_ids: tuple[int, ...],
    index: int = 0,
    *,
    max_tokens: int = 8,
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    num_reserved_pages: int = 10,
    sampling: SamplingParams = GREEDY,
    min_tokens: int = 0,
) -> SequenceParams:
    return SequenceParams(
        request_id=f"{index:032x}",
        attempt=Attempt(),
        gateway_id="gateway-0-00000000",
        prompt_token_ids=prompt_token_ids,
        sampling=replace(sampling, seed=seed),
        stop=StopRules(max_tokens, stop_token_ids, min_tokens),
        num_reserved_pages=num_reserved_pages,
        traceparent="",
    )


class Records:
    """The record of each slot, in plain memory."""

    def __init__(self, num_pages: int, num_slots: int, max_context_tokens: int = MAX_CONTEXT_TOKENS) -> None:
        self._geometry = ArenaGeometry(4096, num_pages, num_slots, max_context_tokens)
        num_bytes = layout_of(self._geometry).record_bytes
        self._memory = [memoryview(bytearray(num_bytes)) for _ in range(num_slots)]

    def open(self, slot: int) -> SequenceRecord:
        return SequenceRecord(self._memory[slot], self._geometry)


@dataclass
class Outcome:
    """What a gateway saw of one request."""

    token_ids: list[int] = field(default_factory=list)
    ends: list[SequenceEnded] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class World:
    """Runs a schedule to its end; `outcomes` is what came out."""

    def __init__(self, schedule: Schedule, *, async_scheduling: bool = False) -> None:
        """`async_scheduling`: the decode engine launches a step while one runs."""
        self.schedule = schedule
        self.clock = ManualClock()
        longest, window = schedule.decode_limits.max_context_tokens, schedule.decode_limits.window
        self.records = Records(schedule.num_pages, schedule.num_slots, longest)
        memory = np.full((schedule.num_pages, PAGE_TOKENS), -1, np.int64)
        self.prefill_runner = HashRunner(
            schedule.num_pages, VOCAB_SIZE, partial(_check_limits, schedule.prefill_limits), memory, window
        )
        self.decode_runner = LaunchingHashRunner(
            schedule.num_pages, VOCAB_SIZE, partial(_check_limits, schedule.decode_limits), memory, window
        )
        self.free_pages = set(range(schedule.num_pages))
        self.free_slots = set(range(schedule.num_slots))
        watermark = schedule.watermark_pages
        self.prefill = PrefillBatcher(
            schedule.prefill_limits, PagePool(watermark_pages=watermark, watermark_slots=1), self.records.open
        )
        self.decode = RunningBatcher(
            schedule.decode_limits, PagePool(watermark_pages=watermark, watermark_slots=0), self.records.open
        )
        self._reports: list[EngineReport] = []
        settings = LoopSettings(inbox_size=64, async_scheduling=async_scheduling)
        self._decode_core = EngineCore(self.decode, self.decode_runner, self._reports.append, settings, self.clock)
        self.outcomes: dict[SequenceKey, Outcome] = defaultdict(Outcome)
        self._random = random.Random(schedule.seed)
        self._cancelled: set[SequenceKey] = set()
        self._hand_offs: list[HandOffReady] = []
        self.tick = 0

    def run(self, max_ticks: int = 3000) -> None:
        last_tick = max((max(r.arrives_at, r.cancelled_at or 0) for r in self.schedule.requests), default=0)
        while self.tick <= last_tick or not (self.prefill.is_idle and self.decode.is_idle):
            self._arrive_and_cancel()
            self._settle_hand_offs()
            self._turn_prefill()
            self._turn_decode()
            self.tick += 1
            self.clock.advance(TICK_S)
            assert self.tick < max_ticks, "a sequence never ends"
        self.prefill.kept_ends.release_all()
        self._take_back(self.prefill.pool.take_all_free())
        self._decode_core.close()
        self._see_reports()

    def _arrive_and_cancel(self) -> None:
        for index, request in enumerate(self.schedule.requests):
            key = SequenceKey(f"{index:032x}", Attempt())
            if request.arrives_at == self.tick:
                self.outcomes[key] = Outcome()
                self.prefill.add(Arrival(self._params_of(index, request)))
            if request.cancelled_at == self.tick and request.arrives_at <= self.tick:
                self._cancelled.add(key)
                self.prefill.cancel(key)
                self._decode_core.apply(CancelSequence(key))

    def _params_of(self, index: int, request: Request) -> SequenceParams:
        return params(
            request.prompt_token_ids,
            index,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            seed=request.seed,
            num_reserved_pages=request.num_reserved_pages,
            sampling=request.sampling,
            min_tokens=request.min_tokens,
        )

    def _settle_hand_offs(self) -> None:
        for ready in [ready for ready in self._hand_offs if self._random.random() < 0.5]:
            self._hand_offs.remove(ready)
            if self._random.random() < 0.15:
                self.prefill.fail(ready.key, Failure(FailureReason.HAND_OFF_REFUSED, "the decode worker is gone"))
                continue
            self.prefill.forget(ready.key)
            record = self.records.open(ready.slot)
            snapshot = record.read()
            assert snapshot is not None
            assert (snapshot.held_pages, snapshot.first_page) == (ready.page_ids, ready.first_page)
            self._decode_core.apply(AddSequence(Arrival.of_record(ready.slot, record, snapshot)))
            if ready.key in self._cancelled:
                self._decode_core.apply(CancelSequence(ready.key))

    def _turn_prefill(self) -> None:
        self._grant(self.prefill)
        self.prefill.kept_ends.release(self._some_keys())
        plan = self.prefill.decide(self.clock.now_s())
        if plan is not None:
            self.prefill.record(plan, self.prefill_runner.run(plan))
        for event in self.prefill.take_events():
            self._see(event)
        self._take_back(self.prefill.take_surplus())
        self._check(self.prefill)

    def _turn_decode(self) -> None:
        self._grant(self.decode)
        self._decode_core.apply(ReleaseEnds(self._some_keys()))
        self._decode_core.turn()
        self._see_reports()

    def _see_reports(self) -> None:
        for report in self._reports:
            for event in report.events:
                self._see(event)
            self._take_back(report.surplus)
        self._reports.clear()
        self._check(self.decode)

    def _some_keys(self) -> tuple[SequenceKey, ...]:
        return tuple(key for key in self.outcomes if self._random.random() < 0.3)

    def _grant(self, batcher: Batcher) -> None:
        wanted = batcher.wanted()
        if wanted is None or self._random.random() < 0.3:
            return
        for num_pages, num_slots in (
            (wanted.num_pages, wanted.num_slots),
            (wanted.least_pages, wanted.least_slots),
        ):
            if num_pages <= len(self.free_pages) and num_slots <= len(self.free_slots):
                pages = tuple(self.free_pages.pop() for _ in range(num_pages))
                slots = tuple(self.free_slots.pop() for _ in range(num_slots))
                batcher.pool.give(PageBundle(pages, slots))
                return

    def _take_back(self, bundle: PageBundle) -> None:
        assert self.free_pages.isdisjoint(bundle.all_page_ids)
        assert self.free_slots.isdisjoint(bundle.slots)
        self.decode_runner.spoil(bundle.all_page_ids)
        self.free_pages.update(bundle.all_page_ids)
        self.free_slots.update(bundle.slots)

    def _check(self, batcher: Batcher) -> None:
        """The record of each end that is kept has all that its client is to get, and nothing else."""
        for slot in batcher.kept_ends.slots:
            snapshot = self.records.open(slot).read()
            assert snapshot is not None
            outcome = self.outcomes[SequenceKey.of(snapshot.params)]
            assert (list(snapshot.output_token_ids), snapshot.block_table) == (outcome.token_ids, ())
            assert snapshot.finish_reason == outcome.ends[-1].reason
        assert batcher.check_integrity() == ()

    def _see(self, event: Event) -> None:
        match event:
            case PromptScored(key, first_index, logprobs):
                assert first_index == len(self.outcomes[key].prompt_logprobs) + 1
                self.outcomes[key].prompt_logprobs.extend(logprobs)
            case TokenSampled(key, index, token_id, sampled):
                assert index == len(self.outcomes[key].token_ids)
                self.outcomes[key].token_ids.append(token_id)
                self.outcomes[key].logprobs += [] if sampled is None else [sampled]
            case SequenceEnded(key):
                self.outcomes[key].ends.append(event)
            case HandOffReady(key, slot, _):
                snapshot = self.records.open(slot).read()
                assert snapshot is not None
                assert list(snapshot.output_token_ids) == self.outcomes[key].token_ids
                self._hand_offs.append(event)
            case _:
                pass


def _check_limits(limits: BatchLimits, plan: StepPlan) -> None:
    assert plan.num_tokens <= limits.max_num_batched_tokens
    assert all(len(chunk.token_ids) <= limits.chunk_tokens for chunk in plan.chunks)
    assert len(plan.chunks) <= limits.max_num_seqs
