"""Policies that are a step budget: which decodes run, and how many prompt tokens beside them.

slai                      decodes wait for their last schedulable time, and prompts, the shortest first, get what that
                          frees. Bari, Hegde, de Veciana, "Optimal Scheduling Algorithms for LLM Inference: Theory and
                          Practice", arXiv 2508.01002
prefill-first, unchunked  the two that Sarathi-Serve (arXiv 2403.02310) improves on, as baselines

Sarathi-Serve's own (all decodes, then chunks of prompts in order) is what a batcher does without a budget.
"""

import heapq
from dataclasses import dataclass

from weir.policy.keyed_orders import fcfs_order, shortest_prompt_order
from weir.policy.params import NoParams, bounded
from weir.policy.seams import Policy, StepBudget, StepShare, StepView
from weir.policy.starvation import StarvationParams


@dataclass(frozen=True, slots=True)
class SlaiParams(StarvationParams):
    """`default_itl_s`: of sequences without a target of their own. A decode is due `offset` mean steps before its
    target, `offset_full` when the share of pages in use is `full_at` or more: the sooner those end that hold them."""

    default_itl_s: float = bounded(0.2, 0)
    offset: float = bounded(5.0, 0)
    offset_full: float = bounded(10.0, 0)
    full_at: float = bounded(0.96, 0, 1)


def make_slai(params: SlaiParams) -> Policy:
    return Policy("slai", shortest_prompt_order(params), gate=None, step_budget=LastSchedulableTime(params))


class LastSchedulableTime:
    """Critical decodes, then prompts, then the other decodes as far as there is budget, the most urgent first."""

    def __init__(self, params: SlaiParams) -> None:
        self._params = params
        self._steps_s = 0.0
        self._num_steps = 0

    def plan(self, view: StepView) -> StepShare:
        heap = self._heap(view)
        critical: list[int] = []
        while heap and heap[0][0] <= view.now_s and len(critical) < view.max_tokens:
            critical.append(heapq.heappop(heap)[1])
        num_prefill_tokens = min(sum(view.prefills), view.max_tokens - len(critical))
        num_others = min(len(heap), view.max_tokens - len(critical) - num_prefill_tokens)
        others = [heapq.heappop(heap)[1] for _ in range(num_others)]
        return StepShare(sorted(critical + others), num_prefill_tokens)

    def stepped(self, duration_s: float, share: StepShare) -> None:
        self._steps_s += duration_s
        self._num_steps += 1

    def _heap(self, view: StepView) -> list[tuple[float, int]]:
        """(last schedulable time, index)."""
        params = self._params
        mean_step_s = self._steps_s / self._num_steps if self._num_steps else 0.0
        ahead_s = mean_step_s * (params.offset if view.page_use < params.full_at else params.offset_full)
        heap = [
            (decode.last_token_at_s + (decode.itl_target_s or params.default_itl_s) - ahead_s, index)
            for index, decode in enumerate(view.decodes)
        ]
        heapq.heapify(heap)
        return heap


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
