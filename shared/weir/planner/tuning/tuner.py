"""Moves bounds towards the SLO: one at a time, on canaries first, kept where they prove better, else taken back.

watch ── a symptom ──> trial ── better ──> check ── as good for all ──> watch
                         └─ anything else: the canaries are as the others again ──> watch
                                               check ── worse for all: the value before is kept again ──> watch
"""

import random
from dataclasses import dataclass, field

from weir.core.roles import WorkerRole
from weir.planner.tuning.observation import SideScore, TuningTick, TuningWindow, WorkerTick
from weir.planner.tuning.search import WAITING_SHARE, KnobSearch
from weir.planner.tuning.settings import Bound, TunerSettings
from weir.planner.tuning.steps import Cause, Deed, TuningStep
from weir.planner.tuning.trial import Trial, mean_score

_RELAPSE_SHARE = 0.8
"""Of the score before: below it, while requests wait, or more comes too late than did, a value is not kept."""


@dataclass(slots=True)
class _Check:
    """Of a value that was kept."""

    step: TuningStep
    before: SideScore
    scores: list[SideScore] = field(default_factory=list)
    waiting_shares: list[float] = field(default_factory=list)

    def is_relapse(self, after: SideScore, target: float) -> bool:
        """Less is done, and not since less is asked for."""
        is_missed = after.met_share < min(self.before.met_share, target)
        is_waiting = sum(self.waiting_shares) > WAITING_SHARE * len(self.waiting_shares)
        is_short = is_missed or (is_waiting and after.met_share <= self.before.met_share)
        return is_short and after.score_a_s < _RELAPSE_SHARE * self.before.score_a_s


class Tuner:
    """Whoever acts on a step says so (`begun`), or that it cannot be (`refused`); else nothing has happened."""

    def __init__(self, settings: TunerSettings, source: random.Random) -> None:
        """`source`: draws those that are compared in a window."""
        self._settings = settings
        self._source = source
        self._searches = [KnobSearch(knob, settings) for knob in settings.knobs]
        self._window = TuningWindow()
        self._num_windows = 0
        self._num_left_out = 0
        """Windows in which a change still shows."""
        self._num_trials = 0
        self._trial: Trial | None = None
        self._check: _Check | None = None

    @property
    def trial(self) -> Trial | None:
        """That is under way."""
        return self._trial

    @property
    def num_windows(self) -> int:
        """That it has seen."""
        return self._num_windows

    def look(self, tick: TuningTick) -> TuningStep | None:
        """In the order of time."""
        self._window.add(tick)
        window = None
        if self._window.span_s >= self._settings.window_s * 0.999:
            window, self._window = self._window, TuningWindow()
            self._num_windows += 1
        if self._trial is not None:
            cause = self._trial.add(tick)
            return None if cause is None else self._ended(self._trial, cause)
        if window is None:
            return None
        if self._num_left_out > 0:
            self._num_left_out -= 1
            return None
        if self._check is not None:
            return self._checked(self._check, window)
        return self._try_begin(window, tick)

    def begun(self, step: TuningStep) -> None:
        """It has been done."""
        self._window = TuningWindow()
        self._num_left_out = self._settings.settle_windows
        before, self._trial, self._check = self._trial, None, None
        if step.deed is Deed.TRY:
            self._num_trials += 1
            sides = (step.worker_ids, step.rest_ids)
            self._trial = Trial(step.knob, step.value, step.was, *sides, self._settings, self._source)
            return
        search = self._search_of(step)
        if step.cause is Cause.BETTER and before is not None:
            search.reject(step.was, self._num_windows)
            self._check = _Check(step, before.rest_score)
        elif step.cause is Cause.RELAPSE:
            search.reject(step.was, self._num_windows)
        elif step.cause is not Cause.LOST:
            search.reject(step.value, self._num_windows)

    def refused(self, step: TuningStep) -> None:
        """It cannot be: somebody else says what these workers do. No trial goes on."""
        self._trial = self._check = None
        self._window = TuningWindow()
        self._search_of(step).reject(step.value, self._num_windows)

    def lost(self) -> None:
        """Somebody else has ended the trial, which says nothing about its value."""
        self._trial = None
        self._window = TuningWindow()
        self._num_left_out = self._settings.settle_windows

    def _try_begin(self, window: TuningWindow, tick: TuningTick) -> TuningStep | None:
        for search in self._searches:
            step = self._try_propose(search, window, tick)
            if step is not None:
                return step
        return None

    def _try_propose(self, search: KnobSearch, window: TuningWindow, tick: TuningTick) -> TuningStep | None:
        knob = search.knob
        free = _free_workers(tick, knob.role, knob.bound)
        current = _common_bound(free, knob.bound)
        alike = [one.worker_id for one in free if one.bounds.get(knob.bound) == current]
        if current is None or len(alike) < 2:
            return None
        seen = window.side(alike, self._settings.slo_s(knob.role))
        found = search.try_next(current, seen, window.waiting_share, self._num_windows)
        if found is None:
            return None
        value, cause = found
        canaries = self._canaries(alike)
        rest = tuple(one for one in alike if one not in canaries)
        figures = {"met_share": seen.met_share, "waiting_share": window.waiting_share, "step_ms": seen.step_s * 1e3}
        return TuningStep(Deed.TRY, knob, value, current, cause, canaries, rest, figures)

    def _canaries(self, alike: list[str]) -> tuple[str, ...]:
        """Others each time, so that no odd worker is always the judge."""
        num = min(len(alike) - 1, max(1, int(len(alike) * self._settings.canary_share)))
        first = self._num_trials * num
        return tuple(alike[(first + index) % len(alike)] for index in range(num))

    def _ended(self, trial: Trial, cause: Cause) -> TuningStep:
        deed = Deed.KEEP if cause is Cause.BETTER else Deed.END
        return TuningStep(deed, trial.knob, trial.value, trial.was, cause, trial.canaries, trial.rest, trial.figures)

    def _checked(self, check: _Check, window: TuningWindow) -> TuningStep | None:
        kept = check.step
        check.scores.append(window.side((*kept.worker_ids, *kept.rest_ids), self._settings.slo_s(kept.knob.role)))
        check.waiting_shares.append(window.waiting_share)
        if len(check.scores) < self._settings.check_windows:
            return None
        after, before = mean_score(check.scores), check.before
        if not check.is_relapse(after, self._settings.target) or after.num_tokens < self._settings.min_tokens:
            self._check = None
            return None
        figures = {
            "score_a_s": after.score_a_s,
            "score_before_a_s": before.score_a_s,
            "met_share": after.met_share,
            "met_share_before": before.met_share,
        }
        workers = (kept.worker_ids, kept.rest_ids)
        return TuningStep(Deed.KEEP, kept.knob, kept.was, kept.value, Cause.RELAPSE, *workers, figures)

    def _search_of(self, step: TuningStep) -> KnobSearch:
        return next(search for search in self._searches if search.knob == step.knob)


def _free_workers(tick: TuningTick, role: WorkerRole, bound: Bound) -> list[WorkerTick]:
    """Of the role, by id, without those whose bound an operator has set."""
    found = [one for one in tick.workers if one.role == role and bound not in one.fixed and bound in one.bounds]
    return sorted(found, key=lambda one: one.worker_id)


def _common_bound(workers: list[WorkerTick], bound: Bound) -> int | None:
    """What most of them run under; None: there is none."""
    values = [one.bounds[bound] for one in workers]
    return max(sorted(set(values)), key=values.count) if values else None
