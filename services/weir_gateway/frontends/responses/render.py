"""Answers as OpenAI's Responses API has them: the object, and the events of a stream.

    created, in_progress
    of reasoning    output_item.added, content_part.added, reasoning_text.delta …, reasoning_text.done,
                    content_part.done, output_item.done
    of a message    output_item.added, content_part.added, output_text.delta as often as there is text
    of each call    output_item.added, function_call_arguments.delta …, function_call_arguments.done, output_item.done
    of the message  output_text.done, content_part.done, output_item.done
    completed or incomplete
    … or, wherever it fails: error, failed

Clients show nothing of an answer whose items were not added, and raise at `error`; `[DONE]` is not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from weir.core.errors import InvalidRequest, Overloaded, WeirError
from weir.core.life import FinishReason
from weir.core.tools import Tool
from weir_gateway.frontends.openai.render import Json, error_body
from weir_gateway.frontends.responses.items import AnswerItems, FunctionCall, Reasoning
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
    num_reasoning: int = 0
    """Of these."""


@dataclass(frozen=True, slots=True)
class ResponseState:
    """What is known of an answer now. `logprobs`: OpenAI's entries, one a token."""

    status: ResponseStatus = ResponseStatus.IN_PROGRESS
    text: str = ""
    message_index: int | None = 0
    """The place of the message in the output. None: there is none."""
    calls: tuple[FunctionCall, ...] = ()
    reasonings: tuple[Reasoning, ...] = ()
    logprobs: tuple[Json, ...] = ()
    counts: TokenCounts | None = None
    error: WeirError | None = None
    is_kept: bool = False

    @classmethod
    def ended(
        cls, reason: FinishReason | None, items: AnswerItems, logprobs: Sequence[Json], counts: TokenCounts
    ) -> "ResponseState":
        is_whole = reason is FinishReason.STOP
        status = ResponseStatus.COMPLETED if is_whole else ResponseStatus.INCOMPLETE
        calls, reasonings = tuple(items.calls), tuple(items.reasonings)
        return cls(status, items.text, items.message_index, calls, reasonings, tuple(logprobs), counts)


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
        has_items = state.status in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE)
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
            "output": self._output(state) if has_items else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": state.is_kept,
            "temperature": self.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [] if self.asked.tools is None else [_tool_json(tool) for tool in self.asked.tools.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            **({} if state.counts is None else {"usage": _usage_json(state.counts)}),
        }

    def _output(self, state: ResponseState) -> list[Json]:
        items = {call.output_index: call.ended_json() for call in state.calls}
        items |= {reasoning.output_index: reasoning.json("completed") for reasoning in state.reasonings}
        if state.message_index is not None:
            items[state.message_index] = self.item(state)
        return [items[index] for index in sorted(items)]

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
        self._place: Json = {}
        """Of the message."""
        self._texts: TextEvents | None = None

    def opening(self, *, is_kept: bool, has_message: bool = True) -> bytes:
        """`is_kept`: whether the answer is to be. `has_message`: it is a message, which begins with it."""
        begun = self._head.response(ResponseState(is_kept=is_kept))
        first = [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]
        return typed_events(first) + (self.message_began(0) if has_message else b"")

    def message_began(self, output_index: int) -> bytes:
        empty = ResponseState()
        self._place = {"item_id": self._head.item_id, "output_index": output_index, "content_index": 0}
        example = {"delta": TextEvents.TEXT, "logprobs": []}
        self._texts = TextEvents(
            {"type": "response.output_text.delta", "sequence_number": TextEvents.NUMBER, **self._place, **example}
        )
        return typed_events(
            [
                self._event("response.output_item.added", output_index=output_index, item=self._head.item(empty)),
                self._event("response.content_part.added", **self._place, part=part(empty)),
            ]
        )

    def delta(self, text: str, logprobs: Sequence[Json]) -> bytes:
        """Of the message, which has begun."""
        if self._texts is not None and not logprobs:
            self._num_events += 1
            return self._texts.event(text, self._num_events - 1)
        event = self._event("response.output_text.delta", **self._place, delta=text, logprobs=list(logprobs))
        return typed_event(event)

    def reasoning_began(self, reasoning: Reasoning) -> bytes:
        empty = replace(reasoning, text="")
        place = {"item_id": reasoning.item_id, "output_index": reasoning.output_index, "content_index": 0}
        item = empty.json("in_progress")
        return typed_events(
            [
                self._event("response.output_item.added", output_index=reasoning.output_index, item=item),
                self._event("response.content_part.added", **place, part=empty.part),
            ]
        )

    def reasoning_delta(self, reasoning: Reasoning, text: str) -> bytes:
        place = {"item_id": reasoning.item_id, "output_index": reasoning.output_index, "content_index": 0}
        return typed_event(self._event("response.reasoning_text.delta", **place, delta=text))

    def reasoning_ended(self, reasoning: Reasoning) -> bytes:
        place = {"item_id": reasoning.item_id, "output_index": reasoning.output_index, "content_index": 0}
        item = reasoning.json("completed")
        return typed_events(
            [
                self._event("response.reasoning_text.done", **place, text=reasoning.text),
                self._event("response.content_part.done", **place, part=reasoning.part),
                self._event("response.output_item.done", output_index=reasoning.output_index, item=item),
            ]
        )

    def call_began(self, call: FunctionCall) -> bytes:
        item = call.json("in_progress")
        return typed_event(self._event("response.output_item.added", output_index=call.output_index, item=item))

    def call_arguments(self, call: FunctionCall, text: str) -> bytes:
        place = {"item_id": call.item_id, "output_index": call.output_index}
        return typed_event(self._event("response.function_call_arguments.delta", **place, delta=text))

    def call_ended(self, call: FunctionCall) -> bytes:
        place = {"item_id": call.item_id, "output_index": call.output_index}
        whole = {"name": call.name, "arguments": call.arguments}
        item = call.ended_json()
        return typed_events(
            [
                self._event("response.function_call_arguments.done", **place, **whole),
                self._event("response.output_item.done", output_index=call.output_index, item=item),
            ]
        )

    def closing(self, state: ResponseState) -> bytes:
        """Of calls that are cut off, of the message, and of all."""
        cut = b"".join(self.call_ended(call) for call in state.calls if not call.is_complete)
        events = [] if state.message_index is None else self._closing_of_message(state)
        events.append(self._event(f"response.{state.status.value}", response=self._head.response(state)))
        return cut + typed_events(events)

    def _closing_of_message(self, state: ResponseState) -> list[Json]:
        done = {"text": state.text, "logprobs": list(state.logprobs)}
        item = self._head.item(state)
        return [
            self._event("response.output_text.done", **self._place, **done),
            self._event("response.content_part.done", **self._place, part=part(state)),
            self._event("response.output_item.done", output_index=state.message_index, item=item),
        ]

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


def _tool_json(tool: Tool) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.is_strict,
    }


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
        "output_tokens_details": {"reasoning_tokens": counts.num_reasoning},
        "total_tokens": counts.num_prompt + counts.num_output,
    }
