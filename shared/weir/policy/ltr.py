"""Learning to rank: shortest predicted answer first, by a score that need only rank well.

Fu, Zhu, Su, Qiao, Stoica, Zhang: "Efficient LLM Scheduling by Learning to Rank", arXiv 2408.15792.
"""

from weir.policy.estimators import RecentMean
from weir.policy.keyed_queue import KeyedQueue
from weir.policy.seams import OrderQueue, Policy, Waiting
from weir.policy.starvation import StarvationParams, guarded


def make(params: StarvationParams) -> Policy:
    return Policy("ltr", LtrOrder(params), gate=None, step_budget=None)


class LtrOrder:
    """By score, the highest (shortest) first. What has no score ranks as the mean of the requests that have ended."""

    def __init__(self, params: StarvationParams) -> None:
        self._params = params
        self._scores = RecentMean()

    def new_queue(self) -> OrderQueue:
        return guarded(KeyedQueue(lambda request: (self.rank(request),)), self._params)

    def rank(self, request: Waiting) -> float:
        if request.output_score is not None:
            return -request.output_score
        return -(self._scores.value or 0.0)

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        if request.output_score is not None:
            self._scores.add(request.output_score)
