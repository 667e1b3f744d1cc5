"""The engine's thread: its inbox, its sleep and its end. What a turn does is tested without one, in `test_core`."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.clock import SystemClock
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.loop import EngineLoop, InboxFull, LoopSettings
from weir.engine.memory.pages import PagePool
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
    TokenSampled,
)
from weir.engine.plan import StepPlan
from weir.testing.runner import HashRunner

TIMEOUT_S = 5.0
NUM_PAGES = 40
ALL = PageBundle(tuple(range(NUM_PAGES)), tuple(range(8)))


class Engine:
    """A prefill engine in its thread, and everything that it reported."""

    def __init__(self, on_run: Callable[[StepPlan], None] | None = None, settings: LoopSettings | None = None) -> None:
        self.runner = HashRunner(NUM_PAGES, VOCAB_SIZE, on_run)
        self.reports: queue.Queue[EngineReport] = queue.Queue()
        self.seen: list[EngineReport] = []
        pool = PagePool(reserve_pages=0, reserve_slots=0)
        batcher = PrefillBatcher(limits(), pool, Records(NUM_PAGES, 8).open)
        self.loop = EngineLoop(
            batcher, self.runner, self.reports.put, settings or LoopSettings(64, linger_s=0.05), SystemClock()
        )

    def wait_for(self, condition: Callable[[EngineReport], bool]) -> EngineReport:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            report = self.reports.get(timeout=max(0.01, deadline_s - time.monotonic()))
            self.seen.append(report)
            if condition(report):
                return report

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
    assert len(engine.returned_pages) == NUM_PAGES - 7
