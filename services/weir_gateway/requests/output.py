"""From the workers' tokens to what the client gets: in order, as text, cut at stop strings, told apart into parts.

    tokens ─> TokenOrder ─> detokenizer ─> StopMatcher ─> AnswerParser ─> OutputDelta

A stop string counts wherever it comes in the text, in a call too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from weir.core.life import Attempt, FinishReason
from weir.core.sampling import TokenLogprobs
from weir.rpc.conversions import all_logprobs_from_pb, finish_reason_from_pb
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.answers.events import AnswerEvent, ToolCallBegan, ToolCallEnded, join_events
from weir_gateway.requests.text_parts import TextParts, text_parts_of
from weir_gateway.requests.token_order import TokenOrder
from weir_gateway.requests.validation import CheckedRequest


@dataclass(slots=True)
class OutputDelta:
    """Output of one choice that its client has not got yet. Text lags behind the tokens by what may still change."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """With the markers of what it holds, if they are tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In a choice's first delta with a token, where they were asked for."""
    finish_reason: FinishReason | None = None
    """Set in the last delta of a choice."""
    choice: int = 0
    is_last: bool = False
    """Whether nothing follows, of any choice."""
    events: list[AnswerEvent] | None = None
    """What the text is made of; they lag behind it. None: nobody asked for anything but text."""

    @property
    def shows_something(self) -> bool:
        """To a client that reads text."""
        return bool(self.text if self.events is None else self.events)


class Output:
    """The output of one request. What the client has not taken yet grows as one delta, bounded by max_tokens.

    Without stop strings tokens become text when they are taken: several that gathered, at once.
    """

    def __init__(
        self,
        order: TokenOrder,
        parts: TextParts,
        *,
        has_logprobs: bool = False,
        min_tokens: int = 0,
        make_anew: Callable[[], TextParts] | None = None,
    ) -> None:
        """A stop string counts only after `min_tokens` tokens. With `make_anew` it keeps what `rewind` needs."""
        self._order = order
        self._detokenizer, self._stops, self._parser = parts
        self.has_parts = self._parser is not None
        """Whether its deltas say what their text is made of."""
        self._has_logprobs = has_logprobs
        self._min_tokens = min_tokens
        self._pending = self._new_delta(0)
        self._num_without_text = 0
        """The last tokens of it, which are not text yet."""
        self._logprobs: dict[int, TokenLogprobs] = {}
        """By output index, of tokens that are not in order yet."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_tokens = 0
        self._finish_reason: FinishReason | None = None
        self.matched_stop: str | None = None
        """The stop string that ended it, if one did."""
        self.num_calls = 0
        """Of tools, that are complete."""
        self._num_begun_calls = 0
        self.num_reasoning_tokens = 0
        """Of `num_tokens`, with the markers of reasoning."""
        self._make_anew = make_anew
        self._begins_at = 0
        """The client has all tokens before this one."""
        self.num_skipped_chars = 0
        """Of text, which the client has."""

    @classmethod
    def of(cls, checked: CheckedRequest) -> "Output":
        options, stop_rules = checked.client_request.options, checked.stop_rules
        make = partial(text_parts_of, checked)
        return cls(
            TokenOrder(Attempt(1), stop_rules.max_tokens),
            make(),
            has_logprobs=options.logprobs is not None,
            min_tokens=stop_rules.min_tokens,
            make_anew=make if options.idempotency_key else None,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far. A stop string can end it before the workers' last token."""
        return self._num_tokens

    @property
    def ends_with_calls(self) -> bool:
        """Whether it ended of itself, after calls of tools of which none is cut off."""
        has_calls = 0 < self.num_calls == self._num_begun_calls
        return has_calls and self._finish_reason is FinishReason.STOP

    @property
    def next_index(self) -> int:
        return self._order.next_index

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens that the workers have sampled, as far as they are in order."""
        return self._order.token_ids

    @property
    def has_gap(self) -> bool:
        return self._order.has_gap

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set with the last token."""
        return self._finish_reason

    def push(self, attempt: Attempt, update: worker_pb2.SequenceUpdate) -> bool:
        """Of this attempt, which the update names. Returns whether there is something new for the client. Raises
        TokenConflict."""
        if self._finish_reason is not None:
            return False
        finish_reason = update.finish_reason
        end = output_end_from_pb(finish_reason) if finish_reason else None
        ready = self._order.push(attempt, update.first_index, update.token_ids[:], end)
        if self._has_logprobs or not self._num_tokens:
            self._keep_logprobs(update)
        self._append(ready)
        if self._order.finish_reason is not None:
            self.end(self._order.finish_reason)
        return bool(ready) or self._finish_reason is not None

    def drop_ahead(self) -> None:
        """Forgets what came after a gap: it is to be computed again, after what is in order."""
        self._order.drop_ahead()
        self._logprobs = {index: entry for index, entry in self._logprobs.items() if index < self._num_tokens}

    def rewind(self, first_index: int) -> None:
        """It is taken from this token on, by a client that has what comes before; whatever was taken is there again.

        Raises ValueError for an output that has not kept it.
        """
        if self._make_anew is None:
            raise ValueError("this output is taken once")
        reason, self._finish_reason = self._finish_reason, None
        self.matched_stop = None
        self._detokenizer, self._stops, self._parser = self._make_anew()
        self._pending, self._num_tokens, self._num_without_text = self._new_delta(0), 0, 0
        self.num_calls = self._num_begun_calls = self.num_reasoning_tokens = 0
        self._begins_at, self.num_skipped_chars = first_index, 0
        self._append(self._order.token_ids)
        if reason is not None:
            self.end(reason)

    @property
    def ends_early(self) -> bool:
        """Whether it ended before the token that the client wants next."""
        return self._finish_reason is not None and self._num_tokens < self._begins_at

    def end(self, reason: FinishReason) -> None:
        """What is there is all, although no worker has said so."""
        if self._finish_reason is None:
            self._finish_reason = reason
            self._end_text()

    def try_take(self) -> OutputDelta | None:
        """What came since the last call. None: nothing, unless the output has ended: then there is always a last one,
        after which there must be no further call."""
        delta = self._pending
        if not (delta.token_ids or delta.text or self._finish_reason):
            return None
        self._make_text()
        self._pending = self._new_delta(self._num_tokens)
        delta.finish_reason = self._finish_reason
        if delta.token_ids and delta.first_index == 0:
            delta.prompt_logprobs = tuple(self._prompt_logprobs)
            if self._make_anew is None:
                self._prompt_logprobs = []
        return delta

    def _keep_logprobs(self, update: worker_pb2.SequenceUpdate) -> None:
        """Those of tokens that were there before are dropped."""
        if self._has_logprobs:
            for index, logprobs in enumerate(all_logprobs_from_pb(update.logprobs), start=update.first_index):
                if index >= self._num_tokens:
                    self._logprobs[index] = logprobs
        if self._num_tokens:
            return
        num_known = len(self._prompt_logprobs)
        if 1 <= update.first_prompt_index <= num_known + 1:
            new = update.prompt_logprobs[num_known + 1 - update.first_prompt_index :]
            self._prompt_logprobs.extend(all_logprobs_from_pb(new))

    def _append(self, token_ids: Sequence[int]) -> None:
        num_had = self._begins_at - self._num_tokens
        if num_had > 0:
            self._add(token_ids[:num_had])
            self._make_text()
            self.num_skipped_chars += len(self._pending.text)
            self._pending = self._new_delta(self._num_tokens)
            token_ids = token_ids[num_had:]
        if self._finish_reason is None:
            self._add(token_ids)

    def _add(self, token_ids: Sequence[int]) -> None:
        for place, token_id in enumerate(token_ids):
            if not (self._stops.is_active or self._may_reason):
                self._add_without_text(token_ids[place:])
                return
            self._add_token(token_id)
            was_reasoning = self._is_reasoning
            is_stopped = self._stopped_by(self._detokenizer.push([token_id]))
            self.num_reasoning_tokens += was_reasoning or self._is_reasoning
            if is_stopped:
                return

    def _add_without_text(self, token_ids: Sequence[int]) -> None:
        self._num_without_text += len(token_ids)
        if self._has_logprobs:
            for token_id in token_ids:
                self._add_token(token_id)
        else:
            self._pending.token_ids.extend(token_ids)
            self._num_tokens += len(token_ids)

    @property
    def _may_reason(self) -> bool:
        """While it is so each token is looked at alone, to be counted."""
        return self._parser is not None and self._parser.may_reason

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    def _make_text(self) -> None:
        if self._num_without_text:
            self._emit(self._detokenizer.push(self._pending.token_ids[-self._num_without_text :]))
            self._num_without_text = 0

    def _add_token(self, token_id: int) -> None:
        self._pending.token_ids.append(token_id)
        if self._has_logprobs:
            take = self._logprobs.pop if self._make_anew is None else self._logprobs.get
            known = take(self._num_tokens, None)
            self._pending.logprobs.append(known or TokenLogprobs.unknown(token_id))
        self._num_tokens += 1

    def _stopped_by(self, text: str) -> bool:
        result = self._stops.push(text, is_armed=self._num_tokens > self._min_tokens)
        self._emit(result.text)
        if result.matched is not None:
            self._finish_reason = FinishReason.STOP
            self.matched_stop = result.matched
            self._end_parts()
        return result.matched is not None

    def _end_text(self) -> None:
        """The detokenizer's rest can complete a stop string; what is held back after it is output."""
        self._make_text()
        if not self._stopped_by(self._detokenizer.finish()):
            self._emit(self._stops.finish())
            self._end_parts()

    def _new_delta(self, first_index: int) -> OutputDelta:
        return OutputDelta(first_index, events=[] if self.has_parts else None)

    def _emit(self, text: str) -> None:
        self._pending.text += text
        if self._parser is not None and text:
            self._add_events(self._parser.feed(text))

    def _end_parts(self) -> None:
        parser, self._parser = self._parser, None
        if parser is not None:
            self._add_events(parser.finish())

    def _add_events(self, events: Sequence[AnswerEvent]) -> None:
        self._num_begun_calls += sum(isinstance(event, ToolCallBegan) for event in events)
        self.num_calls += sum(isinstance(event, ToolCallEnded) for event in events)
        if self._pending.events is not None:
            self._pending.events += events


def output_end_from_pb(value: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for what is no end of an output that a worker knows: not ended, cancelled, and calls of tools."""
    reason = finish_reason_from_pb(value)
    return None if reason in (FinishReason.CANCELLED, FinishReason.TOOL_CALLS) else reason


def joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """All of one choice as one; at least one, in order."""
    are_parsed = deltas[0].events is not None
    return OutputDelta(
        first_index=deltas[0].first_index,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        events=join_events(event for delta in deltas for event in delta.events or ()) if are_parsed else None,
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        finish_reason=deltas[-1].finish_reason,
        choice=deltas[0].choice,
    )
