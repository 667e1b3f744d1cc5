"""The engine's thread: take commands, decide, run, record, report. It sleeps while there is nothing to do.

inbox (bounded) ──> [ decide ─> run ─> record ] ──> outbox(EngineReport), called in this thread
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

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
    PageBundle,
    SetCost,
    SetPolicy,
    StepTiming,
)
from weir.engine.plan import ModelRunner, StepPlan
from weir.engine.result_check import StepDefect

_log = logging.getLogger(__name__)


class InboxFull(Exception):
    """The engine has more commands waiting than its shell may send: a defect, or a stopped engine."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How the loop behaves at its edges."""

    inbox_size: int
    linger_s: float = 0.5
    """Free pages are kept this long after the last sequence has ended, then all of them are returned."""
    max_failed_steps: int = 3
    """After this many failed steps in a row the engine gives up: the next would fail too."""


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
        self._batcher = batcher
        self._runner = runner
        self._outbox = outbox
        self._settings = settings
        self._clock = clock
        self._inbox: queue.Queue[Command | None] = queue.Queue(settings.inbox_size)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._prepare: Callable[[], None] = _nothing
        self._prepared: Future[None] = Future()
        self._is_stopping = False
        self._has_worked = False
        self._num_gives = 0
        self._num_failed_in_a_row = 0
        self._fatal = ""
        self._idle_since_s: float | None = None
        self._integrity_errors: tuple[str, ...] = ()

    def start(self, prepare: Callable[[], None]) -> "Future[None]":
        """Starts the thread. The future is done when `prepare` (a warm-up, say) has run in it, or failed."""
        self._prepare = prepare
        self._thread.start()
        return self._prepared

    def post(self, command: Command) -> None:
        """From any thread. Raises InboxFull; never waits."""
        try:
            self._inbox.put_nowait(command)
        except queue.Full:
            raise InboxFull(f"{self._inbox.maxsize} commands wait for the engine") from None

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the running step; the last report has all free pages. False: it still runs."""
        self._is_stopping = True
        with contextlib.suppress(queue.Full):  # a full inbox wakes it too
            self._inbox.put_nowait(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the start
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        try:
            while not self._is_stopping and not self._fatal:
                self._take_commands()
                self._turn()
            if self._fatal:
                self._batcher.fail_all(Failure(FailureReason.INTERNAL, self._fatal))
            self._integrity_errors = self._batcher.check_integrity()
            self._report(None, self._batcher.pool.take_all_free())
        except Exception as error:  # noqa: BLE001 - the thread's boundary: logged, and the shell ends the process
            _log.exception("the engine has stopped")
            self._outbox(EngineReport(fatal=f"the engine has stopped: {type(error).__name__}: {error}"))

    def _turn(self) -> None:
        decided_at_s = self._clock.now_s()
        plan = self._batcher.decide(decided_at_s)
        # What ended has left pages, with which others may go on at once.
        self._has_worked = plan is not None or self._batcher.has_events
        if plan is None:
            self._report(None, self._take_surplus())
            return
        if self._batcher.has_events or self._batcher.wanted() is not None:
            self._report(None, self._take_surplus())  # a step can be long: pages come meanwhile, ends are told at once
        timing = self._run_step(plan, decided_at_s)
        self._report(timing, self._take_surplus())

    def _take_commands(self) -> None:
        """All that wait; blocks for the first one when the last turn had nothing to compute."""
        try:
            command = self._inbox.get_nowait() if self._has_worked else self._inbox.get(timeout=self._sleep_s())
            while True:
                if command is not None:
                    self._apply(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _sleep_s(self) -> float | None:
        """Until the first deadline; None: until a command comes."""
        deadlines = [] if self._batcher.next_deadline_s is None else [self._batcher.next_deadline_s]
        if self._idle_since_s is not None and self._batcher.pool.has_free:
            deadlines.append(self._idle_since_s + self._settings.linger_s)
        return max(0.0, min(deadlines) - self._clock.now_s()) if deadlines else None

    def _apply(self, command: Command) -> None:
        match command:
            case AddSequence(arrival):
                self._batcher.add(arrival)
            case CancelSequence(key):
                self._batcher.cancel(key)
            case FailSequence(key, failure):
                self._batcher.fail(key, failure)
            case ForgetSequence(key):
                self._batcher.forget(key)
            case FailAllSequences(failure):
                self._batcher.fail_all(failure)
            case SetPolicy(policy):
                self._batcher.set_policy(policy)
            case SetCost(cost):
                self._batcher.pace.cost = cost
            case GivePages(bundle):
                self._num_gives += 1
                self._batcher.pool.give(bundle)

    def _run_step(self, plan: StepPlan, decided_at_s: float) -> StepTiming:
        started_ns = time.time_ns()
        try:
            result = self._runner.run(plan)
            self._batcher.record(plan, result, self._clock.now_s())
            self._num_failed_in_a_row = 0
        except Exception as error:  # noqa: BLE001 - a step's boundary: its sequences fail, the engine goes on
            _log.exception("step %d failed (%d sequences)", plan.step, len(plan.chunks))
            what = str(error) if isinstance(error, StepDefect) else f"{type(error).__name__}: {error}"
            self._batcher.fail_step(Failure(FailureReason.INTERNAL, f"step {plan.step} failed: {what}"))
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= self._settings.max_failed_steps:
                self._fatal = f"{self._num_failed_in_a_row} steps failed in a row, the last with {what}"
        return StepTiming(
            plan.step,
            started_ns,
            time.time_ns(),
            len(plan.chunks),
            plan.num_tokens,
            plan.load,
            self._clock.now_s() - decided_at_s,
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
                policy=self._batcher.policy_name,
                integrity_errors=self._integrity_errors,
                fatal=self._fatal,
            )
        )


def _nothing() -> None:
    """The default preparation."""
