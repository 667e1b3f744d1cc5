"""A step launched while one runs: what is decided ahead, what waits for a result first, and what is released when."""

import pytest
from tests.unit.engine.test_core import NUM_PAGES
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.clock import ManualClock
from weir.core.life import Attempt, FinishReason
from weir.core.sampling import SamplingParams
from weir.engine.batching.running import RunningBatcher
from weir.engine.loop import EngineCore, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    EngineReport,
    Event,
    GivePages,
    HandOffReady,
    HandOverSequences,
    PageBundle,
    SequenceEnded,
    SequenceKey,
    TokenSampled,
)
from weir.engine.plan import StepPlan
from weir.testing.runner import HashRunner, LaunchingHashRunner, reference_tokens

PROMPT = tuple(range(10))
GREEDY = SamplingParams(temperature=0.0)


class Core:
    """An engine that serves alone, turned by hand; the runner fails as soon as a page is released too early."""

    def __init__(self, num_pages: int = NUM_PAGES) -> None:
        self.failing: set[int] = set()
        self.runner = LaunchingHashRunner(NUM_PAGES, VOCAB_SIZE, self._fail)
        self.reports: list[EngineReport] = []
        self.batcher = RunningBatcher(
            limits(max_num_seqs=8), PagePool(watermark_pages=NUM_PAGES, watermark_slots=8), Records(NUM_PAGES, 8).open
        )
        settings = LoopSettings(64, async_scheduling=True)
        self.engine = EngineCore(self.batcher, self.runner, self._see, settings, ManualClock())
        self.engine.apply(GivePages(PageBundle(tuple(range(num_pages)), tuple(range(8)))))

    def add(
        self, index: int, *, max_tokens: int = 100, stop: tuple[int, ...] = (), sampling: SamplingParams = GREEDY
    ) -> None:
        made = params(PROMPT, index, max_tokens=max_tokens, stop_token_ids=stop, sampling=sampling)
        self.engine.apply(AddSequence(Arrival(made)))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.turn()

    def tokens(self, index: int) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenSampled) and event.key == key(index)]

    @property
    def events(self) -> list[Event]:
        return [event for report in self.reports for event in report.events]

    @property
    def ends(self) -> dict[SequenceKey, SequenceEnded]:
        return {event.key: event for event in self.events if isinstance(event, SequenceEnded)}

    @property
    def returned_pages(self) -> set[int]:
        return {page_id for report in self.reports for page_id in report.surplus.all_page_ids}

    def _see(self, report: EngineReport) -> None:
        self.reports.append(report)
        self.runner.spoil(report.surplus.all_page_ids)

    def _fail(self, plan: StepPlan) -> None:
        if plan.step in self.failing:
            raise RuntimeError("on purpose")


def key(index: int) -> SequenceKey:
    return SequenceKey(f"{index:032x}", Attempt())


def expected(num_tokens: int) -> list[int]:
    return reference_tokens(PROMPT, GREEDY, num_tokens, VOCAB_SIZE)


def test_while_all_decode_every_step_but_the_first_is_launched_ahead() -> None:
    core = Core()
    core.add(1, max_tokens=30)
    core.add(2, max_tokens=30)
    core.turn(31)
    assert core.runner.num_launched_ahead == 28, "not the prompts' step, not the first decode; none after the last"
    assert core.tokens(1) == core.tokens(2) == expected(30)
    assert core.batcher.counters.late_rows_computed == 0, "an end by length is known before"


def test_one_that_stops_has_one_row_too_many_and_keeps_its_pages_until_that_is_computed() -> None:
    core = Core()
    stop = expected(12)[11]
    first = expected(12).index(stop)
    core.add(1, stop=(stop,))
    core.add(2, max_tokens=100)
    core.turn(first + 1)
    assert core.ends[key(1)].reason is FinishReason.STOP
    assert core.returned_pages == set(), "the step that runs writes there"
    core.turn()
    assert core.batcher.counters.late_rows_computed == 1
    assert len(core.returned_pages) == 2
    assert core.tokens(1) == expected(first + 1)
    assert core.batcher.check_integrity() == ()


@pytest.mark.parametrize("command", [CancelSequence(key(1)), HandOverSequences(with_preempted=True)])
def test_what_moves_or_ends_a_sequence_waits_for_the_step_that_runs(
    command: CancelSequence | HandOverSequences,
) -> None:
    core = Core()
    core.add(1)
    core.turn(5)
    assert len(core.tokens(1)) == 5
    core.engine.apply(command)
    core.turn()
    assert core.tokens(1) == expected(6), "the token that was on its way is told first"
    match command:
        case CancelSequence():
            assert core.ends[key(1)].reason is FinishReason.CANCELLED
        case _:
            assert any(isinstance(event, HandOffReady) for event in core.events)
    assert core.batcher.check_integrity() == ()


def test_a_newcomer_joins_in_the_step_after_the_one_that_is_ahead() -> None:
    core = Core()
    core.add(1)
    core.turn(5)
    core.add(2)
    core.turn(2)
    assert len(core.tokens(2)) == 1
    core.turn(4)
    assert core.tokens(1) == expected(len(core.tokens(1)))
    assert core.tokens(2) == expected(len(core.tokens(2)))
    assert len(core.tokens(1)) == len(core.tokens(2)) + 6


def test_a_sequence_whose_penalties_need_the_unknown_token_is_not_planned_ahead() -> None:
    core = Core()
    core.add(1)
    core.add(2, sampling=SamplingParams(temperature=0.0, presence_penalty=1.0), max_tokens=5)
    core.turn(5)
    assert core.runner.num_launched_ahead == 0
    core.turn(3)
    assert core.runner.num_launched_ahead > 0, "it has ended"


def test_a_missing_page_is_left_to_a_step_that_nobody_runs_beside() -> None:
    core = Core(num_pages=1)
    core.add(1)
    core.turn(10)
    assert core.tokens(1) == expected(7), "6 positions are left in the page, and the last token needs none"
    assert core.reports[-1].wanted is not None
    core.engine.apply(GivePages(PageBundle((5,), ())))
    core.turn(3)
    assert core.tokens(1) == expected(10)


def test_a_step_that_fails_ends_its_sequences_and_the_one_ahead_of_it_is_thrown_away() -> None:
    core = Core()
    core.add(1)
    core.turn(5)
    core.failing.add(6)
    core.turn(2)
    failure = core.ends[key(1)].failure
    assert failure is not None
    assert "on purpose" in failure.message
    assert core.batcher.counters.failed_steps == 1
    assert core.batcher.counters.late_rows_computed == 0, "it lacked the token to go on from, so it failed too"
    assert core.batcher.check_integrity() == ()
    core.add(2, max_tokens=10)
    core.turn(10)
    assert core.tokens(2) == expected(10)


def test_when_it_is_closed_the_step_that_runs_is_waited_for() -> None:
    core = Core()
    core.add(1)
    core.turn(5)
    core.engine.close()
    assert core.tokens(1) == expected(6)


def test_a_runner_that_cannot_launch_is_refused() -> None:
    batcher = Core().batcher
    with pytest.raises(TypeError, match="cannot plan ahead"):
        EngineCore(batcher, HashRunner(4, VOCAB_SIZE), print, LoopSettings(4, async_scheduling=True), ManualClock())
