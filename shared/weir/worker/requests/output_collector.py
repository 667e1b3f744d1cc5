"""What one gateway has been told of one sequence, and what it has yet to be told.

    output tokens   0 ....... next_index ....... len(token_ids)
                    |-- sent --|---- news ------|   then the end, once

Every token is kept until some time after the end, so whatever a slow or broken stream missed can be said again; the
engine never waits for a gateway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from weir.core.life import FinishReason
from weir.core.logprobs import TokenLogprobs
from weir.engine.messages import Failure, SequenceKey


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How a sequence ended here. Exactly one field is set."""

    reason: FinishReason | None = None
    failure: Failure | None = None
    is_handed_off: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """News of one sequence."""

    key: SequenceKey
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    ending: SequenceEnd | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry a token, or none at all."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    first_prompt_index: int = 1


@dataclass(slots=True, eq=False)
class OutputCollector:
    """Changed by its methods only. `next_index` is None while no stream asked for the sequence."""

    key: SequenceKey
    gateway_id: str
    token_ids: list[int] = field(default_factory=list)
    next_index: int | None = None
    num_cached_tokens: int | None = None
    """Of the prompt, found and not computed; None before its first chunk."""
    ending: SequenceEnd | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, or none at all."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from number 1 on."""
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
        """The stream is gone; what it had not read is not known."""
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

    def end(self, ending: SequenceEnd, now_s: float) -> None:
        self.ending = ending
        self.ended_at_s = now_s

    def take_update(self, max_tokens: int) -> Update:
        """What is new, as sent: at most `max_tokens` tokens, the ending after the last one."""
        assert self.next_index is not None, "nobody asked for it"
        first_index = self.next_index
        token_ids = tuple(self.token_ids[first_index : first_index + max_tokens])
        self.next_index = first_index + len(token_ids)
        ending = self.ending if self.next_index >= len(self.token_ids) else None
        self._is_ending_sent = ending is not None
        num_prompt_sent, self._num_prompt_sent = self._num_prompt_sent, len(self.prompt_logprobs)
        return Update(
            key=self.key,
            first_index=first_index,
            token_ids=token_ids,
            ending=ending,
            num_cached_tokens=self.num_cached_tokens or 0,
            logprobs=tuple(self.logprobs[first_index : self.next_index]),
            prompt_logprobs=tuple(self.prompt_logprobs[num_prompt_sent:]),
            first_prompt_index=num_prompt_sent + 1,
        )
