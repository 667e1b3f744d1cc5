"""How tokens are drawn and when a sequence ends, as workers see it: all defaults filled in, the seed chosen."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token.

    `seed` (unsigned, 64 bits) keys a counter-based generator: token i of the output is drawn with (seed, i), whatever
    batch or worker draws it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class StopRules:
    """A sequence ends after `max_tokens` output tokens (at least 1) or with the first of `stop_token_ids`."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
