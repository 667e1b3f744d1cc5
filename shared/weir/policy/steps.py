"""The two step budgets that Sarathi-Serve (arXiv 2403.02310) improves on, as baselines.

Sarathi-Serve's own (all decodes, then chunks of prompts in order) is what a batcher does without a budget.
"""

from weir.policy.fcfs import fcfs_order
from weir.policy.params import NoParams
from weir.policy.seams import Policy, StepBudget, StepShare, StepView


def make_prefill_first(params: NoParams) -> Policy:
    del params
    return _with_budget("prefill-first", PrefillFirst())


def make_unchunked(params: NoParams) -> Policy:
    del params
    return _with_budget("unchunked", Unchunked())


def _with_budget(name: str, step_budget: StepBudget) -> Policy:
    return Policy(name, fcfs_order(), gate=None, step_budget=step_budget)


class PrefillFirst:
    """Prompts take all they can, decodes the rest: the soonest first tokens, and the longest gaps after them."""

    def plan(self, view: StepView) -> StepShare:
        num_left = sum(view.prefills)
        num_prefill_tokens = min(num_left, view.max_tokens)
        return StepShare(range(min(len(view.decodes), view.max_tokens - num_prefill_tokens)), num_prefill_tokens)

    def stepped(self, duration_s: float, share: StepShare) -> None:
        """Nothing is learned."""


class Unchunked:
    """Prompts are computed whole: as many as fit into the step beside the decodes, the first in any case. One that is
    longer than a step is cut, for a step holds no more."""

    def plan(self, view: StepView) -> StepShare:
        num_prefill_tokens = 0
        for index, num_left in enumerate(view.prefills):
            num_with_it = num_prefill_tokens + num_left
            if index > 0 and num_with_it > view.max_tokens - len(view.decodes):
                break
            num_prefill_tokens = num_with_it
        num_prefill_tokens = min(num_prefill_tokens, view.max_tokens)
        return StepShare(range(min(len(view.decodes), view.max_tokens - num_prefill_tokens)), num_prefill_tokens)

    def stepped(self, duration_s: float, share: StepShare) -> None:
        """Nothing is learned."""
