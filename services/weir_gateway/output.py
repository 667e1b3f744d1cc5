"""From the workers' tokens to what the client gets: in order, as text, cut at stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.core.attempt import Attempt
from weir_gateway.stops import StopMatcher
from weir_gateway.tokens import FinishReason, TokenOrder


class Detokenizer(Protocol):
    """Turns a growing sequence of ids into text, never half a character (`weir.model.tokenizer`)."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(slots=True)
class Piece:
    """Tokens and text that wait to be sent. Text lags behind the tokens by what may still change."""

    first_index: int
    token_ids: list[int]
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.text)


class Output:
    """The output of one request. What the client has not taken yet grows in one piece, bounded by max_tokens."""

    def __init__(self, order: TokenOrder, detokenizer: Detokenizer, stops: StopMatcher) -> None:
        self._order = order
        self._detokenizer = detokenizer
        self._stops = stops
        self._pending = Piece(0, [])
        self._num_tokens = 0
        self._finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far. A stop string can end it before the workers' last token."""
        return self._num_tokens

    @property
    def next_index(self) -> int:
        return self._order.next_index

    @property
    def has_gap(self) -> bool:
        return self._order.has_gap

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set with the last token."""
        return self._finish_reason

    def push(
        self,
        attempt: Attempt,
        first_index: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        """Returns whether there is something new for the client. Raises TokenConflict."""
        if self._finish_reason is not None:
            return False
        ready = self._order.push(attempt, first_index, token_ids, finish_reason)
        self._take(ready)
        if self._finish_reason is None and self._order.finish_reason is not None:
            self._finish_reason = self._order.finish_reason
            self._end_text()
        return bool(ready) or self._finish_reason is not None

    def take(self) -> Piece:
        """What came since the last call, as one piece."""
        piece = self._pending
        self._pending = Piece(self._num_tokens, [])
        return piece

    def _take(self, token_ids: Sequence[int]) -> None:
        if not self._stops.is_active:
            self._pending.text += self._detokenizer.push(token_ids)
            self._pending.token_ids.extend(token_ids)
            self._num_tokens += len(token_ids)
            return
        for token_id in token_ids:
            self._pending.token_ids.append(token_id)
            self._num_tokens += 1
            if self._stopped_by(self._detokenizer.push([token_id])):
                return

    def _stopped_by(self, text: str) -> bool:
        result = self._stops.push(text)
        self._pending.text += result.text
        if result.matched is not None:
            self._finish_reason = FinishReason.STOP
        return result.matched is not None

    def _end_text(self) -> None:
        """The detokenizer's rest can complete a stop string; what is held back after it is output."""
        if not self._stopped_by(self._detokenizer.finish()):
            self._pending.text += self._stops.finish()
