"""One value of a bound on canaries, judged window by window beside the rest."""

import random
from collections.abc import Mapping

from weir.planner.tuning.evidence import SignedEvidence
from weir.planner.tuning.observation import SideScore, TuningTick, TuningWindow, relative_difference
from weir.planner.tuning.settings import Knob, TunerSettings
from weir.planner.tuning.steps import Cause

_MOST_SETTLING = 5
"""Times the windows that settling takes at least."""
_HARM_SHARE = 0.5
_HARM_WINDOWS = 2
_MOST_SILENT = 3
"""Times the windows that a trial may have: so many may pass with too few tokens to say anything."""


class Trial:
    """`was`: what the rest run under. `source`: draws who is compared."""

    def __init__(
        self,
        knob: Knob,
        value: int,
        was: int,
        canaries: tuple[str, ...],
        rest: tuple[str, ...],
        settings: TunerSettings,
        source: random.Random,
    ) -> None:
        self.knob = knob
        self.value = value
        self.was = was
        self.canaries = canaries
        self.rest = rest
        self._settings = settings
        self._source = source
        self._evidence = SignedEvidence(settings.max_error)
        self._window = TuningWindow()
        self._num_windows = 0
        self._num_settling = 0
        self._is_settled = False
        self._num_harmed = 0
        self._own: list[SideScore] = []
        self._others: list[SideScore] = []

    def add(self, tick: TuningTick) -> Cause | None:
        """None: it goes on."""
        if not self._is_in_force(tick):
            return Cause.LOST
        self._window.add(tick)
        if self._window.span_s < self._settings.window_s * 0.999:
            return None
        window, self._window = self._window, TuningWindow()
        if not self._is_settled:
            self._settle(tick)
            return None
        return self._judge(window)

    @property
    def rest_score(self) -> SideScore:
        """What was normal meanwhile: the mean of the windows."""
        return mean_score(self._others)

    @property
    def figures(self) -> Mapping[str, float]:
        own, others = mean_score(self._own), mean_score(self._others)
        return {
            "canary_score_a_s": own.score_a_s,
            "rest_score_a_s": others.score_a_s,
            "canary_tokens_a_s": own.tokens_a_s,
            "rest_tokens_a_s": others.tokens_a_s,
            "canary_step_ms": own.step_s * 1e3,
            "rest_step_ms": others.step_s * 1e3,
            "windows": float(self._evidence.num_windows),
            "evidence": max(self._evidence.for_better, self._evidence.for_worse),
            "evidence_needed": self._evidence.needed,
        }

    def _is_in_force(self, tick: TuningTick) -> bool:
        """All of both sides serve, the rest as before, and once settled the canaries run under the value; a bound takes
        a moment to come to them."""
        bounds = {one.worker_id: one.bounds.get(self.knob.bound) for one in tick.workers}
        if any(worker_id not in bounds for worker_id in (*self.canaries, *self.rest)):
            return False
        fixed = {one.worker_id for one in tick.workers if self.knob.bound in one.fixed}
        if not fixed.isdisjoint((*self.canaries, *self.rest)):
            return False
        if any(bounds[worker_id] != self.was for worker_id in self.rest):
            return False
        return not self._is_settled or all(bounds[worker_id] == self.value for worker_id in self.canaries)

    def _settle(self, tick: TuningTick) -> None:
        """A lower bound ends nothing that runs: until it has ended, a canary is not what it is to be."""
        self._num_settling += 1
        canaries = [one for one in tick.workers if one.worker_id in self.canaries]
        is_under = all(one.bounds.get(self.knob.bound) == self.value for one in canaries)
        if self.knob.bound == "max_num_seqs":
            is_under = is_under and all(one.num_running <= self.value for one in canaries)
        at_least, at_most = self._settings.settle_windows, _MOST_SETTLING * self._settings.settle_windows
        self._is_settled = self._num_settling >= at_most or (is_under and self._num_settling >= at_least)

    def _judge(self, window: TuningWindow) -> Cause | None:
        self._num_windows += 1
        slo_s = self._settings.slo_s(self.knob.role)
        one, other = self._compared(window, slo_s)
        if min(one.num_tokens, other.num_tokens) < self._settings.min_tokens:
            return Cause.UNDECIDED if self._num_windows >= _MOST_SILENT * self._settings.max_windows else None
        own, others = window.side(self.canaries, slo_s), window.side(self.rest, slo_s)
        self._own.append(own)
        self._others.append(others)
        self._evidence.add(relative_difference(one.score_a_s, other.score_a_s))
        is_harmed = own.score_a_s < _HARM_SHARE * others.score_a_s
        self._num_harmed = self._num_harmed + 1 if is_harmed else 0
        match self._evidence.verdict:
            case "better":
                return Cause.BETTER
            case "worse":
                return Cause.WORSE
            case _:
                if self._num_harmed >= _HARM_WINDOWS:
                    return Cause.HARM
                return Cause.UNDECIDED if self._evidence.num_windows >= self._settings.max_windows else None

    def _compared(self, window: TuningWindow, slo_s: float) -> tuple[SideScore, SideScore]:
        """As many canaries as others: beside the mean of more of them, one that stalls now and then would more often be
        above it than below, and no bound would be needed for that."""
        num = min(len(self.canaries), len(self.rest))
        one, other = (self._source.sample(ids, num) for ids in (self.canaries, self.rest))
        return window.side(one, slo_s), window.side(other, slo_s)


def mean_score(scores: list[SideScore]) -> SideScore:
    """Of windows of one length."""
    num = max(1, len(scores))
    num_tokens = sum(one.num_tokens for one in scores)
    return SideScore(
        score_a_s=sum(one.score_a_s for one in scores) / num,
        tokens_a_s=sum(one.tokens_a_s for one in scores) / num,
        met_share=sum(one.met_share * one.num_tokens for one in scores) / num_tokens if num_tokens else 1.0,
        step_s=sum(one.step_s * one.num_tokens for one in scores) / num_tokens if num_tokens else 0.0,
        num_running=max((one.num_running for one in scores), default=0.0),
        num_tokens=num_tokens,
    )
