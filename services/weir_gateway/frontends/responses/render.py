"""Answers as OpenAI's Responses API has them: the object, and the events of a stream.

    created, in_progress, output_item.added, content_part.added
    output_text.delta, as often as there is text
    output_text.done, content_part.done, output_item.done, completed or incomplete
    … or, wherever it fails: error, failed

Clients show nothing of an answer whose items were not added, and raise at `error`; `[DONE]` is not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from weir.core.errors import InvalidRequest, Overloaded, WeirError
from weir.core.life import FinishReason
from weir_gateway.frontends.openai.render import Json, error_body
from weir_gateway.frontends.responses.schema import AskedResponse
from weir_gateway.frontends.typed_events import TextEvents, typed_event, typed_events


class ResponseStatus(Enum):
    """How far an answer has come."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    """At its number of tokens, or where the context is full."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What an answer used."""

    num_prompt: int
    num_cached: int
    num_output: int


@dataclass(frozen=True, slots=True)
class ResponseState:
    """What is known of an answer now. `logprobs`: OpenAI's entries, one a token."""

    status: ResponseStatus = ResponseStatus.IN_PROGRESS
    text: str = ""
    logprobs: tuple[Json, ...] = ()
    counts: TokenCounts | None = None
    error: WeirError | None = None
    is_kept: bool = False

    @classmethod
    def ended(
        cls, reason: FinishReason | None, text: str, logprobs: Sequence[Json], counts: TokenCounts
    ) -> "ResponseState":
        is_whole = reason is FinishReason.STOP
        status = ResponseStatus.COMPLETED if is_whole else ResponseStatus.INCOMPLETE
        return cls(status, text, tuple(logprobs), counts)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What never changes in the answers to one request."""

    request_id: str
    created_unix_s: int
    model: str
    temperature: float
    top_p: float
    asked: AskedResponse

    @property
    def response_id(self) -> str:
        return f"resp_{self.request_id}"

    @property
    def item_id(self) -> str:
        return f"msg_{self.request_id}"

    def response(self, state: ResponseState) -> Json:
        """The object. One that fails has no output: a part of an answer is not to be taken for one."""
        body = self.asked.body
        has_item = state.status in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE)
        is_incomplete = state.status is ResponseStatus.INCOMPLETE
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_unix_s,
            "status": state.status.value,
            "background": False,
            "error": None if state.error is None else _error_json(state.error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [self.item(state)] if has_item else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": state.is_kept,
            "temperature": self.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": self.asked.tool_choice,
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            **({} if state.counts is None else {"usage": _usage_json(state.counts)}),
        }

    def item(self, state: ResponseState) -> Json:
        """The one message of an answer; without its content while that is to come."""
        is_open = state.status is ResponseStatus.IN_PROGRESS
        return {
            "id": self.item_id,
            "type": "message",
            "status": state.status.value,
            "role": "assistant",
            "content": [] if is_open else [part(state)],
        }


class ResponseEvents:
    """The events of one stream, numbered from 0. To be called in the order of the module's description."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._num_events = 0
        self._place = {"item_id": head.item_id, "output_index": 0, "content_index": 0}
        example = {"delta": TextEvents.TEXT, "logprobs": []}
        self._texts = TextEvents(
            {"type": "response.output_text.delta", "sequence_number": TextEvents.NUMBER, **self._place, **example}
        )

    def opening(self, *, is_kept: bool) -> bytes:
        """`is_kept`: whether the answer is to be."""
        begun, empty = self._head.response(ResponseState(is_kept=is_kept)), ResponseState()
        return typed_events(
            [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=self._head.item(empty)),
                self._event("response.content_part.added", **self._place, part=part(empty)),
            ]
        )

    def delta(self, text: str, logprobs: Sequence[Json]) -> bytes:
        if not logprobs:
            self._num_events += 1
            return self._texts.event(text, self._num_events - 1)
        event = self._event("response.output_text.delta", **self._place, delta=text, logprobs=list(logprobs))
        return typed_event(event)

    def closing(self, state: ResponseState) -> bytes:
        done = {"text": state.text, "logprobs": list(state.logprobs)}
        return typed_events(
            [
                self._event("response.output_text.done", **self._place, **done),
                self._event("response.content_part.done", **self._place, part=part(state)),
                self._event("response.output_item.done", output_index=0, item=self._head.item(state)),
                self._event(f"response.{state.status.value}", response=self._head.response(state)),
            ]
        )

    def failure(self, error: WeirError) -> bytes:
        nested = error_body(error)["error"]
        flat = {name: nested[name] for name in ("code", "message", "param")}
        failed = self._head.response(ResponseState(ResponseStatus.FAILED, error=error))
        return typed_events(
            [self._event("error", **flat, error=nested), self._event("response.failed", response=failed)]
        )

    def _event(self, kind: str, **content: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **content}


def kept(state: ResponseState) -> ResponseState:
    """The same, as it is where it can be asked for later."""
    return replace(state, is_kept=True)


def part(state: ResponseState) -> Json:
    return {"type": "output_text", "text": state.text, "annotations": [], "logprobs": list(state.logprobs)}


def _error_json(error: WeirError) -> Json:
    """Of the few codes that there are."""
    code = "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return {"code": code, "message": error_body(error)["error"]["message"]}


def _usage_json(counts: TokenCounts) -> Json:
    return {
        "input_tokens": counts.num_prompt,
        "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
        "output_tokens": counts.num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.num_prompt + counts.num_output,
    }
