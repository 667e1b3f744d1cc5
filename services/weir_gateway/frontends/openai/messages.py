"""Turns of a chat, as OpenAI writes them, and of calls of tools in it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from weir.core.errors import FieldViolation
from weir.core.tools import MAX_TOOLS
from weir_gateway.frontends.bodies.checks import is_too_long
from weir_gateway.frontends.bodies.function_tools import arguments_of
from weir_gateway.requests.client_request import Conversation

Turn = dict[str, Any]


class Message(BaseModel):
    """One turn. `content` is a text, or a list of text parts; of an assistant that only called tools null. What an
    assistant thought before it is `reasoning_content`, or `reasoning`: its model's template decides what becomes of it.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None


def conversation_of(messages: Sequence[Message], violations: list[FieldViolation]) -> Conversation:
    """Adds to `violations` what has content that is no text, calls that are none, and too many of them."""
    if is_too_long(messages, "messages", violations):
        return Conversation(())
    names: dict[str, str] = {}
    turns = [_turn_of(message, f"messages[{index}]", names, violations) for index, message in enumerate(messages)]
    return Conversation(tuple(turns))


def _turn_of(message: Message, field: str, names: dict[str, str], violations: list[FieldViolation]) -> Turn:
    """`names`: of the functions that calls so far were of, by the calls' ids; added to."""
    if message.function_call is not None:
        problem = "is of an older form of calls, which is not served: give tool_calls"
        violations.append(FieldViolation(f"{field}.function_call", problem))
    calls: list[Turn] = []
    if message.tool_calls and message.role == "assistant":
        calls = _calls_of(message.tool_calls, f"{field}.tool_calls", violations)
        names.update((call["id"], call["function"]["name"]) for call in calls)
    elif message.tool_calls:
        violations.append(FieldViolation(f"{field}.tool_calls", f"is of role {message.role}; assistants call tools"))
    has_content = message.content is not None or not message.tool_calls
    turn: Turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content_of(message.content, f"{field}.content", violations) if has_content else "",
    }
    if calls:
        turn["tool_calls"] = calls
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and message.role == "assistant":
        turn["reasoning_content"] = reasoning
    if message.role == "tool":
        turn |= _result_of(message, field, names, violations)
    return turn


def _result_of(
    message: Message, field: str, names: Mapping[str, str], violations: list[FieldViolation]
) -> Mapping[str, str]:
    """Which call this is the result of. Templates may ask for the function's name too."""
    call_id = message.tool_call_id
    if not call_id:
        violations.append(FieldViolation(f"{field}.tool_call_id", "is missing; give the id of the call"))
        return {}
    return {"tool_call_id": call_id} | ({"name": names[call_id]} if call_id in names else {})


def _calls_of(entries: list[Any], field: str, violations: list[FieldViolation]) -> list[Turn]:
    if len(entries) > MAX_TOOLS:
        violations.append(FieldViolation(field, f"has {len(entries)} calls; at most {MAX_TOOLS} are taken"))
        return []
    return [_call_of(entry, f"{field}[{index}]", violations) for index, entry in enumerate(entries)]


def _call_of(entry: object, field: str, violations: list[FieldViolation]) -> Turn:
    call = entry if isinstance(entry, dict) else {}
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        problem = 'must be {"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        violations.append(FieldViolation(field, problem))
        return call_turn("", "", {})
    call_id, name = call.get("id"), function.get("name")
    if not isinstance(call_id, str) or not call_id:
        violations.append(FieldViolation(f"{field}.id", "must be the id that the call had"))
    if not isinstance(name, str) or not name:
        violations.append(FieldViolation(f"{field}.function.name", "must be the name of the tool that was called"))
    arguments = arguments_of(function.get("arguments"), f"{field}.function.arguments", violations)
    return call_turn(str(call_id), str(name), arguments)


def call_turn(call_id: str, name: str, arguments: Mapping[str, Any]) -> Turn:
    """A call as templates take it: its arguments are an object, which they write in their model's way."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _content_of(value: object, field: str, violations: list[FieldViolation]) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    if is_too_long(parts, field, violations):
        return ""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(parts):
        violations.append(FieldViolation(field, "must be a text, or a list of parts of type text"))
    return "".join(strings)
