"""How a token is sampled and when a sequence ends, as workers see it (all defaults filled in, the seed chosen), and the
log-probabilities that clients get of it."""

from dataclasses import dataclass

from weir.core.grammar import Grammar

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
    batch or worker samples it. `logit_bias` has (token id, what is added to its logit), by rising id.
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
    """Report the log-probability of each output token, and of so many most likely ones. None: of none."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first."""
    grammar: Grammar | None = None
    """In which the whole output is. None: it is free."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on which tokens came before, beyond what the logits say."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopRules:
    """A sequence ends after `max_tokens` output tokens (at least 1) or with the first of `stop_token_ids`.

    Before `min_tokens` output tokens none of `stop_token_ids` is sampled.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0


_NOT_KNOWN = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: the token that is there, and the most likely ones, most likely first.

    Natural logarithms of the softmax of the model's own logits: before bias, penalties, temperature and filters.
    `rank` is 1 for the most likely token, and 0 where nothing is known any more.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability)."""

    @classmethod
    def unknown(cls, token_id: int) -> "TokenLogprobs":
        """Of a token that a worker sampled which has died since; -9999 as OpenAI writes what is hardly possible."""
        return cls(token_id, _NOT_KNOWN, 0)

    @property
    def is_unknown(self) -> bool:
        return self.rank == 0
