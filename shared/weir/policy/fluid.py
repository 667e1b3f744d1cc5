"""The fluid limit of a batch in which every request moves on by one token a step.

Ao, Luo, Simchi-Levi, Wang: "Optimizing LLM Inference: Fluid-Guided Online Scheduling with Memory Constraints", arXiv
2504.11320. Type j arrives lambda_j times a second with l_j tokens of prompt and l'_j of output; a step takes
tau = d0 + d1 * (tokens in pages). In balance each stage of type j holds lambda_j * tau requests, so that pages hold
tau * W tokens, W = sum over types of lambda_j * sum over k = 0 .. l'_j of (l_j + k). Hence tau* = d0 / (1 - d1 * W).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from weir.kv.geometry import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one type; the rate is per second, lengths are in tokens."""

    rate: float
    num_prompt_tokens: float
    num_output_tokens: float

    @property
    def num_stages(self) -> float:
        """Steps that one takes: one for its prompt, one a token."""
        return self.num_output_tokens + 1

    @property
    def work(self) -> float:
        """Token-steps that arrive a second."""
        return self.rate * self.num_stages * (self.num_prompt_tokens + self.num_output_tokens / 2)

    @property
    def held_work(self) -> float:
        """The same in whole pages: half of a sequence's last page is empty on average."""
        return self.work + self.rate * self.num_stages * PAGE_TOKENS / 2


def balanced_step_s(flows: Iterable[Flow], base_s: float, token_s: float) -> float:
    """tau*; infinite where no balance exists: each step brings more than it serves."""
    room = 1 - token_s * sum(flow.work for flow in flows)
    return base_s / room if room > 0 else math.inf


def longest_step_s(flows: Iterable[Flow], num_pool_tokens: float) -> float:
    """The tau at which the fluid just fills the pages; infinite without any flow."""
    work = sum(flow.held_work for flow in flows)
    return num_pool_tokens / work if work > 0 else math.inf
