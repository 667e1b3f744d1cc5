"""An engine turned by hand, with a clock that stands still: what it does with work, with defects, and when idle."""

from collections.abc import Callable

import pytest
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.clock import ManualClock
from weir.core.life import FinishReason
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.stall_clock import MAX_SILENCE_S
from weir.engine.loop import EngineCore, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    AddSequence,
    Arrival,
    EngineReport,
    Event,
    FailureReason,
    GivePages,
    PageBundle,
    SequenceEnded,
    SequenceKey,
    SetArenaSilent,
)
from weir.engine.plan import StepPlan, StepResult
from weir.testing.runner import HashRunner

NUM_PAGES = 40
ALL = PageBundle(tuple(range(NUM_PAGES)), tuple(range(8)))
LINGER_S = 0.5


class Core:
    """A prefill engine, and everything that it reported."""

    def __init__(self, on_run: Callable[[StepPlan], None] | None = None, max_failed_steps: int = 3) -> None:
        self.runner = HashRunner(NUM_PAGES, VOCAB_SIZE, on_run)
        self.clock = ManualClock()
        self.reports: list[EngineReport] = []
        pool = PagePool(watermark_pages=0, watermark_slots=0)
        self.batcher = PrefillBatcher(limits(), pool, Records(NUM_PAGES, 8).open)
        settings = LoopSettings(64, LINGER_S, max_failed_steps)
        self.engine = EngineCore(self.batcher, self.runner, self.reports.append, settings, self.clock)

    def add(self, index: int, num_tokens: int = 20) -> None:
        self.engine.apply(AddSequence(Arrival(params(tuple(range(num_tokens)), index, max_tokens=1))))

    @property
    def ends(self) -> list[SequenceEnded]:
        events: list[Event] = [event for report in self.reports for event in report.events]
        return [event for event in events if isinstance(event, SequenceEnded)]

    @property
    def returned_pages(self) -> set[int]:
        return {page_id for report in self.reports for page_id in report.surplus.all_page_ids}


def test_it_asks_for_pages_and_computes_when_they_are_there() -> None:
    core = Core()
    core.add(1)
    assert not core.engine.turn(), "there are no pages"
    wanted = core.reports[-1].wanted
    assert wanted is not None
    assert (wanted.num_pages, wanted.num_slots) == (2, 1)
    core.engine.apply(GivePages(PageBundle((4, 5), (3,))))
    assert core.engine.turn()
    assert core.reports[-1].timing is not None
    assert core.reports[-1].num_gives == 1
    assert [end.reason for end in core.ends] == [FinishReason.LENGTH]


def test_free_pages_stay_for_a_while_after_the_last_sequence_and_are_then_returned() -> None:
    core = Core()
    core.engine.apply(GivePages(PageBundle((4, 5, 6), (3,))))
    core.add(1)
    assert core.engine.turn()
    assert len(core.returned_pages) == 2, "those that it used: the arena knows whether they are a prefix"
    assert core.engine.next_deadline_s == LINGER_S
    core.clock.advance(LINGER_S - 0.1)
    assert not core.engine.turn()
    assert len(core.returned_pages) == 2
    core.clock.advance(0.2)
    assert not core.engine.turn()
    assert core.reports[-1].surplus.slots == (3,)
    assert core.returned_pages == {4, 5, 6}
    assert core.reports[-1].integrity_errors == ()
    assert core.engine.next_deadline_s is None, "there is nothing left to do"


def test_work_that_comes_within_that_while_finds_the_pages_still_there() -> None:
    core = Core()
    core.engine.apply(GivePages(ALL))
    core.add(1)
    core.engine.turn()
    core.clock.advance(LINGER_S - 0.1)
    core.add(2)
    core.engine.turn()
    assert len(core.ends) == 2
    assert core.engine.next_deadline_s == pytest.approx(2 * LINGER_S - 0.1), "counted from the last end"


def test_a_step_that_raises_fails_its_sequences_and_no_others() -> None:
    def raise_once(plan: StepPlan) -> None:
        if plan.step == 1:
            raise ZeroDivisionError("on purpose")

    core = Core(raise_once)
    core.engine.apply(GivePages(ALL))
    core.add(1)
    core.engine.turn()
    core.add(2)
    core.engine.turn()
    failed, finished = core.ends
    assert failed.failure is not None
    assert failed.failure.reason is FailureReason.INTERNAL
    assert "ZeroDivisionError: on purpose" in failed.failure.message
    assert (finished.key.request_id, finished.reason) == (f"{2:032x}", FinishReason.LENGTH)


def test_a_runner_that_forgets_a_token_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    monkeypatch.setattr(core.runner, "run", lambda plan: StepResult({}))
    core.engine.apply(GivePages(ALL))
    core.add(1)
    core.engine.turn()
    (end,) = core.ends
    assert end.failure is not None
    assert "sampled None" in end.failure.message


def test_an_engine_whose_steps_keep_failing_gives_up_and_ends_what_it_has() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError(f"step {plan.step}")

    core = Core(fail, max_failed_steps=2)
    core.engine.apply(GivePages(ALL))
    for index in range(10):
        core.add(index, num_tokens=60)
    core.engine.turn()
    assert core.engine.fatal == ""
    core.engine.turn()
    assert "2 steps failed in a row" in core.engine.fatal
    core.engine.close()
    assert core.reports[-1].fatal == core.engine.fatal
    assert core.reports[-1].load.num_held_pages == 0
    assert sorted(end.key for end in core.ends) == [
        SequenceKey(f"{index:032x}", params((1,)).attempt) for index in range(10)
    ]
    assert core.returned_pages == set(ALL.page_ids)


def test_what_a_waiting_prompt_lacks_is_asked_for_before_a_long_step() -> None:
    reports_before_a_step: list[int] = []
    core = Core(lambda plan: reports_before_a_step.append(len(core.reports)))
    core.engine.apply(GivePages(PageBundle((0, 1), (0,))))
    core.add(1)
    core.add(2)
    core.engine.turn()
    assert reports_before_a_step == [1]
    assert core.reports[0].wanted is not None
    assert core.reports[0].timing is None


def test_while_the_arena_does_not_answer_nobody_waits_too_long_for_it() -> None:
    """Of the two seconds that a sequence may wait, one has passed before, and the other passes after."""
    core = Core()
    core.add(1)
    core.engine.turn()
    core.clock.advance(1.0)
    core.engine.apply(SetArenaSilent(True))
    core.clock.advance(30.0)
    core.add(2)
    core.engine.turn()
    core.clock.advance(30.0)
    core.engine.turn()
    assert core.ends == []
    assert core.engine.next_deadline_s == pytest.approx(1.0 + MAX_SILENCE_S + 1.0)

    core.engine.apply(SetArenaSilent(False))
    assert core.engine.next_deadline_s == pytest.approx(core.clock.now_s() + 1.0)
    core.engine.apply(SetArenaSilent(False))
    core.clock.advance(0.9)
    core.engine.turn()
    assert core.ends == []
    core.clock.advance(0.2)
    core.engine.turn()
    assert [end.key.request_id for end in core.ends] == [f"{1:032x}"]


def test_an_arena_that_never_answers_is_not_waited_for_without_end() -> None:
    core = Core()
    core.add(1)
    core.engine.turn()
    core.engine.apply(SetArenaSilent(True))
    core.clock.advance(MAX_SILENCE_S + 1.9)
    core.engine.turn()
    assert core.ends == []
    core.clock.advance(0.2)
    core.engine.turn()
    assert [end.failure.reason for end in core.ends if end.failure is not None] == [FailureReason.NO_CAPACITY]
