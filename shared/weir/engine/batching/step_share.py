"""What a step's budget of tokens goes to: decodes first, then prompts in order, unless a policy says otherwise."""

import logging

from weir.core.cost import StepCost
from weir.engine.batching.policy_views import Room, step_view
from weir.engine.counters import EngineCounters
from weir.engine.sequence import Sequence
from weir.policy.seams import StepBudget, StepShare, StepView

_log = logging.getLogger(__name__)


class Shares:
    """Asks a policy's step budget, and checks its answers: one that is not possible, or computes nothing where
    something could be computed, is not followed in that step, and counted."""

    def __init__(self, budget: StepBudget, room: Room, counters: EngineCounters) -> None:
        self._budget = budget
        self._room = room
        self._counters = counters
        self._share: StepShare | None = None
        self._has_warned = False

    def split(
        self,
        decodes: list[Sequence],
        prefills: list[Sequence],
        max_tokens: int,
        now_s: float,
        cost: StepCost | None = None,
    ) -> tuple[list[Sequence], int]:
        """The decodes that run, in their order, and the prompt tokens beside them."""
        self._share = None
        if not decodes and not prefills:
            return [], 0
        view = step_view(decodes, prefills, max_tokens, self._room, now_s, cost)
        share = self._budget.plan(view)
        problem = _try_find_problem(share, view)
        if problem is not None:
            self._count_defect(problem)
            return decodes[:max_tokens], max(0, max_tokens - len(decodes))
        self._share = share
        return [decodes[index] for index in sorted(share.decodes)], share.num_prefill_tokens

    def stepped(self, duration_s: float) -> None:
        """The step that was split last ran."""
        if self._share is not None:
            self._budget.stepped(duration_s, self._share)
            self._share = None

    def _count_defect(self, problem: str) -> None:
        self._counters.policy_defects += 1
        if not self._has_warned:
            self._has_warned = True
            _log.error("the policy's step budget is not followed in this step (said once): %s", problem)


def _try_find_problem(share: StepShare, view: StepView) -> str | None:
    chosen = set(share.decodes)
    if len(chosen) != len(share.decodes) or not all(0 <= index < len(view.decodes) for index in chosen):
        return f"decodes {list(share.decodes)[:8]}: must be different indices below {len(view.decodes)}"
    if share.num_prefill_tokens < 0 or len(chosen) + share.num_prefill_tokens > view.max_tokens:
        return f"{len(chosen)} decodes and {share.num_prefill_tokens} prompt tokens: the step has {view.max_tokens}"
    if not chosen and (share.num_prefill_tokens == 0 or not view.prefills):
        return "nothing is computed although something could be"
    return None
