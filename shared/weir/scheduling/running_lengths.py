"""How far the sequences of one decode worker are: what memory fits look ahead from."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PROMPT, _MAX_OUTPUT, _EMITTED, _AT_S, _PER_S, _PREDICTED = range(6)
_MIN_RATE_S = 0.2
"""Reports closer together than this say little about the rate."""


class RunningLengths:
    """One row a sequence. Between two reports tokens are taken to come as they did before.

    Reports come often and arrays are asked for by some memory fits only: what changed is written into them then.
    """

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._columns = np.zeros((6, 16))
        self._changed: set[int] = set()
        """Rows that are not in `_columns` yet as they are."""
        self.version = 0
        """Rises whenever a sequence comes or goes."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def prompt(self) -> Floats:
        return self._array(_PROMPT)

    @property
    def max_output(self) -> Floats:
        return self._array(_MAX_OUTPUT)

    @property
    def predicted(self) -> Floats:
        """0: not."""
        return self._array(_PREDICTED)

    def emitted(self, now_s: float) -> Floats:
        """Tokens that each has by now, less than the most that it may have."""
        columns = self._arrays()
        grown = columns[_EMITTED] + (now_s - columns[_AT_S]) * columns[_PER_S]
        bounded: Floats = np.maximum(np.minimum(grown, columns[_MAX_OUTPUT] - 1.0), 0.0)
        return bounded

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int, predicted: float, now_s: float) -> None:
        """Nothing is emitted until `start`."""
        row = len(self._ids)
        self._rows.append([num_prompt_tokens, max_tokens, 0.0, now_s, 0.0, predicted])
        self._ids.append(request_id)
        self._row_of[request_id] = row
        self._changed.add(row)
        self.version += 1

    def start(self, request_id: str, tokens_per_s: float, now_s: float) -> int:
        """Its first token is there, and more will come at this rate. Returns 1, or 0 if that was known."""
        row = self._row_of.get(request_id)
        if row is None or self._rows[row][_EMITTED]:
            return 0
        self._rows[row][_EMITTED : _PER_S + 1] = (1.0, now_s, tokens_per_s)
        self._changed.add(row)
        return 1

    def progressed(self, request_id: str, num_output_tokens: int, now_s: float) -> int:
        """A report. Returns by how many tokens it is ahead of the last one."""
        row = self._row_of.get(request_id)
        if row is None:
            return 0
        emitted, at_s, per_s = self._rows[row][_EMITTED : _PER_S + 1]
        if num_output_tokens <= emitted:
            return 0
        if emitted and now_s - at_s > _MIN_RATE_S:
            per_s = (num_output_tokens - emitted) / (now_s - at_s)
        self._rows[row][_EMITTED : _PER_S + 1] = (num_output_tokens, now_s, per_s)
        self._changed.add(row)
        return int(num_output_tokens - emitted)

    def num_reported(self, request_id: str) -> int:
        """Tokens of the last report."""
        row = self._row_of.get(request_id)
        return 0 if row is None else int(self._rows[row][_EMITTED])

    def remove(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        last_id, last = self._ids.pop(), self._rows.pop()
        if last_id != request_id:
            self._rows[row], self._ids[row] = last, last_id
            self._row_of[last_id] = row
            self._changed.add(row)
        self.version += 1

    def _array(self, column: int) -> Floats:
        array: Floats = self._arrays()[column]
        return array

    def _arrays(self) -> Floats:
        """[6, sequences]."""
        num = len(self._rows)
        while num > self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        for row in self._changed:
            if row < num:
                self._columns[:, row] = self._rows[row]
        self._changed.clear()
        return self._columns[:, :num]
