"""Answers as Anthropic's Messages API has them: the object, and the events of a stream.

message_start, content_block_start, ping          of several parts blocks begin when they come (`blocks`)
content_block_delta, as often as there is text
content_block_stop, message_delta, message_stop
… or, wherever it fails: error
"""

from dataclasses import dataclass

from weir.core.errors import WeirError
from weir.core.life import FinishReason
from weir_gateway.frontends.error_forms import anthropic_error_body
from weir_gateway.frontends.openai.render import Json
from weir_gateway.frontends.typed_events import TextEvents, typed_event, typed_events

_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


@dataclass(frozen=True, slots=True)
class MessageUsage:
    """What a message used; `num_cached` of the prompt's tokens were cached, and Anthropic does not count these in."""

    num_prompt: int
    num_cached: int
    num_output: int = 0

    def json(self) -> Json:
        return {
            "input_tokens": self.num_prompt - self.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached,
            "output_tokens": self.num_output,
        }


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """Why a message ended. `stop_sequence`: the one that was reached, if any."""

    finish_reason: FinishReason | None
    stop_sequence: str | None
    has_calls: bool = False
    """Whether it ended of itself, with calls of tools."""

    def json(self) -> Json:
        if self.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self.stop_sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_sequence}
        reason = None if self.finish_reason is None else _STOP_REASONS.get(self.finish_reason, "max_tokens")
        return {"stop_reason": reason, "stop_sequence": None}


_NOT_ENDED = MessageEnd(None, None)


@dataclass(frozen=True, slots=True)
class MessageRenderer:
    """Of one answer. `correlation_id` names the request in an error."""

    request_id: str
    model: str
    correlation_id: str

    def whole(self, content: list[Json], end: MessageEnd, usage: MessageUsage) -> Json:
        return self._message(content, end, usage)

    def opening(self, usage: MessageUsage, *, has_text: bool = True) -> bytes:
        """`has_text`: it is one block of text, which begins with it."""
        begun = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return typed_events(
            [
                {"type": "message_start", "message": self._message([], _NOT_ENDED, usage)},
                *([begun] if has_text else []),
                {"type": "ping"},
            ]
        )

    def texts(self) -> TextEvents:
        delta = {"type": "text_delta", "text": TextEvents.TEXT}
        return TextEvents({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, end: MessageEnd, usage: MessageUsage, *, has_text: bool = True) -> bytes:
        return typed_events(
            [
                *([{"type": "content_block_stop", "index": 0}] if has_text else []),
                {"type": "message_delta", "delta": end.json(), "usage": usage.json()},
                {"type": "message_stop"},
            ]
        )

    def failure(self, error: WeirError) -> bytes:
        return typed_event(anthropic_error_body(error, self.correlation_id))

    def _message(self, content: list[Json], end: MessageEnd, usage: MessageUsage) -> Json:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end.json(),
            "usage": usage.json(),
        }
