"""Log-probabilities of tokens, as the engine finds them and clients get them."""

from dataclasses import dataclass

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
        """Of a token that a worker drew which has died since; -9999 as OpenAI writes what is hardly possible."""
        return cls(token_id, _NOT_KNOWN, 0)
