"""SLAI: decodes wait for their last schedulable time, and prompts, the shortest first, get what that frees.

Bari, Hegde, de Veciana, "Optimal Scheduling Algorithms for LLM Inference: Theory and Practice", arXiv 2508.01002.
"""

import heapq
from dataclasses import dataclass

from weir.policy.params import bounded
from weir.policy.seams import Policy, StepShare, StepView
from weir.policy.shortest_prompt import shortest_prompt_order
from weir.policy.starvation import StarvationParams


@dataclass(frozen=True, slots=True)
class SlaiParams(StarvationParams):
    """`default_itl_s`: of sequences without a target of their own. A decode is due `offset` mean steps before its
    target, `offset_full` when the share of pages in use is `full_at` or more: the sooner those end that hold them."""

    default_itl_s: float = bounded(0.2, 0)
    offset: float = bounded(5.0, 0)
    offset_full: float = bounded(10.0, 0)
    full_at: float = bounded(0.96, 0, 1)


def make(params: SlaiParams) -> Policy:
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
