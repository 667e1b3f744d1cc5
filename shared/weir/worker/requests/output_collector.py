"""What one gateway was sent of one sequence, and what it has yet to be sent.

    output tokens   0 ....... next_index ....... len(token_ids)
                    |-- sent --|--- to be sent --|   then the ending, once

Every token is kept until some time after the end, so whatever a slow or broken stream missed can be sent again; the
engine never waits for a gateway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from weir.core.logprobs import TokenLogprobs
from weir.engine.messages import FailureReason, SequenceEnded, SequenceForgotten, SequenceKey
from weir.rpc.conversions import finish_reason_to_pb, logprobs_to_pb
from weir.wire.v1 import types_pb2, worker_pb2

_FAILURES = {
    FailureReason.UNKNOWN_REQUEST: worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST,
    FailureReason.STALE_ATTEMPT: worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT,
    FailureReason.NO_CAPACITY: worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY,
    FailureReason.HAND_OFF_REFUSED: worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED,
    FailureReason.INTERNAL: worker_pb2.WORKER_ERROR_REASON_INTERNAL,
    FailureReason.DRAINING: worker_pb2.WORKER_ERROR_REASON_DRAINING,
}


@dataclass(slots=True, eq=False)
class OutputCollector:
    """Changed by its methods only. `next_index` is None while no stream asked for the sequence."""

    key: SequenceKey
    gateway_id: str
    token_ids: list[int] = field(default_factory=list)
    next_index: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; None before the first chunk."""
    ending: SequenceEnded | SequenceForgotten | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, or none at all."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a prompt token, from number 1 on: 0 has none."""
    ended_at_s: float = 0.0
    is_cancel_posted: bool = False
    _num_prompt_sent: int = 0
    _is_ending_sent: bool = False

    @property
    def has_updates(self) -> bool:
        if self.next_index is None:
            return False
        if self.next_index < len(self.token_ids) or self._num_prompt_sent < len(self.prompt_logprobs):
            return True
        return self.ending is not None and not self._is_ending_sent

    def resume(self, next_index: int) -> None:
        """A stream asks for everything from `next_index` on."""
        self.next_index = next_index
        self._num_prompt_sent = 0
        self._is_ending_sent = False

    def pause(self) -> None:
        """The stream is gone; how much of it the gateway has got is not known."""
        self.next_index = None

    def add_token(self, index: int, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        assert index == len(self.token_ids), f"token {index} follows {len(self.token_ids)} tokens"
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def add_prompt_logprobs(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        assert first_index == len(self.prompt_logprobs) + 1, f"{first_index} follows {len(self.prompt_logprobs)}"
        self.prompt_logprobs.extend(logprobs)

    def add_chunk(self, start: int) -> None:
        """Prompt tokens from `start` on were computed: before the first chunk lies what was cached."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = start

    def end(self, ending: SequenceEnded | SequenceForgotten, now_s: float) -> None:
        self.ending = ending
        self.ended_at_s = now_s

    def take_update(self, max_tokens: int) -> worker_pb2.SequenceUpdate:
        """What is new, as sent: at most `max_tokens` tokens, the ending after the last one."""
        assert self.next_index is not None, "nobody asked for it"
        first_index = self.next_index
        token_ids = self.token_ids[first_index : first_index + max_tokens]
        self.next_index = first_index + len(token_ids)
        is_last = self.ending is not None and self.next_index >= len(self.token_ids)
        self._is_ending_sent = is_last
        update = ending_to_pb(self.ending) if self.ending is not None and is_last else _update_of(self.key)
        update.first_index = first_index
        update.token_ids.extend(token_ids)
        update.logprobs.extend(map(logprobs_to_pb, self.logprobs[first_index : self.next_index]))
        update.num_cached_tokens = self.num_cached_tokens or 0
        update.first_prompt_index = self._num_prompt_sent + 1
        update.prompt_logprobs.extend(map(logprobs_to_pb, self.prompt_logprobs[self._num_prompt_sent :]))
        self._num_prompt_sent = len(self.prompt_logprobs)
        return update


def ending_to_pb(ending: SequenceEnded | SequenceForgotten) -> worker_pb2.SequenceUpdate:
    """An update that has nothing but how a sequence ended on this worker."""
    update = _update_of(ending.key)
    if isinstance(ending, SequenceForgotten):
        update.handed_off = True
        return update
    update.finish_reason = finish_reason_to_pb(ending.reason)
    if ending.failure is not None:
        update.error.reason = _FAILURES[ending.failure.reason]
        update.error.message = ending.failure.message
    return update


def _update_of(key: SequenceKey) -> worker_pb2.SequenceUpdate:
    attempt = types_pb2.Attempt(dispatch=key.attempt.dispatch, adoption=key.attempt.adoption)
    return worker_pb2.SequenceUpdate(request_id=key.request_id, attempt=attempt)
