"""How tokens are sampled and when a sequence ends, as workers see it: all defaults filled in, the seed chosen."""

from dataclasses import dataclass

MAX_LOGIT_BIAS = 300
"""Entries of `SamplingParams.logit_bias`."""
MAX_STOP_TOKEN_IDS = 64
"""Ids of `StopRules.stop_token_ids`: what a client may name, and the model's own."""
MAX_LOGPROBS = 20
"""Tokens beside the chosen one whose log-probabilities are reported."""
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The defaults change nothing: they keep every token and penalise none. A `temperature` below 1e-5 is greedy.

    `seed` (unsigned, 64 bits) keys a counter-based generator: token i of the output is sampled with (seed, i), whatever
    batch or worker draws it. `logit_bias` has (token id, what is added to its logit), by rising id.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Tell the log-probability of each output token, and of so many most likely ones. None: tell nothing."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on which tokens came before, beyond what the logits say."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopRules:
    """A sequence ends after `max_tokens` output tokens (at least 1) or with the first of `stop_token_ids`.

    Before `min_tokens` output tokens none of `stop_token_ids` is sampled.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
