"""The engine's thread: its inbox, its sleep, what wakes it and its end. What a turn does is tested in `test_core`."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.clock import SystemClock
from weir.core.cost import StepCost
from weir.core.life import FinishReason
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.loop import EngineLoop, InboxFull, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    EngineReport,
    Event,
    GivePages,
    HandOffReady,
    PageBundle,
    SequenceEnded,
    SequenceKey,
    SetCost,
    SetPolicy,
    TokenSampled,
)
from weir.engine.plan import StepPlan
from weir.policy.registry import PolicySpec
from weir.policy.seams import StepShare, StepView
from weir.testing.runner import HashRunner

TIMEOUT_S = 5.0
NUM_PAGES = 40
ALL = PageBundle(tuple(range(NUM_PAGES)), tuple(range(8)))


class Engine:
    """An engine in its thread, and everything that it reported."""

    def __init__(
        self,
        on_run: Callable[[StepPlan], None] | None = None,
        settings: LoopSettings | None = None,
        running: RunningSettings | None = None,
    ) -> None:
        """A prefill engine, or with `running` one that serves alone."""
        self.runner = HashRunner(NUM_PAGES, VOCAB_SIZE, on_run)
        self.reports: queue.Queue[EngineReport] = queue.Queue()
        self.seen: list[EngineReport] = []
        pool, open_log = PagePool(watermark_pages=0, watermark_slots=0), Records(NUM_PAGES, 8).open
        self.batcher = (
            PrefillBatcher(limits(), pool, open_log)
            if running is None
            else RunningBatcher(limits(), pool, open_log, running)
        )
        self.loop = EngineLoop(
            self.batcher, self.runner, self.reports.put, settings or LoopSettings(64, linger_s=0.05), SystemClock()
        )

    def wait_for(self, condition: Callable[[EngineReport], bool]) -> EngineReport:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            report = self.reports.get(timeout=max(0.01, deadline_s - time.monotonic()))
            self.seen.append(report)
            if condition(report):
                return report

    def wait_for_ends(self, num_ends: int) -> list[SequenceEnded]:
        """Meanwhile the surplus comes back, as from whoever owns the arena."""

        def give_back(report: EngineReport) -> bool:
            if report.surplus:
                self.loop.post(GivePages(PageBundle(report.surplus.all_page_ids, report.surplus.slots)))
            return len(self.ends) >= num_ends

        self.wait_for(give_back)
        return self.ends

    @property
    def ends(self) -> list[SequenceEnded]:
        return [event for event in self.events if isinstance(event, SequenceEnded)]

    @property
    def events(self) -> list[Event]:
        return [event for report in self.seen for event in report.events]

    @property
    def returned_pages(self) -> set[int]:
        return {page_id for report in self.seen for page_id in report.surplus.all_page_ids}


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        assert engine.loop.stop(TIMEOUT_S)


def started(engines: list[Engine], engine: Engine) -> Engine:
    engines.append(engine)
    engine.loop.start(lambda: None).result(TIMEOUT_S)
    return engine


def prompt(index: int, num_tokens: int = 20, max_tokens: int = 1) -> AddSequence:
    return AddSequence(Arrival(params(tuple(range(num_tokens)), index, max_tokens=max_tokens)))


def has_ended(report: EngineReport) -> bool:
    return any(isinstance(event, SequenceEnded) for event in report.events)


def test_it_asks_for_pages_runs_and_returns_all_of_them_when_idle(engines: list[Engine]) -> None:
    engine = started(engines, Engine())
    engine.loop.post(prompt(1))
    wanted = engine.wait_for(lambda report: report.wanted is not None).wanted
    assert wanted is not None
    assert (wanted.num_pages, wanted.num_slots) == (2, 1)
    engine.loop.post(GivePages(PageBundle((4, 5, 6), (3,))))
    engine.wait_for(has_ended)
    free = engine.wait_for(lambda report: bool(report.surplus.slots)).surplus
    assert free.slots == (3,)
    assert engine.returned_pages == {4, 5, 6}
    assert engine.seen[-1].load.num_held_pages == 0
    assert engine.seen[-1].integrity_errors == ()


def test_an_idle_engine_sleeps(engines: list[Engine]) -> None:
    engine = started(engines, Engine())
    engine.loop.post(GivePages(ALL))
    engine.wait_for(lambda report: bool(report.surplus))
    before = time.process_time()
    time.sleep(0.3)
    assert engine.reports.empty()
    assert time.process_time() - before < 0.1


def test_an_engine_whose_steps_keep_failing_gives_up_and_ends_what_it_has(engines: list[Engine]) -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError(f"step {plan.step}")

    engine = Engine(fail, LoopSettings(64, max_failed_steps=2))
    engine.loop.post(GivePages(ALL))
    for index in range(10):
        engine.loop.post(prompt(index, num_tokens=60))
    started(engines, engine)
    report = engine.wait_for(lambda report: bool(report.fatal) and report.load.num_held_pages == 0)
    assert "2 steps failed in a row" in report.fatal
    ended = [event.key for event in engine.events if isinstance(event, SequenceEnded)]
    assert sorted(ended) == [SequenceKey(f"{index:032x}", params((1,)).attempt) for index in range(10)]
    assert engine.returned_pages == set(ALL.page_ids)


def test_a_prompt_is_cancelled_between_two_chunks(engines: list[Engine]) -> None:
    in_step, go_on = threading.Event(), threading.Event()

    def wait(plan: StepPlan) -> None:
        in_step.set()
        assert go_on.wait(TIMEOUT_S)

    engine = started(engines, Engine(wait))
    engine.loop.post(GivePages(ALL))
    engine.loop.post(prompt(1, num_tokens=100))
    assert in_step.wait(TIMEOUT_S)
    engine.loop.post(CancelSequence(SequenceKey(f"{1:032x}", params((1,)).attempt)))
    go_on.set()
    engine.wait_for(has_ended)
    assert not any(isinstance(event, TokenSampled | HandOffReady) for event in engine.events)
    assert engine.seen[-1].counters["prompt_tokens_computed"] == 32


def test_a_full_inbox_is_refused(engines: list[Engine]) -> None:
    engine = Engine(settings=LoopSettings(2))
    engine.loop.post(prompt(1))
    engine.loop.post(prompt(2))
    with pytest.raises(InboxFull, match="2 commands"):
        engine.loop.post(prompt(3))
    started(engines, engine)


def test_a_warm_up_that_fails_is_raised_to_whoever_started_it(engines: list[Engine]) -> None:
    engine = Engine()

    def prepare() -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        engine.loop.start(prepare).result(TIMEOUT_S)
    engines.append(engine)


def test_stopping_waits_for_the_running_step_and_returns_the_free_pages(engines: list[Engine]) -> None:
    engine = started(engines, Engine(lambda plan: time.sleep(0.2)))
    engine.loop.post(GivePages(ALL))
    engine.loop.post(prompt(1, num_tokens=100))
    engine.wait_for(lambda report: report.timing is not None)
    assert engine.loop.stop(TIMEOUT_S)
    while not engine.reports.empty():
        engine.seen.append(engine.reports.get())
    assert engine.seen[-1].load.num_free_pages == 0
    assert engine.seen[-1].load.num_used_pages > 0
    assert len(engine.returned_pages) == NUM_PAGES - engine.seen[-1].load.num_used_pages


def start(engines: list[Engine], settings: RunningSettings, num_pages: int, *arrivals: Arrival) -> Engine:
    """One that serves alone."""
    engine = Engine(running=settings)
    engine.loop.post(GivePages(PageBundle(tuple(range(num_pages)), tuple(range(8)))))
    for arrival in arrivals:
        engine.loop.post(AddSequence(arrival))
    return started(engines, engine)


def test_a_dynamic_batch_starts_when_its_window_is_over_although_nothing_comes(engines: list[Engine]) -> None:
    settings = RunningSettings(JoinSettings(Batching.DYNAMIC, window_s=0.15))
    started_at_s = time.monotonic()
    engine = start(engines, settings, 8, Arrival(params((1, 2), max_tokens=3)))
    (end,) = engine.wait_for_ends(1)
    assert end.reason is FinishReason.LENGTH
    assert time.monotonic() - started_at_s >= 0.15


class FillingBudget:
    """Decodes and prompts as far as they fit, and what it was shown."""

    def __init__(self) -> None:
        self.views: list[StepView] = []

    def plan(self, view: StepView) -> StepShare:
        self.views.append(view)
        return StepShare(range(len(view.decodes)), min(sum(view.prefills), view.max_tokens - len(view.decodes)))

    def stepped(self, duration_s: float, share: StepShare) -> None:
        assert duration_s > 0


def test_policies_and_what_steps_cost_are_taken_between_steps(engines: list[Engine]) -> None:
    arrivals = [Arrival(params((1, 2, index), index, max_tokens=40)) for index in range(4)]
    engine = start(engines, RunningSettings(), 30, *arrivals)
    budget, cost = FillingBudget(), StepCost(1.0, 2.0, 0.0, 3.0, 0.0)
    for name in ("slai", "srtf", "wait", "fcfs"):
        engine.loop.post(SetPolicy(PolicySpec(name).make()))
    engine.loop.post(SetPolicy(replace(PolicySpec("fcfs").make(), step_budget=budget)))
    engine.loop.post(SetCost(cost))
    engine.loop.post(AddSequence(Arrival(params((1, 2), 9, max_tokens=3))))
    ends = engine.wait_for_ends(5)
    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 5
    assert budget.views[-1].cost == cost
    timing = [report.timing for report in engine.seen if report.timing is not None][-1]
    assert timing.duration_s > 0
    assert timing.load.num_decodes + timing.load.num_prefill_tokens == timing.num_tokens


def test_a_timing_says_how_many_other_workers_computed_beside_its_step(engines: list[Engine]) -> None:
    engine = Engine(running=RunningSettings())
    engine.runner.mean_others = 0.5
    engine.loop.post(GivePages(ALL))
    engine.loop.post(AddSequence(Arrival(params((1, 2), max_tokens=3))))
    started(engines, engine).wait_for_ends(1)
    assert {report.timing.mean_others for report in engine.seen if report.timing is not None} == {0.5}


def test_sequences_that_all_lack_a_page_make_room_although_nothing_comes(engines: list[Engine]) -> None:
    """Two that have a page each and need three, with three in all."""
    settings = RunningSettings(preemption=PreemptionSettings(after_s=0.05))
    arrivals = [Arrival(params(tuple(range(15)), index, max_tokens=30, num_reserved_pages=3)) for index in range(2)]
    engine = start(engines, settings, 3, *arrivals)
    ends = engine.wait_for_ends(2)
    assert [(end.reason, end.failure) for end in ends] == [(FinishReason.LENGTH, None)] * 2
    assert engine.batcher.counters.preemptions >= 1
