"""Which tokens may come next in each sequence of a step, found out in a thread beside the step's forward pass.

    engine's thread   accept(token) ... begin(states) ── forward pass ──> allowed(): waits, seldom
    masks' thread                         └ accept, fill of each ─────────┘

What a state knows follows from the grammar and the output's tokens alone, so whoever has these can make it again.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from weir.core.errors import InternalError
from weir.grammar.protocol import ALL_TOKENS, Matcher, Words

_MASK_TIMEOUT_S = 30.0
"""Far above what the engine's limits allow for a batch: whoever waits longer waits for a thread that hangs."""


class GrammarState:
    """Where a sequence stands. All is called in the engine's thread but `fill`."""

    def __init__(self, matcher: Matcher, output_token_ids: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._unread = list(output_token_ids)
        self.error = ""
        """Why the sequence cannot go on, since its last mask; empty: it can."""
        self._mask: tuple[Future[None], Words] | None = None

    def accept(self, token_id: int) -> None:
        """The output's next token, which the mask before it allowed."""
        self._unread.append(token_id)

    def allowed(self) -> Words:
        """Of the step that was begun with `MaskFiller.begin`; not to be changed. All tokens, once there is an `error`.

        Raises InternalError: no step was begun, or its masks do not come.
        """
        if self._mask is None:
            raise InternalError("a token with a grammar was planned without a mask")
        filled, words = self._mask
        try:
            filled.result(_MASK_TIMEOUT_S)
        except TimeoutError:
            raise InternalError(f"the mask of a grammar did not come within {_MASK_TIMEOUT_S:g} s") from None
        return words

    def attach(self, filled: "Future[None]", words: Words) -> None:
        """`words` are its own once `filled` is done."""
        self._mask = filled, words

    def fill(self, words: Words) -> None:
        """In the masks' thread, or, where nothing else runs, in any. Raises nothing: a step has other sequences."""
        unread, self._unread = self._unread, []
        try:
            if unread:
                self._matcher.accept(unread)
            self._matcher.fill(words)
            self.error = self._matcher.error
        except BaseException as error:  # noqa: BLE001 - a panic of the engine is none of Exception
            self.error = f"{type(error).__name__}: {error}"
            words.fill(ALL_TOKENS)


class UnusableGrammar:
    """The matcher of a grammar that cannot be had: its sequence ends with this error when it would get a token."""

    def __init__(self, error: str) -> None:
        self.error = error

    def accept(self, token_ids: Sequence[int]) -> None:
        """It stays where it is."""

    def fill(self, words: Words) -> None:
        words.fill(ALL_TOKENS)


class MaskFiller:
    """Owns the thread. Counts what masks took."""

    def __init__(self, num_words: int) -> None:
        """`num_words` a mask: `weir.grammar.protocol.num_mask_words`."""
        self._num_words = num_words
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._num_masks = 0
        self._seconds = 0.0

    def begin(self, states: Sequence[GrammarState]) -> None:
        """Starts on the masks of a step; each of `states` has its own afterwards."""
        if not states:
            return
        if self._executor is None:  # most workers never need it
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="masks")
        words = np.zeros((len(states), self._num_words), np.uint32)
        filled = self._executor.submit(self._fill, tuple(states), words)
        for state, row in zip(states, words, strict=True):
            state.attach(filled, row)

    def metrics(self) -> dict[str, float]:
        with self._lock:
            return {"grammar_masks_total": float(self._num_masks), "grammar_mask_s_total": self._seconds}

    def close(self) -> None:
        """Nothing is begun afterwards."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _fill(self, states: Sequence[GrammarState], words: Words) -> None:
        began_s = time.perf_counter()
        for state, row in zip(states, words, strict=True):
            state.fill(row)
        with self._lock:
            self._num_masks += len(states)
            self._seconds += time.perf_counter() - began_s
