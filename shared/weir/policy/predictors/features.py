"""From a prompt's tokens to a vector of fixed length, with nothing but a token table.

[0] log1p(tokens)   [1] ends with "?"   [2] log1p(numbers)   [3] log1p(largest number)   [4] log1p(asked length)
[5] log1p(number of earlier answers)   [6] log1p(tokens of the last one)   [7] mean of their log1p(tokens)
[8 …]               SIGNS: log1p(count) of punctuation, whether a word is there
[… num_features)    mean of the tokens' vectors
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weir.policy.predictors.token_table import NUM_PUNCTUATION, SIGNS, UNIT_SIGNS, ChatFrame, TokenTable

Floats = npt.NDArray[np.float32]

NUM_PLAIN = 8
LENGTH_FEATURE = 0
ANSWER_FEATURES = slice(5, NUM_PLAIN)
_NUMBER_FEATURES = slice(2, 5)
_HALF_WINDOW = 512
_MAX_DIGIT_TOKENS = 64
_MAX_NUMBER = 999_999
_ENDING_TOKENS = 3
_MAX_LOOK_BACK = 4096
"""Tokens at a conversation's end in which earlier answers are looked for."""


class PromptFeatures:
    """Bounded work: of a long prompt the first and the last 512 tokens are looked at, and for earlier answers the last
    4,096."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table

    @property
    def num_features(self) -> int:
        return NUM_PLAIN + len(SIGNS) + self.table.num_dims

    def of(self, prompts: Sequence[Sequence[int]]) -> Floats:
        """[prompts, num_features]. Ids past the vocabulary are left out; a prompt may be empty."""
        features = np.zeros((len(prompts), self.num_features), np.float32)
        for row, prompt in zip(features, prompts, strict=True):
            self._fill(row, prompt)
        return features

    def _fill(self, row: Floats, prompt: Sequence[int]) -> None:
        table = self.table
        start, end = self._message_of(prompt)
        row[LENGTH_FEATURE] = math.log1p(end - start)
        row[ANSWER_FEATURES] = answer_features(earlier_answers(prompt, table.frame))
        if end - start > 2 * _HALF_WINDOW:
            seen = [*prompt[start : start + _HALF_WINDOW], *prompt[end - _HALF_WINDOW : end]]
        else:
            seen = list(prompt[start:end])
        ids = np.array(seen, np.int64)
        ids = ids[(ids >= 0) & (ids < table.vocab_size)]
        if not len(ids):
            return
        signs = table.sign_of[ids]
        row[1] = bool((signs[-_ENDING_TOKENS:] == 1).any())
        row[_NUMBER_FEATURES] = self._numbers(ids, signs)
        counts = np.bincount(signs, minlength=len(SIGNS) + 1)[1:]
        end = NUM_PLAIN + len(SIGNS)
        row[NUM_PLAIN : NUM_PLAIN + NUM_PUNCTUATION] = np.log1p(counts[:NUM_PUNCTUATION])
        row[NUM_PLAIN + NUM_PUNCTUATION : end] = counts[NUM_PUNCTUATION:] > 0
        row[end:] = table.vectors[ids].mean(axis=0, dtype=np.float32) * table.scales

    def _message_of(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Where it begins and ends in what the chat template wrote; a prompt that is nothing else counts whole."""
        prefix, suffix = self.table.frame.prefix, self.table.frame.suffix
        start = len(prefix) if tuple(prompt[: len(prefix)]) == prefix else 0
        end = len(prompt)
        if suffix and tuple(prompt[-len(suffix) :]) == suffix:
            end -= len(suffix)
        return (start, end) if start < end else (0, len(prompt))

    def _numbers(self, ids: npt.NDArray[np.int64], signs: npt.NDArray[np.uint8]) -> tuple[float, float, float]:
        """log1p of how many numbers there are, of the largest, and of the largest right before a unit of length."""
        positions = np.flatnonzero(self.table.digits_of[ids])[:_MAX_DIGIT_TOKENS].tolist()
        count, largest, asked, value, end = 0, 0, 0, 0, -1
        for position in positions:
            number, digits = int(self.table.number_of[ids[position]]), int(self.table.digits_of[ids[position]])
            value = min(_MAX_NUMBER, value * 10**digits + number) if position == end else number
            count += position != end
            end = position + 1
            largest = max(largest, value)
            if end < len(ids) and int(signs[end]) - 1 in UNIT_SIGNS:
                asked = max(asked, value)
        return math.log1p(count), math.log1p(largest), math.log1p(asked)


def earlier_answers(prompt: Sequence[int], frame: ChatFrame) -> list[int]:
    """Tokens of each earlier answer of the assistant that is whole in the last 4,096 tokens, the latest last.

    An answer is what stands between `before_answer` and the next `after_answer`; none is found without such a frame.
    """
    before, after = frame.before_answer, frame.after_answer
    if not before or not after:
        return []
    seen = tuple(prompt[-_MAX_LOOK_BACK:])
    lengths: list[int] = []
    place = 0
    while (start := _find(seen, before, place)) is not None:
        start += len(before)
        end = _find(seen, after, start)
        if end is None:
            break
        lengths.append(end - start)
        place = end + len(after)
    return lengths


def _find(tokens: tuple[int, ...], wanted: tuple[int, ...], start: int) -> int | None:
    """Where `wanted` begins, from `start` on."""
    while True:
        try:
            place = tokens.index(wanted[0], start)
        except ValueError:
            return None
        if tokens[place : place + len(wanted)] == wanted:
            return place
        start = place + 1


def answer_features(lengths: Sequence[int]) -> tuple[float, float, float]:
    """Of earlier answers' lengths in tokens, the latest last; zeros where there is none."""
    if not lengths:
        return 0.0, 0.0, 0.0
    logarithms = [math.log1p(length) for length in lengths]
    return math.log1p(len(lengths)), logarithms[-1], sum(logarithms) / len(logarithms)
