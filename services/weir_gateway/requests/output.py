"""From the workers' tokens to what the client gets: in order, as text, cut at stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weir.core.attempt import Attempt
from weir.core.life import FinishReason
from weir.core.logprobs import TokenLogprobs
from weir_gateway.requests.stops import StopMatcher
from weir_gateway.requests.tokens import TokenOrder


class Detokenizer(Protocol):
    """Turns a growing sequence of ids into text, never half a character (`weir.model.tokens.tokenizer`)."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(slots=True)
class OutputPiece:
    """Tokens and text that wait to be sent. Text lags behind the tokens by what may still change."""

    first_index: int
    token_ids: list[int]
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the first piece with a token, where they were asked for."""

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.text)


class TokenUpdate(NamedTuple):
    """What a worker says of one request."""

    attempt: Attempt
    first_index: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    """One entry a token, or none at all."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    first_prompt_index: int = 0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Whether log-probabilities are told, and after how many tokens a stop string counts."""

    has_logprobs: bool = False
    min_tokens: int = 0


class Output:
    """The output of one request. What the client has not taken yet grows in one piece, bounded by max_tokens."""

    def __init__(
        self, order: TokenOrder, detokenizer: Detokenizer, stops: StopMatcher, output_options: OutputOptions
    ) -> None:
        self._order = order
        self._detokenizer = detokenizer
        self._stops = stops
        self._output_options = output_options
        self._pending = OutputPiece(0, [])
        self._logprobs: dict[int, TokenLogprobs] = {}
        """By output index, of tokens that are not in order yet."""
        self._prompt_logprobs: list[TokenLogprobs] = []
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

    def push(self, update: TokenUpdate) -> bool:
        """Returns whether there is something new for the client. Raises TokenConflict."""
        if self._finish_reason is not None:
            return False
        ready = self._order.push(update.attempt, update.first_index, update.token_ids, update.finish_reason)
        self._keep_logprobs(update)
        self._take(ready)
        if self._finish_reason is None and self._order.finish_reason is not None:
            self._finish_reason = self._order.finish_reason
            self._end_text()
        return bool(ready) or self._finish_reason is not None

    def take(self) -> OutputPiece:
        """What came since the last call, as one piece."""
        piece = self._pending
        self._pending = OutputPiece(self._num_tokens, [])
        if piece.token_ids:
            piece.prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return piece

    def _keep_logprobs(self, update: TokenUpdate) -> None:
        """Those of tokens that were there before are dropped."""
        if self._output_options.has_logprobs:
            for index, logprobs in enumerate(update.logprobs, start=update.first_index):
                if index >= self._num_tokens:
                    self._logprobs[index] = logprobs
        num_known = len(self._prompt_logprobs)
        if self._num_tokens == 0 and 1 <= update.first_prompt_index <= num_known + 1:
            self._prompt_logprobs.extend(update.prompt_logprobs[num_known + 1 - update.first_prompt_index :])

    def _take(self, token_ids: Sequence[int]) -> None:
        if not self._stops.is_active:
            self._pending.text += self._detokenizer.push(token_ids)
            for token_id in token_ids:
                self._add_token(token_id)
            return
        for token_id in token_ids:
            self._add_token(token_id)
            if self._stopped_by(self._detokenizer.push([token_id])):
                return

    def _add_token(self, token_id: int) -> None:
        self._pending.token_ids.append(token_id)
        if self._output_options.has_logprobs:
            known = self._logprobs.pop(self._num_tokens, None)
            self._pending.logprobs.append(known or TokenLogprobs.unknown(token_id))
        self._num_tokens += 1

    def _stopped_by(self, text: str) -> bool:
        result = self._stops.push(text, is_armed=self._num_tokens > self._output_options.min_tokens)
        self._pending.text += result.text
        if result.matched is not None:
            self._finish_reason = FinishReason.STOP
        return result.matched is not None

    def _end_text(self) -> None:
        """The detokenizer's rest can complete a stop string; what is held back after it is output."""
        if not self._stopped_by(self._detokenizer.finish()):
            self._pending.text += self._stops.finish()
