"""The seam to a grammar engine, and what such an engine is told of a model's vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weir.core.grammar import Grammar

Words = npt.NDArray[np.uint32]
"""A row of bits, one a token of the vocabulary, the lowest of a word first: 1 where the token may come."""
ALL_TOKENS = np.uint32(0xFFFFFFFF)
"""A word of those."""


class GrammarError(Exception):
    """A grammar cannot be used; the message tells its author why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`token_bytes[i]` is what token i stands for, one entry a logit of the model: b"" for what is no token.

    `special_token_ids` stand for nothing that a text has: a grammar has them only by name. `end_token_ids` end an
    output. `encode` is the model's own way to write a text in tokens, without special ones; it raises nothing.
    """

    token_bytes: Sequence[bytes]
    special_token_ids: frozenset[int]
    end_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        return num_mask_words(len(self.token_bytes))


class Matcher(Protocol):
    """Where one sequence stands in its grammar. Used by one thread at a time; nothing of it raises."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Goes on by tokens that were allowed; by others, `error` is set."""
        ...

    def fill(self, words: Words) -> None:
        """Says which tokens may come now: end tokens where the text may end. All may, once there is an error."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on; empty: it can."""
        ...


class CompiledGrammar(Protocol):
    """Safe to share between threads."""

    def matcher(self) -> Matcher:
        """Of a sequence without output."""
        ...


class GrammarEngine(Protocol):
    """For one vocabulary. Safe to share between threads."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Takes long for a large grammar. Raises GrammarError for one that is wrong, too large or not supported."""
        ...


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
