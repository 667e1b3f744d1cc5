"""Answers in the forms of OpenAI's API: whole, in chunks, and errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weir.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir.core.life import FinishReason
from weir.core.logprobs import TokenLogprobs
from weir_gateway.frontends.openai_logprobs import LogprobsRenderer
from weir_gateway.requests.client_request import Operation
from weir_gateway.requests.output import OutputDelta

Json = dict[str, Any]

_MAX_MESSAGE_CHARS = 2000

# error -> HTTP status, `type`, `code`
_ERRORS: tuple[tuple[type[WeirError], int, str, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PermissionDenied, 403, "permission_error", "permission_denied"),
    (NotFound, 404, "not_found_error", "not_found"),
    (QuotaExceeded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (Cancelled, 499, "cancelled_error", "cancelled"),
    (Unavailable, 503, "service_unavailable", "unavailable"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (WeirError, 500, "internal_error", "internal"),
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    def to_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class AnswerRenderer:
    """Renders one answer; `created_s` is Unix time."""

    operation: Operation
    request_id: str
    model: str
    created_s: int
    includes_usage: bool = False
    logprobs: LogprobsRenderer | None = None

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> Json:
        """The answer that is not streamed; `outputs` are its choices in order, complete."""
        choices = [self._whole_choice(output) for output in outputs]
        return {**self._head(is_chunk=False), "choices": choices, "usage": usage.to_json()}

    def opening(self, num_choices: int) -> list[Json]:
        """What a stream begins with, before any text."""
        if self.operation is Operation.CHAT:
            content: Json = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            return [self._chunk(choice, content, None) for choice in range(num_choices)]
        return []

    def chunk(self, delta: OutputDelta, text_offset: int) -> Json:
        """Part of a choice, the last one with a finish reason. `text_offset`: characters of the choice before it."""
        logprobs = self._logprobs_json(delta.logprobs, text_offset) if delta.token_ids else None
        if self.operation is Operation.TEXT_COMPLETION:
            content: Json = {"text": delta.text}
        else:
            content = {"delta": {"content": delta.text} if delta.text else {}}
        return self._chunk(delta.choice, {**content, "logprobs": logprobs}, delta.finish_reason)

    def closing(self, usage: Usage) -> list[Json]:
        """What follows the last delta: the token counts, if they were asked for."""
        if not self.includes_usage:
            return []
        return [{**self._head(is_chunk=True), "choices": [], "usage": usage.to_json()}]

    def _whole_choice(self, output: OutputDelta) -> Json:
        if self.operation is Operation.CHAT:
            content: Json = {"message": {"role": "assistant", "content": output.text, "refusal": None}}
        else:
            content = {"text": output.text}
        choice = self._choice(
            output.choice, {**content, "logprobs": self._logprobs_json(output.logprobs, 0)}, output.finish_reason
        )
        if output.prompt_logprobs and self.logprobs is not None:
            choice["prompt_logprobs"] = self.logprobs.prompt_json(output.prompt_logprobs)
        return choice

    def _logprobs_json(self, logprobs: Sequence[TokenLogprobs], text_offset: int) -> Json | None:
        if not logprobs or self.logprobs is None:
            return None
        if self.operation is Operation.CHAT:
            return self.logprobs.chat_json(logprobs)
        return self.logprobs.completion_json(logprobs, text_offset)

    def _chunk(self, choice: int, content: Json, finish_reason: FinishReason | None) -> Json:
        chunk = {**self._head(is_chunk=True), "choices": [self._choice(choice, content, finish_reason)]}
        return {**chunk, "usage": None} if self.includes_usage else chunk

    @staticmethod
    def _choice(index: int, content: Json, finish_reason: FinishReason | None) -> Json:
        reason = None if finish_reason is None else finish_reason.value
        return {"index": index, **content, "finish_reason": reason}

    def _head(self, *, is_chunk: bool) -> Json:
        if self.operation is Operation.CHAT:
            prefix, kind = "chatcmpl", "chat.completion.chunk" if is_chunk else "chat.completion"
        else:
            prefix, kind = "cmpl", "text_completion"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }


def error_status(error: WeirError) -> int:
    """The HTTP status of the table in `core.errors`."""
    return _entry_of(error)[1]


def error_body(error: WeirError) -> Json:
    """The nested form that OpenAI's clients parse; `param` names the first wrong field."""
    _, _, kind, code = _entry_of(error)
    param = None
    if isinstance(error, InvalidRequest):
        param = error.violations[0].field
    elif isinstance(error, NotFound):
        param = error.field
    return {"error": {"message": error.message[:_MAX_MESSAGE_CHARS], "type": kind, "param": param, "code": code}}


def error_headers(error: WeirError) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least 1, if trying again makes sense; for 401 how to say who asks."""
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def _entry_of(error: WeirError) -> tuple[type[WeirError], int, str, str]:
    return next(entry for entry in _ERRORS if isinstance(error, entry[0]))
