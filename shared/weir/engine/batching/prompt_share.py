"""What prompts get of a step: how many tokens, and whose come first.

Whatever turns up while a step runs, an urgent prompt or the next token of a decode, waits for it; so a step gets so
many prompt tokens that it lasts about as long as its target. What a token takes depends on model and machine, on other
work there and on the context before it, so it is measured all the time: a step that took twice the target had about
twice the tokens that it should have had. In a step prompts go in order, the most urgent lane first, but nobody is
passed over for ever. Where lanes are guaranteed shares of a step (`step_shares`), these go before the order.
"""

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

from weir.engine.batching.step_shares import PromptWork, StepShares
from weir.engine.sequence import Sequence
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
MAX_PASSED_OVER = 32
"""Steps in a row in which a prompt with pages may get nothing; in the next one it goes first. So while urgent prompts
keep coming, another one still computes a chunk in every 32 steps and those of others that wait as long."""


class StepPace:
    """Follows the steps of one engine. Without a target the budget is always `max_tokens`."""

    def __init__(self, max_tokens: int, target_s: float = math.inf) -> None:
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

    def set_max(self, max_tokens: int) -> None:
        """From the next step on. What was measured still holds."""
        self._max_tokens = max_tokens
        is_free = self._target_s == math.inf
        self._budget = float(max_tokens if is_free else min(max(self._budget, MIN_TOKENS), max_tokens))

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


class PromptProgress(Protocol):
    """Anything that has a turn; the simulator's fast engines have rows of their own."""

    num_passed_over: int


_PromptT = TypeVar("_PromptT", bound=PromptProgress)


def in_turn(prompts: list[_PromptT]) -> list[_PromptT]:
    """Those that were passed over too often come first, the longest of them first of all."""
    if not any(prompt.num_passed_over >= MAX_PASSED_OVER for prompt in prompts):
        return prompts
    return sorted(prompts, key=lambda one: -one.num_passed_over if one.num_passed_over >= MAX_PASSED_OVER else 0)


def is_less_urgent(sequence: Sequence, served: list[Sequence]) -> bool:
    """Than a prompt that is in the step already: that one does not wait until this one's chunk, which would only fill
    the step, is computed too."""
    return bool(served) and sequence.params.scheduling.lane_priority < served[-1].params.scheduling.lane_priority


def note_turn(prompts: Iterable[PromptProgress], served: Iterable[PromptProgress]) -> None:
    """All `prompts` wanted to be in the step, `served` are in it."""
    for prompt in prompts:
        prompt.num_passed_over += 1
    for prompt in served:
        prompt.num_passed_over = 0


def is_shared_out(shares: StepShares, prompts: list[Sequence]) -> bool:
    """Whether shares say how a step is divided: prompts of one lane alone go in order."""
    if not shares or not prompts:
        return False
    first = prompts[0].params.scheduling.lane_priority
    return any(prompt.params.scheduling.lane_priority != first for prompt in prompts)


def share_out(
    shares: StepShares, prompts: list[Sequence], num_tokens: int, *, chunk_tokens: int, max_rows: int
) -> list[tuple[Sequence, int]]:
    """Whose prompt is in the step with how many tokens, in turn."""
    ordered = in_turn(prompts)
    work = [PromptWork(s.params.scheduling.lane_priority, min(s.num_uncomputed, chunk_tokens)) for s in ordered]
    given = shares.split(work, num_tokens, max_rows)
    return [(sequence, tokens) for sequence, tokens in zip(ordered, given, strict=True) if tokens]
