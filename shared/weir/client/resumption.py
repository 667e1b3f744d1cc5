"""An answer whose stream broke, sent again from where it was: for requests with an idempotency key. No I/O."""

import time
from collections.abc import Callable
from dataclasses import replace

from weir.client.messages import Chunk
from weir.core.errors import Unavailable, WeirError
from weir.core.options import GenerateOptions

_MAX_IN_VAIN = 20
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0


class Resumption:
    """One answer, over as many calls as it takes until `timeout_s` after its first."""

    def __init__(
        self, options: GenerateOptions, timeout_s: float, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._now_s = now_s
        self._ends_at_s = now_s() + timeout_s
        self._next_index = options.resume_from or 0
        self._is_again = False
        self._num_in_vain = 0
        self._has_end = False

    @property
    def options(self) -> GenerateOptions:
        """Of the next call."""
        return replace(self._options, resume_from=self._next_index) if self._is_again else self._options

    @property
    def left_s(self) -> float:
        return max(0.001, self._ends_at_s - self._now_s())

    def had(self, chunk: Chunk) -> None:
        self._has_end = chunk.finish_reason is not None
        if chunk.token_ids:
            self._next_index = chunk.first_index + len(chunk.token_ids)
            self._num_in_vain = 0

    def try_pause_s(self, error: WeirError) -> float | None:
        """How long to wait before the next call; None: there is none, and the error is the answer's."""
        self._num_in_vain += 1
        pause_s = error.retry_after_s or min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_in_vain)
        may_go_on = bool(self._options.idempotency_key) and not self._has_end and isinstance(error, Unavailable)
        if not may_go_on or self._num_in_vain > _MAX_IN_VAIN or pause_s >= self.left_s:
            return None
        self._is_again = True
        return pause_s
