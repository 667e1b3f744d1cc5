"""Conversations as clients have them: turns, tools, parts of answers; and their translation to and from protobuf."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.options import GenerateOptions
from weir.core.tools import Tool
from weir.rpc.conversions import check_text, options_to_pb
from weir.wire.v1 import inference_pb2

ToolMode = Literal["auto", "none", "required"]
_MAX_UINT32 = 2**32 - 1
_MODES: dict[ToolMode, inference_pb2.ToolMode.ValueType] = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "none": inference_pb2.TOOL_MODE_NONE,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is the text of a JSON object. `is_complete` False: the answer ended amid it, so it
    is not to be run."""

    id: str
    name: str
    arguments: str = "{}"
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation. A tool's is the result of the call `tool_call_id`; `reasoning` is what an assistant
    thought before it said `content`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model may call, of which `names` may be called (empty: all). `mode`: "auto", the model decides;
    "required": the answer is at least one call, and of a single name just one; "none": the model is told of none."""

    tools: tuple[Tool, ...]
    mode: ToolMode = "auto"
    names: tuple[str, ...] = ()
    is_parallel: bool = True
    """Whether one answer may have several calls."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    """More of what is for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call; all of one `index` joined are the call. The first has `id` and `name`, the last `is_complete`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_complete: bool = False


AnswerPart = ContentPart | ReasoningPart | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What came of one choice so far."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[AnswerPart]) -> "ChatAnswer":
        """Of all parts of one choice, in order."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, list[ToolCallDelta]] = {}
        for part in parts:
            match part:
                case ContentPart(text):
                    content.append(text)
                case ReasoningPart(text):
                    reasoning.append(text)
                case ToolCallDelta():
                    calls.setdefault(part.index, []).append(part)
        return cls("".join(content), "".join(reasoning), tuple(_joined(calls[index]) for index in sorted(calls)))

    @property
    def turn(self) -> Turn:
        """As it stands in the conversation that goes on; without calls that are cut off."""
        calls = tuple(call for call in self.tool_calls if call.is_complete)
        return Turn("assistant", self.content, calls, reasoning=self.reasoning)


def parts_from_pb(parts: inference_pb2.AnswerParts) -> tuple[AnswerPart, ...]:
    """Without those of a kind that a newer gateway knows."""
    found = (_try_read_part(part) for part in parts.parts)
    return tuple(part for part in found if part is not None)


def chat_request(
    turns: Sequence[Turn],
    options: GenerateOptions,
    tools: Tools | None = None,
    max_reasoning_tokens: int | None = None,
) -> inference_pb2.ChatRequest:
    """The turns, oldest first. Raises InvalidRequest for what the wire cannot carry."""
    messages = [_turn_to_pb(turn, f"messages[{index}]") for index, turn in enumerate(turns)]
    request = inference_pb2.ChatRequest(options=options_to_pb(options), messages=messages)
    if tools is not None:
        request.tools.extend(_tool_to_pb(tool, f"tools[{index}]") for index, tool in enumerate(tools.tools))
        for name in tools.names:
            check_text("tool_choice.names", name)
        if tools.mode not in _MODES:
            problem = f"is {tools.mode!r}; must be one of {', '.join(_MODES)}"
            raise InvalidRequest([FieldViolation("tool_choice.mode", problem)])
        request.tool_choice.mode = _MODES[tools.mode]
        request.tool_choice.names.extend(tools.names)
        request.parallel_tool_calls = tools.is_parallel
    if max_reasoning_tokens is not None:
        if not 0 <= max_reasoning_tokens <= _MAX_UINT32:
            problem = f"is {max_reasoning_tokens}; must be from 0 (no reasoning) to {_MAX_UINT32}"
            raise InvalidRequest([FieldViolation("max_reasoning_tokens", problem)])
        request.max_reasoning_tokens = max_reasoning_tokens
    return request


def _turn_to_pb(turn: Turn, field: str) -> inference_pb2.ChatMessage:
    for name in ("content", "reasoning", "tool_call_id"):
        check_text(f"{field}.{name}", getattr(turn, name))
    calls = []
    for index, call in enumerate(turn.tool_calls):
        for name in ("id", "name", "arguments"):
            check_text(f"{field}.tool_calls[{index}].{name}", getattr(call, name))
        calls.append(inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments))
    return inference_pb2.ChatMessage(
        role=turn.role,
        content=turn.content,
        tool_calls=calls,
        tool_call_id=turn.tool_call_id,
        reasoning=turn.reasoning,
    )


def _tool_to_pb(tool: Tool, field: str) -> inference_pb2.Tool:
    parameters = ""
    if tool.parameters is not None:
        try:
            parameters = json.dumps(tool.parameters, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest([FieldViolation(f"{field}.parameters", f"is no JSON: {error}")]) from None
    for name, text in (("name", tool.name), ("description", tool.description or ""), ("parameters", parameters)):
        check_text(f"{field}.{name}", text)
    return inference_pb2.Tool(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.is_strict
    )


def _try_read_part(part: Any) -> AnswerPart | None:
    match part.WhichOneof("part"):
        case "content":
            return ContentPart(part.content)
        case "reasoning":
            return ReasoningPart(part.reasoning)
        case "tool_call":
            call = part.tool_call
            return ToolCallDelta(call.index, call.id, call.name, call.arguments, call.is_complete)
        case _:
            return None


def _joined(deltas: Sequence[ToolCallDelta]) -> ToolCall:
    return ToolCall(
        id=deltas[0].id,
        name=deltas[0].name,
        arguments="".join(delta.arguments for delta in deltas),
        is_complete=deltas[-1].is_complete,
    )
