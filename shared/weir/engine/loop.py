"""An engine, and the thread that turns it and sleeps while there is nothing to do.

inbox (bounded) ──> [ apply ──> decide ─> run ─> record ] ──> outbox(EngineReport), called in the engine's thread
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from weir.core.clock import Clock
from weir.engine.batching.batcher import Batcher
from weir.engine.messages import (
    AddSequence,
    CancelSequence,
    Command,
    EngineReport,
    FailAllSequences,
    FailSequence,
    Failure,
    FailureReason,
    ForgetSequence,
    GivePages,
    HandOverSequences,
    PageBundle,
    ReleaseEnds,
    SetArenaSilent,
    SetBounds,
    SetCost,
    SetPolicy,
    StepTiming,
    TakeBackSequence,
)
from weir.engine.plan import LaunchingRunner, ModelRunner, StepPlan, StepResult
from weir.engine.recording import StepDefect

_log = logging.getLogger(__name__)


class InboxFull(Exception):
    """The engine has more commands waiting than its shell may send: a defect, or a stopped engine."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`inbox_size`: commands that may wait."""

    inbox_size: int
    linger_s: float = 0.5
    """Free pages are kept this long after the last sequence has ended, then all of them are returned."""
    max_failed_steps: int = 3
    """After this many failed steps in a row the engine gives up: the next would fail too."""
    async_scheduling: bool = False
    """Launches the next step while one runs (`weir.engine.batching.ahead`). The runner must be able to."""


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """`wait` until it has ended, for its result."""

    plan: StepPlan
    decided_at_s: float
    launched_ns: int
    wait: Callable[[], StepResult]


class EngineCore:
    """The engine without thread and queue: `EngineLoop` turns it, or a test by hand. Reports go to `outbox`, which must
    not call back into this object."""

    def __init__(
        self,
        batcher: Batcher,
        runner: ModelRunner,
        outbox: Callable[[EngineReport], None],
        settings: LoopSettings,
        clock: Clock,
    ) -> None:
        self._batcher = batcher
        self._runner = runner
        self._outbox = outbox
        self._settings = settings
        self._clock = clock
        self._launch: Callable[[StepPlan], Callable[[], StepResult]] | None = None
        if settings.async_scheduling:
            if not isinstance(runner, LaunchingRunner):
                raise TypeError(f"{type(runner).__name__} cannot plan ahead: it has no launch()")
            self._launch = runner.launch
        self._ahead: _LaunchedStep | None = None
        """A step that runs although nobody has waited for it yet."""
        self._ended_at_s, self._ended_ns = 0.0, 0
        self._num_gives = 0
        self._num_failed_in_a_row = 0
        self._idle_since_s: float | None = None
        self._integrity_errors: tuple[str, ...] = ()
        self.fatal = ""
        """Not empty: it has given up for this reason, and is to be closed."""

    def apply(self, command: Command) -> None:
        match command:
            case AddSequence(arrival):
                self._batcher.add(arrival)
            case ReleaseEnds(keys):
                self._batcher.kept_ends.release(keys)
            case GivePages(bundle):
                self._num_gives += 1
                self._batcher.pool.give(bundle)
            case _:
                self._finish_ahead()
                self._apply_between_steps(command)

    def _apply_between_steps(self, command: Command) -> None:
        """What ends or moves sequences, or changes the rules: not while a step runs."""
        match command:
            case CancelSequence(key):
                self._batcher.cancel(key)
            case FailSequence(key, failure):
                self._batcher.fail(key, failure)
            case ForgetSequence(key, is_adoption):
                self._batcher.forget(key, is_adoption=is_adoption)
            case HandOverSequences(with_preempted):
                self._batcher.hand_over(with_preempted=with_preempted)
            case TakeBackSequence(key):
                self._batcher.take_back(key)
            case FailAllSequences(failure):
                self._batcher.fail_all(failure)
            case _:
                self._apply_setting(command)

    def _apply_setting(self, command: Command) -> None:
        match command:
            case SetArenaSilent(is_silent):
                self._batcher.set_arena_silent(is_silent, self._clock.now_s())
            case SetPolicy(policy):
                self._batcher.set_policy(policy)
            case SetCost(cost):
                self._batcher.set_cost(cost)
            case SetBounds():
                self._batcher.set_bounds(command)
            case _:
                raise AssertionError(f"{type(command).__name__} is no command of an engine")

    def turn(self) -> bool:
        """One step, if anything can be computed. False: nothing is to be done before a command or `next_deadline_s`."""
        if self._ahead is not None:
            self._end_step(self._ahead)
            return True
        decided_at_s = self._clock.now_s()
        plan = self._batcher.decide(decided_at_s)
        # What ended has left pages, with which others may go on at once.
        has_worked = plan is not None or self._batcher.has_events
        if plan is None:
            self._report(None, self._take_surplus())
            return has_worked
        self._idle_since_s = None  # also of a sequence that comes and ends in one turn
        if self._batcher.has_events or self._batcher.wanted() is not None:
            self._report(None, self._take_surplus())  # a step can be long: pages come meanwhile, ends are out at once
        self._end_step(self._launched(plan, decided_at_s))
        return has_worked

    @property
    def next_deadline_s(self) -> float | None:
        """When `turn` has something to do although no command has come."""
        deadlines = [] if self._batcher.next_deadline_s is None else [self._batcher.next_deadline_s]
        if self._idle_since_s is not None and self._batcher.pool.has_free:
            deadlines.append(self._idle_since_s + self._settings.linger_s)
        return min(deadlines, default=None)

    def close(self) -> None:
        """The last report, with all free pages. No end is kept any longer: that was for a death without a close."""
        self._finish_ahead()
        if self.fatal:
            self._batcher.fail_all(Failure(FailureReason.INTERNAL, self.fatal))
        self._batcher.kept_ends.release_all()
        self._integrity_errors = self._batcher.check_integrity()
        self._report(None, self._batcher.pool.take_all_free())

    def _launched(self, plan: StepPlan, decided_at_s: float) -> _LaunchedStep:
        """Without `launch` it begins when it is waited for."""
        launched_ns = time.time_ns()
        wait: Callable[[], StepResult] = partial(self._runner.run, plan)
        if self._launch is not None:
            try:
                wait = self._launch(plan)
            except Exception as error:  # noqa: BLE001 - raised again where the step's end is awaited
                wait = partial(_raise, error)
        return _LaunchedStep(plan, decided_at_s, launched_ns, wait)

    def _finish_ahead(self) -> None:
        """Nothing runs when this returns."""
        if self._ahead is not None:
            step, self._ahead = self._ahead, None
            self._report(self._record(step), self._take_surplus())

    def _end_step(self, step: _LaunchedStep) -> None:
        """While it runs, the step after it is launched, if that can be planned already."""
        self._ahead = None
        if self._launch is not None:
            now_s = self._clock.now_s()
            ahead = self._batcher.decide_ahead(step.plan, now_s)
            self._ahead = None if ahead is None else self._launched(ahead, now_s)
        self._report(self._record(step), self._take_surplus())

    def _throw_ahead_away(self, failure: Failure) -> None:
        """It goes on from tokens that there are not."""
        if self._ahead is None:
            return
        with contextlib.suppress(Exception):  # whatever it comes to, nobody is there to be told
            self._ahead.wait()
        self._batcher.drop_step(self._ahead.plan, failure)
        self._ahead = None

    def _record(self, step: _LaunchedStep) -> StepTiming:
        plan, mean_others = step.plan, 0.0
        try:
            result = step.wait()
            mean_others = result.mean_others
            self._batcher.record(plan, result, self._clock.now_s())
            self._num_failed_in_a_row = 0
        except Exception as error:  # noqa: BLE001 - a step's boundary: its sequences fail, the engine goes on
            _log.exception("step %d failed (%d sequences)", plan.step, len(plan.chunks))
            what = str(error) if isinstance(error, StepDefect) else f"{type(error).__name__}: {error}"
            failure = Failure(FailureReason.INTERNAL, f"step {plan.step} failed: {what}")
            self._batcher.fail_step(plan, failure)
            self._throw_ahead_away(failure)
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= self._settings.max_failed_steps:
                self.fatal = f"{self._num_failed_in_a_row} steps failed in a row, the last with {what}"
        began_at_s, began_ns = max(step.decided_at_s, self._ended_at_s), max(step.launched_ns, self._ended_ns)
        self._ended_at_s, self._ended_ns = self._clock.now_s(), time.time_ns()
        return StepTiming(
            plan.step,
            began_ns,
            self._ended_ns,
            len(plan.chunks),
            plan.num_tokens,
            plan.load,
            self._ended_at_s - began_at_s,
            mean_others,
        )

    def _take_surplus(self) -> PageBundle:
        now_s = self._clock.now_s()
        if not self._batcher.is_idle:
            self._idle_since_s = None
            return self._batcher.take_surplus()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
            self._integrity_errors = self._batcher.check_integrity()
        if now_s < self._idle_since_s + self._settings.linger_s:
            return self._batcher.pool.take_used()
        return self._batcher.pool.take_all_free()

    def _report(self, timing: StepTiming | None, surplus: PageBundle) -> None:
        self._outbox(
            EngineReport(
                events=self._batcher.take_events(),
                timing=timing,
                wanted=self._batcher.wanted(),
                num_gives=self._num_gives,
                surplus=surplus,
                load=self._batcher.load,
                counters=self._batcher.counters.snapshot(),
                integrity_errors=self._integrity_errors,
                fatal=self.fatal,
            )
        )


def _raise(error: Exception) -> StepResult:
    raise error


class EngineLoop:
    """Owns the thread. `outbox` must not block, and must not call back into this object but by `post`."""

    def __init__(
        self,
        batcher: Batcher,
        runner: ModelRunner,
        outbox: Callable[[EngineReport], None],
        settings: LoopSettings,
        clock: Clock,
    ) -> None:
        self._core = EngineCore(batcher, runner, outbox, settings, clock)
        self._outbox = outbox
        self._clock = clock
        self._inbox: queue.Queue[Command | None] = queue.Queue(settings.inbox_size)
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def start(self, prepare: Callable[[], None]) -> "Future[None]":
        """Starts the thread. The future is done when `prepare` (a warm-up, say) has run in it, or failed."""
        prepared: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(prepare, prepared), name="engine", daemon=True)
        self._thread.start()
        return prepared

    def post(self, command: Command) -> None:
        """From any thread. Raises InboxFull; never waits."""
        try:
            self._inbox.put_nowait(command)
        except queue.Full:
            raise InboxFull(f"{self._inbox.maxsize} commands wait for the engine") from None

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the running step; the last report has all free pages. False: it still runs."""
        self._is_stopping = True
        if self._thread is None:
            return True
        with contextlib.suppress(queue.Full):  # a full inbox wakes it too
            self._inbox.put_nowait(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, prepare: Callable[[], None], prepared: "Future[None]") -> None:
        try:
            prepare()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the start
            prepared.set_exception(error)
            return
        prepared.set_result(None)
        try:
            has_worked = False
            while not self._is_stopping and not self._core.fatal:
                self._take_commands(wait=not has_worked)
                has_worked = self._core.turn()
            self._core.close()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: logged, and the shell ends the process
            _log.exception("the engine has stopped")
            self._outbox(EngineReport(fatal=f"the engine has stopped: {type(error).__name__}: {error}"))

    def _take_commands(self, *, wait: bool) -> None:
        """All that are there; `wait`: for the first of them, or until the engine's next deadline."""
        try:
            command = self._inbox.get(timeout=self._wait_s()) if wait else self._inbox.get_nowait()
            while True:
                if command is not None:
                    self._core.apply(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _wait_s(self) -> float | None:
        """None: for ever."""
        deadline_s = self._core.next_deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._clock.now_s())
