"""Shortest prompt first: least uncached tokens. Needs no model, and is the yardstick for time to first token."""

from dataclasses import dataclass

from weir.policy.keyed_queue import KeyedQueue
from weir.policy.seams import OrderQueue, Policy, Waiting
from weir.policy.starvation import StarvationParams, guarded


@dataclass(frozen=True, slots=True)
class ShortestPromptParams(StarvationParams):
    """Starvation control alone."""


def make(params: ShortestPromptParams) -> Policy:
    return Policy("shortest-prompt", ShortestPromptOrder(params), gate=None, step_budget=None)


class ShortestPromptOrder:
    """By what is left to read of a prompt."""

    def __init__(self, params: StarvationParams) -> None:
        self._params = params

    def new_queue(self) -> OrderQueue:
        return guarded(KeyedQueue(lambda request: (self.rank(request),)), self._params)

    def rank(self, request: Waiting) -> float:
        return float(request.num_uncached_tokens)

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        """Nothing is learnt."""
