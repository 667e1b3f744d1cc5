"""What a step costs: the one model that the simulator runs on, placement estimates with and step budgets look ahead by.

    step_ms = c0 + c1 * prefill tokens + c2 * sum of chunk * (cached + chunk / 2) + c3 * decode sequences
            + c4 * tokens of context that the decodes read

The terms are those of DistServe's and Sarathi-Serve's simulators with a term for cached context (Vidur).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`num_tokens` of a prompt computed after `num_before` that are in pages already."""

    num_tokens: int
    num_before: int = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients in milliseconds; none negative."""

    base_ms: float
    prefill_token_ms: float
    prefill_pair_ms: float
    """Of one token that attends to one other."""
    decode_sequence_ms: float
    context_token_ms: float

    def __post_init__(self) -> None:
        for name in ("base_ms", "prefill_token_ms", "prefill_pair_ms", "decode_sequence_ms", "context_token_ms"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: must be finite and at least 0")

    def step_ms(self, chunks: Iterable[PromptChunk] = (), num_decodes: int = 0, num_context_tokens: int = 0) -> float:
        """One step over prefill chunks and `num_decodes` sequences that read `num_context_tokens` in all."""
        num_tokens = 0
        num_pairs = 0.0
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            num_pairs += chunk.num_tokens * (chunk.num_before + chunk.num_tokens / 2)
        return (
            self.base_ms
            + self.prefill_token_ms * num_tokens
            + self.prefill_pair_ms * num_pairs
            + self.decode_sequence_ms * num_decodes
            + self.context_token_ms * num_context_tokens
        )

    def prefill_ms(self, num_uncached: int, num_cached: int, chunk_tokens: int) -> float:
        """A prompt by itself, in steps of `chunk_tokens`."""
        num_steps = -(-num_uncached // chunk_tokens)
        num_pairs = num_uncached * (num_cached + num_uncached / 2)
        return num_steps * self.base_ms + self.prefill_token_ms * num_uncached + self.prefill_pair_ms * num_pairs
