"""What a step costs whose prompts are numbers."""

from collections.abc import Iterable
from typing import Protocol

from weir.core.cost import PromptChunk, StepCost
from weir.sim.events import ns_of_ms


class Reading(Protocol):
    """A prompt of which some tokens are computed."""

    num_computed: int


def step_ns(
    cost: StepCost, parts: Iterable[tuple[Reading, int]], num_decodes: int = 0, num_context_tokens: int = 0
) -> int:
    """Nanoseconds of a step with these tokens of prompts beside so many decodes, which see so many tokens together.

    One token of a prompt counts as a decode.
    """
    chunks = []
    for prompt, num_tokens in parts:
        if num_tokens > 1:
            chunks.append(PromptChunk(num_tokens, prompt.num_computed))
        else:
            num_decodes += 1
            num_context_tokens += prompt.num_computed + 1
    return ns_of_ms(cost.step_ms(chunks, num_decodes, num_context_tokens))
