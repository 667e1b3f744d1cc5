"""From the workers' tokens to what the client gets: in order, as text, cut at stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from weir.core.attempt import Attempt
from weir.core.life import FinishReason
from weir.core.logprobs import TokenLogprobs
from weir.rpc.conversions import all_logprobs_from_pb, attempt_from_pb
from weir.wire.v1 import worker_pb2
from weir_gateway.requests.models import Detokenizer
from weir_gateway.requests.stop_matcher import StopMatcher
from weir_gateway.requests.token_order import TokenOrder
from weir_gateway.requests.validation import CheckedRequest
from weir_gateway.workers.wire import output_end_from_pb


@dataclass(slots=True)
class OutputDelta:
    """Output of one choice that its client has not got yet. Text lags behind the tokens by what may still change."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In a choice's first delta with a token, where they were asked for."""
    finish_reason: FinishReason | None = None
    """Set in the last delta of a choice."""
    choice: int = 0
    is_last: bool = False
    """Whether nothing follows, of any choice."""


class Output:
    """The output of one request. What the client has not taken yet grows as one delta, bounded by max_tokens."""

    def __init__(
        self,
        order: TokenOrder,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        has_logprobs: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """A stop string counts only after `min_tokens` tokens."""
        self._order = order
        self._detokenizer = detokenizer
        self._stops = stops
        self._has_logprobs = has_logprobs
        self._min_tokens = min_tokens
        self._pending = OutputDelta(0)
        self._logprobs: dict[int, TokenLogprobs] = {}
        """By output index, of tokens that are not in order yet."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_tokens = 0
        self._finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, checked: CheckedRequest) -> "Output":
        options, stop_rules = checked.client_request.options, checked.stop_rules
        return cls(
            TokenOrder(Attempt(1), stop_rules.max_tokens),
            checked.model.tokenizer.detokenizer(),
            StopMatcher(options.stop, is_included=options.include_stop),
            has_logprobs=options.logprobs is not None,
            min_tokens=stop_rules.min_tokens,
        )

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
    def finish_reason(self) -> FinishReason | None:
        """Set with the last token."""
        return self._finish_reason

    def push(self, update: worker_pb2.SequenceUpdate) -> bool:
        """Returns whether there is something new for the client. Raises TokenConflict."""
        if self._finish_reason is not None:
            return False
        end = output_end_from_pb(update.finish_reason)
        ready = self._order.push(attempt_from_pb(update.attempt), update.first_index, update.token_ids, end)
        self._keep_logprobs(update)
        self._append(ready)
        if self._finish_reason is None and self._order.finish_reason is not None:
            self._finish_reason = self._order.finish_reason
            self._end_text()
        return bool(ready) or self._finish_reason is not None

    def try_take(self) -> OutputDelta | None:
        """What came since the last call. None: nothing, unless the output has ended: then there is always a last one,
        after which there must be no further call."""
        delta = self._pending
        if not (delta.token_ids or delta.text or self._finish_reason):
            return None
        self._pending = OutputDelta(self._num_tokens)
        delta.finish_reason = self._finish_reason
        if delta.token_ids:
            delta.prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return delta

    def _keep_logprobs(self, update: worker_pb2.SequenceUpdate) -> None:
        """Those of tokens that were there before are dropped."""
        if self._has_logprobs:
            for index, logprobs in enumerate(all_logprobs_from_pb(update.logprobs), start=update.first_index):
                if index >= self._num_tokens:
                    self._logprobs[index] = logprobs
        num_known = len(self._prompt_logprobs)
        if self._num_tokens == 0 and 1 <= update.first_prompt_index <= num_known + 1:
            new = update.prompt_logprobs[num_known + 1 - update.first_prompt_index :]
            self._prompt_logprobs.extend(all_logprobs_from_pb(new))

    def _append(self, token_ids: Sequence[int]) -> None:
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
        if self._has_logprobs:
            known = self._logprobs.pop(self._num_tokens, None)
            self._pending.logprobs.append(known or TokenLogprobs.unknown(token_id))
        self._num_tokens += 1

    def _stopped_by(self, text: str) -> bool:
        result = self._stops.push(text, is_armed=self._num_tokens > self._min_tokens)
        self._pending.text += result.text
        if result.matched is not None:
            self._finish_reason = FinishReason.STOP
        return result.matched is not None

    def _end_text(self) -> None:
        """The detokenizer's rest can complete a stop string; what is held back after it is output."""
        if not self._stopped_by(self._detokenizer.finish()):
            self._pending.text += self._stops.finish()


def joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """All of one choice as one; at least one, in order."""
    return OutputDelta(
        first_index=deltas[0].first_index,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        finish_reason=deltas[-1].finish_reason,
        choice=deltas[0].choice,
    )
