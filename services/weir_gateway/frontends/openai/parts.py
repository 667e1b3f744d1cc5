"""The parts of a chat's answer in OpenAI's form: text, and calls of tools; and reasoning, as DeepSeek has it."""

from collections.abc import Callable, Sequence
from typing import Any

from weir_gateway.answers.events import AnswerEvent, ContentText, ReasoningText, ToolArguments, ToolCallBegan

Json = dict[str, Any]
NameCall = Callable[[int], str]
"""The id of the call with this index in its choice."""


def message_parts(events: Sequence[AnswerEvent], id_of: NameCall) -> Json:
    """Of the whole message: `content`, null without text; `reasoning_content` and `tool_calls`, if there are any."""
    calls = [{name: value for name, value in call.items() if name != "index"} for call in _calls_of(events, id_of)]
    return {"content": text_of(events) or None, **_reasoning_of(events), **({"tool_calls": calls} if calls else {})}


def delta_parts(events: Sequence[AnswerEvent], id_of: NameCall) -> Json:
    """Of a part of the message. The first delta of a call names it, those that follow have more of its arguments."""
    text, calls = text_of(events), _calls_of(events, id_of)
    content = {"content": text} if text else {}
    return {**_reasoning_of(events), **content, **({"tool_calls": calls} if calls else {})}


def without_reasoning(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    return [event for event in events if not isinstance(event, ReasoningText)]


def _reasoning_of(events: Sequence[AnswerEvent]) -> Json:
    text = "".join(event.text for event in events if isinstance(event, ReasoningText))
    return {"reasoning_content": text} if text else {}


def text_of(events: Sequence[AnswerEvent]) -> str:
    """What is meant for the reader."""
    return "".join(event.text for event in events if isinstance(event, ContentText))


def _calls_of(events: Sequence[AnswerEvent], id_of: NameCall) -> list[Json]:
    calls: dict[int, Json] = {}
    for event in events:
        match event:
            case ToolCallBegan(index, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id_of(index), "type": "function", "function": function}
            case ToolArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
            case _:
                pass
    return list(calls.values())
