"""How many prompt tokens a step gets, so that it lasts about as long as its target.

Whatever turns up meanwhile, an urgent prompt or the next token of a decode, waits for the step that runs. What a token
takes depends on model and machine, on other work there and on the context before it, so it is measured all the time: a
step that took twice the target had about twice the tokens that it should have had.
"""

import math

from weir.core.cost import StepCost
from weir.kv.geometry import PAGE_TOKENS

FIRST_TOKENS = 128
"""Until a step has been measured: one pass of the compiled kernels."""
MIN_TOKENS = 64
"""Fewer would load all weights for little."""
_MEANINGFUL_PART = 4
"""A step with less than this part of the budget says little about a full one, unless it took too long itself."""
_MAX_CHANGE = 2.0
_GAIN = 0.5
"""One slow step moves the budget by a factor of at most `_MAX_CHANGE ** _GAIN`."""


class StepPace:
    """Follows the steps of one engine. Without a target the budget is always `max_tokens`."""

    def __init__(self, max_tokens: int, target_s: float = math.inf) -> None:
        self.cost: StepCost | None = None
        """What the worker has fitted to its steps, for policies; None: nothing yet."""
        self._max_tokens = max_tokens
        self._target_s = target_s
        self._budget = float(max_tokens if target_s == math.inf else min(max_tokens, FIRST_TOKENS))
        self._num_planned = 0

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the next step; whole pages as long as the limit allows it."""
        if self._budget >= self._max_tokens:
            return self._max_tokens
        return int(self._budget) // PAGE_TOKENS * PAGE_TOKENS

    def planned(self, num_prompt_tokens: int) -> None:
        """What the next step has of them."""
        self._num_planned = num_prompt_tokens

    def stepped(self, duration_s: float) -> None:
        """How long it took, with its decodes; 0: it was not measured."""
        num_planned, target_s = self._num_planned, self._target_s
        if target_s == math.inf or not num_planned or duration_s <= 0:
            return
        if num_planned * _MEANINGFUL_PART < self._budget and duration_s < target_s:
            return
        change = num_planned * target_s / duration_s / self._budget
        self._budget *= min(max(change, 1 / _MAX_CHANGE), _MAX_CHANGE) ** _GAIN
        self._budget = min(max(self._budget, MIN_TOKENS), self._max_tokens)
