"""Log-probabilities of tokens, as the engine finds them and clients are told them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: the token that is there, and the most likely ones, most likely first.

    Natural logarithms of the softmax of the model's own logits: before bias, penalties, temperature and filters.
    `rank` is 1 for the most likely token.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability)."""
