"""How many prompt tokens a step gets, so that it lasts about as long as its target.

Whatever turns up meanwhile, an urgent prompt or the next token of a decode, waits for the step that runs. What a token
takes depends on model and machine, on other work there and on the context before it, so it is followed and not known: a
step that took twice the target had about twice the tokens that it should have had.
"""

import math

from weir.core.cost import StepCost
from weir.kv.geometry import PAGE_TOKENS

FIRST_TOKENS = 128
"""Until a step has been measured: one pass of the compiled kernels."""
LEAST_TOKENS = 64
"""Fewer would read all weights for little."""
_TELLING_SHARE = 4
"""A step with less than this part of the budget says little about a full one, unless it took too long itself."""
_MOST_CHANGE = 2.0
_GAIN = 0.5
"""One slow step moves the budget by a factor of at most `_MOST_CHANGE ** _GAIN`."""


class StepPace:
    """Follows the steps of one engine. Without a target the budget is always `most_tokens`."""

    def __init__(self, most_tokens: int, target_s: float = math.inf) -> None:
        self.cost: StepCost | None = None
        """What the worker has fitted to its steps; None: nothing yet."""
        self._most_tokens = most_tokens
        self._target_s = target_s
        self._budget = float(most_tokens if target_s == math.inf else min(most_tokens, FIRST_TOKENS))
        self._num_planned = 0

    @property
    def num_tokens(self) -> int:
        """Of prompts, in the next step; whole pages as long as the limit allows it."""
        if self._budget >= self._most_tokens:
            return self._most_tokens
        return int(self._budget) // PAGE_TOKENS * PAGE_TOKENS

    def planned(self, num_prompt_tokens: int) -> None:
        """The step that runs next has so many."""
        self._num_planned = num_prompt_tokens

    def stepped(self, duration_s: float) -> None:
        """It took so long, with the decodes beside them; 0: it was not measured."""
        num_planned, target_s = self._num_planned, self._target_s
        if target_s == math.inf or not num_planned or duration_s <= 0:
            return
        if num_planned * _TELLING_SHARE < self._budget and duration_s < target_s:
            return
        change = num_planned * target_s / duration_s / self._budget
        self._budget *= min(max(change, 1 / _MOST_CHANGE), _MOST_CHANGE) ** _GAIN
        self._budget = min(max(self._budget, LEAST_TOKENS), self._most_tokens)
