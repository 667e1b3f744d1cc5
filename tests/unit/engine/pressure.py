"""One engine that serves alone over an arena with too few pages, turned by hand; delays and refusals from a seed."""

import random
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.engine.world import TICK_S, VOCAB_SIZE, Outcome, Records

from weir.core.clock import ManualClock
from weir.core.life import Attempt, SchedulingParams
from weir.core.sampling import SamplingParams, StopRules
from weir.engine.batching.admission import PauseSettings
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.own_rules import JoinSettings
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.memory.swapping import HostPages, PageSwapper, swapping_runner
from weir.engine.messages import (
    Arrival,
    Event,
    Failure,
    FailureReason,
    PageBundle,
    SequenceEnded,
    SequenceKey,
    TokenSampled,
)
from weir.kv.memory.swap import SwapFile
from weir.kv.records.record import SequenceParams
from weir.policy.registry import PolicySpec
from weir.testing.runner import HashRunner


@dataclass(frozen=True)
class Prompt:
    """One request; `lane_priority` and `rank` as the scheduler sets them."""

    token_ids: tuple[int, ...]
    max_tokens: int
    lane_priority: int
    arrives_at: int
    cancelled_at: int | None
    seed: int
    prefix_seed: bytes
    rank: float = 0.0
    predicted_output_tokens: float = 0.0
    itl_target_ms: int = 0


@dataclass(frozen=True)
class Pressure:
    """All that a run depends on."""

    prompts: tuple[Prompt, ...]
    num_pages: int
    limits: BatchLimits
    join: JoinSettings
    preemption: PreemptionSettings
    refusal_rate: float = 0.0
    failure_rate: float = 0.0
    spoil_rate: float = 0.0
    seed: int = 0
    policies: tuple[tuple[int, str], ...] = ()
    """(tick, policy from then on)."""
    pauses: PauseSettings = field(default_factory=PauseSettings)


class PressedEngine:
    """Runs to the end of all prompts; `outcomes` is what came out."""

    def __init__(self, pressure: Pressure) -> None:
        self.pressure = pressure
        self.clock = ManualClock()
        longest, window = pressure.limits.max_context_tokens, pressure.limits.window
        self.records = Records(pressure.num_pages, len(pressure.prompts), longest)
        self.runner = HashRunner(pressure.num_pages, VOCAB_SIZE, window=window)
        self.swap_file = self._make_swap_file()
        self.free_pages = set(range(pressure.num_pages))
        pool = PagePool(watermark_pages=0, watermark_slots=0)
        pool.give(PageBundle((), tuple(range(len(pressure.prompts)))))
        settings = RunningSettings(pressure.join, pressure.preemption, pressure.pauses, pressure.num_pages)
        self.batcher = RunningBatcher(pressure.limits, pool, self.records.open, settings)
        self.outcomes: dict[SequenceKey, Outcome] = defaultdict(Outcome)
        self.num_failed_steps = 0
        self.step_sizes: list[int] = []
        self._random = random.Random(pressure.seed)
        self._tick = 0

    def run(self, max_ticks: int = 5000) -> None:
        last = max((max(prompt.arrives_at, prompt.cancelled_at or 0) for prompt in self.pressure.prompts), default=0)
        while self._tick <= last or not self.batcher.is_idle:
            self._arrive_and_cancel()
            for tick, name in self.pressure.policies:
                if tick == self._tick:
                    self.batcher.set_policy(PolicySpec(name).make())
            self._grant()
            self._step()
            self._tick += 1
            self.clock.advance(TICK_S)
            assert self._tick < max_ticks, "a sequence never ends"
        self._take_back(self.batcher.pool.take_all_free())

    def key_of(self, index: int) -> SequenceKey:
        return SequenceKey(f"{index:032x}", Attempt())

    def params_of(self, index: int) -> SequenceParams:
        prompt = self.pressure.prompts[index]
        return SequenceParams(
            request_id=f"{index:032x}",
            attempt=Attempt(),
            gateway_id="gateway-0-00000000",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(temperature=0.0, seed=prompt.seed),
            stop=StopRules(prompt.max_tokens),
            num_reserved_pages=100,
            traceparent="",
            scheduling=SchedulingParams(
                prompt.lane_priority, prompt.rank, prompt.itl_target_ms, prompt.predicted_output_tokens
            ),
            prefix_seed=prompt.prefix_seed,
        )

    def _make_swap_file(self) -> SwapFile | None:
        num_slots = self.pressure.preemption.num_swap_slots
        page_bytes = self.runner.pages.shape[1]
        return SwapFile(Path(tempfile.gettempdir()), page_bytes, num_slots) if num_slots else None

    def _arrive_and_cancel(self) -> None:
        for index, prompt in enumerate(self.pressure.prompts):
            if prompt.arrives_at == self._tick:
                self.outcomes[self.key_of(index)] = Outcome()
                self.batcher.add(Arrival(self.params_of(index)))
            if prompt.cancelled_at == self._tick and prompt.arrives_at <= self._tick:
                self.batcher.cancel(self.key_of(index))

    def _step(self) -> None:
        plan = self.batcher.decide(self.clock.now_s())
        if plan is not None:
            assert plan.num_tokens <= self.batcher.limits.max_num_batched_tokens
            assert len(plan.chunks) <= self.batcher.limits.max_num_seqs
            self.step_sizes.append(len(plan.chunks))
            if self._random.random() < self.pressure.spoil_rate and plan.swap.ins and self.swap_file is not None:
                self.swap_file.slots[self._random.choice(plan.swap.ins).swap_slot, 0] ^= 1
            if self._random.random() < self.pressure.failure_rate:
                self.num_failed_steps += 1
                self.batcher.fail_step(plan, Failure(FailureReason.INTERNAL, "on purpose"))
            elif self.swap_file is not None:
                mover = PageSwapper(HostPages(self.runner.pages), self.swap_file)
                self.batcher.record(plan, swapping_runner(self.runner, mover).run(plan), self._ended_at_s())
            else:
                assert not plan.swap
                self.batcher.record(plan, self.runner.run(plan), self._ended_at_s())
        for event in self.batcher.take_events():
            self._see(event)
        self._take_back(self.batcher.take_surplus())
        assert self.batcher.check_integrity() == ()

    def _ended_at_s(self) -> float:
        return self.clock.now_s() + TICK_S

    def _grant(self) -> None:
        wanted = self.batcher.wanted()
        if wanted is None or self._random.random() < self.pressure.refusal_rate:
            return
        for num_pages in (wanted.num_pages, wanted.least_pages):
            if 0 < num_pages <= len(self.free_pages):
                self.batcher.pool.give(PageBundle(tuple(self.free_pages.pop() for _ in range(num_pages))))
                return

    def _take_back(self, bundle: PageBundle) -> None:
        pages = bundle.all_page_ids
        assert self.free_pages.isdisjoint(pages)
        assert len(set(pages)) == len(pages)
        self.runner.spoil(pages)
        self.free_pages.update(pages)
        if bundle.slots:
            self.batcher.pool.give(PageBundle((), bundle.slots))

    def _see(self, event: Event) -> None:
        match event:
            case TokenSampled(key, index, token_id):
                assert index == len(self.outcomes[key].token_ids)
                self.outcomes[key].token_ids.append(token_id)
            case SequenceEnded(key):
                self.outcomes[key].ends.append(event)
            case _:
                pass
