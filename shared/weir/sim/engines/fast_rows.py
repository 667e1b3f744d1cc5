"""A sequence of a fast engine, and which prompts a step of it computes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from weir.core.cost import PromptChunk, StepCost
from weir.engine.batching.prompt_order import in_turn, note_turn
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.sim.request_state import SimRequestState
from weir.sim.timeline import ns_of_ms
from weir.sim.workers.arrival import SimArrival


@dataclass(slots=True, eq=False)
class FastRow:
    """A sequence; `order` counts arrivals. While it decodes it has `context(step)` tokens in each step from
    `first_step` on."""

    state: SimRequestState
    arrival: SimArrival
    order: int
    num_prompt_tokens: int
    num_computed: int = 0
    """Of its prompt."""
    first_step: int = 0
    """In which it samples its second token; 0: it has none yet."""
    reported_step: int = 0
    """Its tokens up to the end of this step have been reported."""
    is_waiting: bool = True
    is_gone: bool = False
    is_eager: bool = False
    """Each of its tokens is reported when it is sampled."""
    is_over: bool = False
    """None of them is."""
    num_passed_over: int = 0

    @property
    def num_uncomputed(self) -> int:
        """Of its prompt."""
        return self.num_prompt_tokens - self.num_computed

    @property
    def num_prompt_pages(self) -> int:
        return num_pages_for(self.num_prompt_tokens)

    @property
    def last_step(self) -> int:
        """In which it samples its last token; the first one came from its prompt."""
        return self.first_step + self.state.num_true_tokens - 2

    @property
    def growth_phase(self) -> int:
        """It needs another page in the steps whose number has this remainder."""
        return (self.first_step - self.num_prompt_tokens) % PAGE_TOKENS

    def context(self, step: int) -> int:
        """Tokens that it has when the step begins; the last of them is computed in it."""
        return self.num_prompt_tokens + 1 + step - self.first_step

    def num_grown_pages(self, step: int) -> int:
        """Beyond those of its prompt, when the step is over."""
        return num_pages_for(self.context(step)) - self.num_prompt_pages


def plan_prompts(prompts: list[FastRow], budget: int, chunk_tokens: int) -> list[tuple[FastRow, int]]:
    """Who computes how many tokens in a step: first those that lack one token, which count as decodes."""
    if len(prompts) == 1:
        row = prompts[0]
        num_tokens = min(row.num_uncomputed, chunk_tokens, budget) if row.num_uncomputed > 1 else 1
        row.num_passed_over = 0 if num_tokens > 0 else row.num_passed_over + 1
        return [(row, num_tokens)] if num_tokens > 0 else []
    longer = [row for row in prompts if row.num_uncomputed > 1]
    planned = [(row, 1) for row in prompts if row.num_uncomputed == 1]
    budget -= len(planned)
    served = []
    for row in in_turn(longer):
        if budget <= 0:
            break
        num_tokens = min(row.num_uncomputed, chunk_tokens, budget)
        budget -= num_tokens
        planned.append((row, num_tokens))
        served.append(row)
    note_turn(longer, served)
    return planned


class HalfComputed(Protocol):
    """A prompt of which some tokens are computed."""

    num_computed: int


def step_ns(
    cost: StepCost, parts: Iterable[tuple[HalfComputed, int]], num_decodes: int = 0, num_context_tokens: int = 0
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
