"""Chats of `weir.v1.Inference`: turns and tools as they are sent, and the parts of answers."""

from collections.abc import Callable, Sequence
from typing import Any

import pydantic_core

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.tools import MAX_TOOLS, Tool
from weir.wire.v1 import inference_pb2
from weir_gateway.answers.events import (
    AnswerEvent,
    ContentText,
    ReasoningText,
    ToolArguments,
    ToolCallBegan,
    ToolCallEnded,
)
from weir_gateway.frontends.bodies.function_tools import (
    ToolChoice,
    arguments_of,
    is_list_of_tools,
    read_tool,
    tool_use_of,
)
from weir_gateway.frontends.bodies.thinking import AS_TRAINED, NO_THINKING, Thinking
from weir_gateway.frontends.openai.messages import call_turn
from weir_gateway.requests.client_request import Conversation
from weir_gateway.tools.definitions import ToolUse

Turn = dict[str, Any]


def conversation_from_pb(request: inference_pb2.ChatRequest) -> Conversation:
    """Raises InvalidRequest with every turn and tool that is none. There are no more turns than may be."""
    violations: list[FieldViolation] = []
    names: dict[str, str] = {}
    turns = [
        _turn_of(message, f"messages[{index}]", names, violations) for index, message in enumerate(request.messages)
    ]
    conversation = Conversation(tuple(turns), tools=_tool_use_of(request, violations))
    if violations:
        raise InvalidRequest(violations)
    return _thinking_of(request).within(conversation)


def parts_to_pb(events: Sequence[AnswerEvent], id_of: Callable[[int], str]) -> inference_pb2.AnswerParts:
    """`id_of`: of the call with this index in its choice. What follows of one call is one delta."""
    parts: list[inference_pb2.AnswerPart] = []
    for event in events:
        match event:
            case ContentText(text):
                parts.append(inference_pb2.AnswerPart(content=text))
            case ReasoningText(text):
                parts.append(inference_pb2.AnswerPart(reasoning=text))
            case ToolCallBegan(index, name):
                delta = inference_pb2.ToolCallDelta(index=index, id=id_of(index), name=name)
                parts.append(inference_pb2.AnswerPart(tool_call=delta))
            case ToolArguments(index, text):
                _delta_of(index, parts).arguments += text
            case ToolCallEnded(index):
                _delta_of(index, parts).is_complete = True
    return inference_pb2.AnswerParts(parts=parts)


def _delta_of(index: int, parts: list[inference_pb2.AnswerPart]) -> inference_pb2.ToolCallDelta:
    """The last part, or a new one, if that is of something else."""
    if not parts or parts[-1].WhichOneof("part") != "tool_call" or parts[-1].tool_call.index != index:
        parts.append(inference_pb2.AnswerPart(tool_call=inference_pb2.ToolCallDelta(index=index)))
    return parts[-1].tool_call


def _turn_of(
    message: inference_pb2.ChatMessage, field: str, names: dict[str, str], violations: list[FieldViolation]
) -> Turn:
    """`names`: of the tools that calls so far were of, by the calls' ids; added to."""
    turn: Turn = {"role": message.role, "content": message.content}
    if message.tool_calls and message.role != "assistant":
        problem = f"is of role {message.role[:40]!r}; assistants call tools"
        violations.append(FieldViolation(f"{field}.tool_calls", problem))
    elif len(message.tool_calls) > MAX_TOOLS:
        problem = f"has {len(message.tool_calls)} calls; at most {MAX_TOOLS} are taken"
        violations.append(FieldViolation(f"{field}.tool_calls", problem))
    elif message.tool_calls:
        calls = [
            _call_of(call, f"{field}.tool_calls[{index}]", violations) for index, call in enumerate(message.tool_calls)
        ]
        turn["tool_calls"] = calls
        names.update((call["id"], call["function"]["name"]) for call in calls)
    if message.reasoning and message.role == "assistant":
        turn["reasoning_content"] = message.reasoning
    if message.role == "tool":
        if not message.tool_call_id:
            violations.append(FieldViolation(f"{field}.tool_call_id", "is missing; give the id of the call"))
        turn["tool_call_id"] = message.tool_call_id
        turn |= {"name": names[message.tool_call_id]} if message.tool_call_id in names else {}
    return turn


def _call_of(call: inference_pb2.ToolCall, field: str, violations: list[FieldViolation]) -> Turn:
    if not call.id:
        violations.append(FieldViolation(f"{field}.id", "is missing; give the id that the call had"))
    if not call.name:
        violations.append(FieldViolation(f"{field}.name", "is missing; give the name of the tool that was called"))
    return call_turn(call.id, call.name, arguments_of(call.arguments, f"{field}.arguments", violations))


def _tool_use_of(request: inference_pb2.ChatRequest, violations: list[FieldViolation]) -> ToolUse | None:
    """None: nothing may be called, and the model is told of no tools, whatever they are; or it is in `violations`."""
    choice = _choice_of(request.tool_choice, violations)
    if choice is None or choice.is_none or not is_list_of_tools(request.tools, violations):
        return None
    tools = [_tool_of(tool, f"tools[{index}]", violations) for index, tool in enumerate(request.tools)]
    is_parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
    return tool_use_of([tool for tool in tools if tool is not None], choice, violations, is_parallel=is_parallel)


def _tool_of(tool: inference_pb2.Tool, field: str, violations: list[FieldViolation]) -> Tool | None:
    parameters: object = None
    if tool.parameters:
        try:
            parameters = pydantic_core.from_json(tool.parameters, allow_inf_nan=False)
        except ValueError as error:
            violations.append(FieldViolation(f"{field}.parameters", f"is no JSON: {str(error)[:80]}"))
            return None
        if parameters is None:
            violations.append(FieldViolation(f"{field}.parameters", "must be a JSON schema, which is an object"))
            return None
    description = tool.description if tool.HasField("description") else None
    given = {"name": tool.name, "description": description, "parameters": parameters, "strict": tool.strict}
    return read_tool(given, field, violations)


def _choice_of(choice: inference_pb2.ToolChoice, violations: list[FieldViolation]) -> ToolChoice | None:
    """None: it is in `violations`."""
    names = tuple(dict.fromkeys(choice.names[: MAX_TOOLS + 1]))
    if len(choice.names) > MAX_TOOLS:
        problem = f"has {len(choice.names)} names; at most {MAX_TOOLS} are taken"
        violations.append(FieldViolation("tool_choice.names", problem))
        return None
    if choice.mode == inference_pb2.TOOL_MODE_NONE:
        if names:
            violations.append(FieldViolation("tool_choice.names", "come with TOOL_MODE_NONE; leave them out"))
            return None
        return ToolChoice(is_none=True)
    if choice.mode not in inference_pb2.ToolMode.values():
        known = ", ".join(inference_pb2.ToolMode.keys()[1:])
        violations.append(FieldViolation("tool_choice.mode", f"is {choice.mode}; must be one of {known}"))
        return None
    is_required = choice.mode == inference_pb2.TOOL_MODE_REQUIRED
    field = "tool_choice.names" if names else "tool_choice.mode"
    return ToolChoice(
        is_required=is_required, names=names or None, is_named=is_required and len(names) == 1, field=field
    )


def _thinking_of(request: inference_pb2.ChatRequest) -> Thinking:
    if not request.HasField("max_reasoning_tokens"):
        return AS_TRAINED
    return Thinking(request.max_reasoning_tokens) if request.max_reasoning_tokens else NO_THINKING
