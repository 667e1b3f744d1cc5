"""Which prompt is next in a step: in order, the most urgent lane first, but nobody is passed over for ever."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from weir.engine.sequence import Sequence


class PromptProgress(Protocol):
    """Anything that has a turn; the simulator's fast engines have rows of their own."""

    num_passed_over: int


_PromptT = TypeVar("_PromptT", bound=PromptProgress)

MAX_PASSED_OVER = 32
"""Steps in a row in which a prompt with pages may get nothing; in the next one it goes first. So while urgent prompts
keep coming, another one still computes a chunk in every 32 steps and those of others that wait as long."""


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
