"""How far the sequences of one decode worker are: what memory tests look ahead from."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PROMPT, _MAX_OUTPUT, _EMITTED, _AT_S, _PER_S, _PREDICTED = range(6)
_MIN_RATE_S = 0.2
"""Reports closer together than this say little about the rate."""


class RunningLengths:
    """One column a sequence. Between two reports tokens are taken to come as they did before."""

    def __init__(self) -> None:
        self._columns = np.zeros((6, 16))
        self._ids: list[str] = []
        self._column_of: dict[str, int] = {}
        self.version = 0
        """Rises whenever a sequence comes or goes."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def prompt(self) -> Floats:
        return self._columns[_PROMPT, : len(self._ids)]

    @property
    def max_output(self) -> Floats:
        return self._columns[_MAX_OUTPUT, : len(self._ids)]

    @property
    def predicted(self) -> Floats:
        """0: not."""
        return self._columns[_PREDICTED, : len(self._ids)]

    def emitted(self, now_s: float) -> Floats:
        """Tokens that each has by now, less than the most that it may have."""
        columns = self._columns[:, : len(self._ids)]
        grown = columns[_EMITTED] + (now_s - columns[_AT_S]) * columns[_PER_S]
        bounded: Floats = np.maximum(np.minimum(grown, columns[_MAX_OUTPUT] - 1.0), 0.0)
        return bounded

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int, predicted: float, now_s: float) -> None:
        """Nothing is emitted until `start`."""
        column = len(self._ids)
        if column == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, column] = (num_prompt_tokens, max_tokens, 0.0, now_s, 0.0, predicted)
        self._ids.append(request_id)
        self._column_of[request_id] = column
        self.version += 1

    def start(self, request_id: str, tokens_per_s: float, now_s: float) -> int:
        """Its first token is there, and more will come at this rate. Returns 1, or 0 if that was known."""
        column = self._column_of.get(request_id)
        if column is not None and self._columns[_EMITTED, column] == 0.0:
            self._columns[_EMITTED : _PER_S + 1, column] = (1.0, now_s, tokens_per_s)
            return 1
        return 0

    def progressed(self, request_id: str, num_output_tokens: int, now_s: float) -> int:
        """A report. Returns by how many tokens it is ahead of the last one."""
        column = self._column_of.get(request_id)
        if column is None:
            return 0
        emitted, at_s, per_s = self._columns[_EMITTED : _PER_S + 1, column].tolist()
        if num_output_tokens <= emitted:
            return 0
        if emitted and now_s - at_s > _MIN_RATE_S:
            per_s = (num_output_tokens - emitted) / (now_s - at_s)
        self._columns[_EMITTED : _PER_S + 1, column] = (num_output_tokens, now_s, per_s)
        return int(num_output_tokens - emitted)

    def num_reported(self, request_id: str) -> int:
        """Tokens of the last report."""
        column = self._column_of.get(request_id)
        return 0 if column is None else int(self._columns[_EMITTED, column])

    def remove(self, request_id: str) -> None:
        column = self._column_of.pop(request_id, None)
        if column is None:
            return
        last_id = self._ids.pop()
        if last_id != request_id:
            self._columns[:, column] = self._columns[:, len(self._ids)]
            self._ids[column] = last_id
            self._column_of[last_id] = column
        self.version += 1
