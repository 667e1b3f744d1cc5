"""The engine's thread around the running batch: it wakes by itself when a window or a wait is over."""

import queue
import time
from collections.abc import Iterator

import pytest
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.clock import SystemClock
from weir.core.life import FinishReason
from weir.engine.batching.joining import Batching, JoinSettings
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.loop import EngineLoop, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.messages import (
    AddSequence,
    Arrival,
    EngineReport,
    GivePages,
    PageBundle,
    SequenceEnded,
    SetPolicy,
    StepTiming,
)
from weir.policy.registry import PolicySpec
from weir.testing.runner import HashRunner

TIMEOUT_S = 10.0
NUM_PAGES = 40


class Engine:
    """A local engine in its thread, and what it reports."""

    def __init__(self, settings: RunningSettings) -> None:
        self.reports: queue.Queue[EngineReport] = queue.Queue()
        self.last_report = EngineReport()
        self.last_timing: StepTiming | None = None
        self.batcher = RunningBatcher(
            limits(), PagePool(reserve_pages=0, reserve_slots=0), Records(NUM_PAGES, 8).open, settings
        )
        runner = HashRunner(NUM_PAGES, VOCAB_SIZE)
        self.loop = EngineLoop(self.batcher, runner, self.reports.put, LoopSettings(64), SystemClock())

    def wait_for_ends(self, num_ends: int) -> list[SequenceEnded]:
        ends: list[SequenceEnded] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(ends) < num_ends:
            report = self.reports.get(timeout=max(0.01, deadline_s - time.monotonic()))
            self.last_report, self.last_timing = report, report.timing or self.last_timing
            ends += [event for event in report.events if isinstance(event, SequenceEnded)]
            if report.surplus:  # whoever owns the arena would do so
                pages = [*report.surplus.page_ids, *(page for used in report.surplus.used for page in used.page_ids)]
                self.loop.post(GivePages(PageBundle(tuple(pages), report.surplus.slots)))
        return ends


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        assert engine.loop.stop(TIMEOUT_S)


def start(engines: list[Engine], settings: RunningSettings, num_pages: int, *arrivals: Arrival) -> Engine:
    engine = Engine(settings)
    engines.append(engine)
    engine.loop.post(GivePages(PageBundle(tuple(range(num_pages)), tuple(range(8)))))
    for arrival in arrivals:
        engine.loop.post(AddSequence(arrival))
    engine.loop.start(lambda: None).result(TIMEOUT_S)
    return engine


def test_a_dynamic_batch_starts_when_its_window_is_over_although_nothing_comes(engines: list[Engine]) -> None:
    settings = RunningSettings(JoinSettings(Batching.DYNAMIC, window_s=0.15))
    started_at_s = time.monotonic()
    engine = start(engines, settings, 8, Arrival(params((1, 2), max_tokens=3)))
    (end,) = engine.wait_for_ends(1)
    assert end.reason is FinishReason.LENGTH
    assert time.monotonic() - started_at_s >= 0.15


def test_a_policy_is_taken_between_steps_and_named_in_reports(engines: list[Engine]) -> None:
    arrivals = [Arrival(params((1, 2, index), index, max_tokens=40)) for index in range(4)]
    engine = start(engines, RunningSettings(), 30, *arrivals)
    names = ("slai", "srtf", "wait", "fcfs")
    for name in names:
        engine.loop.post(SetPolicy(PolicySpec(name).make()))
    ends = engine.wait_for_ends(4)
    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 4
    assert engine.last_report.policy == "fcfs"
    timing = engine.last_timing
    assert timing is not None
    assert timing.duration_s > 0
    assert timing.load.num_decodes + timing.load.num_prefill_tokens == timing.num_tokens


def test_sequences_that_all_lack_a_page_make_room_although_nothing_comes(engines: list[Engine]) -> None:
    """Two that have a page each and need three, with three in all."""
    settings = RunningSettings(preemption=PreemptionSettings(after_s=0.05))
    arrivals = [Arrival(params(tuple(range(15)), index, max_tokens=30, num_reserved_pages=3)) for index in range(2)]
    engine = start(engines, settings, 3, *arrivals)
    ends = engine.wait_for_ends(2)
    assert [(end.reason, end.failure) for end in ends] == [(FinishReason.LENGTH, None)] * 2
    assert engine.batcher.counters.preemptions >= 1
