"""The tokens of a sequence as penalties want them: one array that grows with every step."""

from collections.abc import Sequence as Seq

import numpy as np

from weir.engine.plan import TokenHistory

_MIN_HISTORY_TOKENS = 256


class GrowingHistory:
    """The tokens of a sequence in one array. Only grows, and moves to a larger array rather than change what a
    `TokenHistory` shows."""

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        self._num_tokens = len(token_ids)
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids = np.empty(self._num_tokens + _MIN_HISTORY_TOKENS, np.int32)
        self._token_ids[: self._num_tokens] = token_ids

    def append(self, token_id: int) -> None:
        if self._num_tokens == len(self._token_ids):
            larger = np.empty(2 * self._num_tokens, np.int32)
            larger[: self._num_tokens] = self._token_ids
            self._token_ids = larger
        self._token_ids[self._num_tokens] = token_id
        self._num_tokens += 1

    def view(self) -> TokenHistory:
        """The tokens so far, not copied."""
        return TokenHistory(self._token_ids[: self._num_tokens], self._num_prompt_tokens)
