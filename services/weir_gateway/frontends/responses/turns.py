"""The items of a Responses request as turns of a conversation; and turns as they are kept with an answer."""

from collections.abc import Sequence
from typing import Any

from weir.core.errors import FieldViolation
from weir_gateway.frontends.adapter_schema import text_of
from weir_gateway.frontends.bodies.checks import shown
from weir_gateway.frontends.bodies.function_tools import arguments_of
from weir_gateway.frontends.openai.messages import Turn, call_turn

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_OTHER_CALLS = ("custom_tool_call", "custom_tool_call_output")
_PLAIN = {"role", "content"}


class ItemReader:
    """Reads items one after the other into `turns`; what is wrong goes to `violations`. Calls belong to the
    assistant's turn that they follow, as models were taught them."""

    def __init__(self, violations: list[FieldViolation]) -> None:
        self.turns: list[Turn] = []
        self._violations = violations
        self._names: dict[str, str] = {}
        """Of functions, by the ids of their calls."""
        self._thoughts = ""
        """Of the assistant's turn that comes next: templates decide what becomes of them."""

    def read(self, item: object, field: str) -> None:
        if not isinstance(item, dict):
            self._violations.append(FieldViolation(field, "must be an item, an object"))
            return
        match item.get("type") or "message":
            case "message":
                self._read_message(item, field)
            case "function_call":
                self._read_call(item, field)
            case "function_call_output":
                self._read_output(item, field)
            case "reasoning":
                self._thoughts += _thoughts_of(item)
            case kind:
                self._violations.append(FieldViolation(field, _item_problem(kind)))

    def _read_message(self, item: dict[str, Any], field: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            problem = f"is {shown(role)}; must be one of {', '.join(_ROLES)}"
            self._violations.append(FieldViolation(f"{field}.role", problem))
            return
        text = text_of(item.get("content"), f"{field}.content", _TEXT_PARTS, frozenset(), self._violations)
        self._add({"role": "system" if role == "developer" else role, "content": text})

    def _add(self, turn: Turn) -> None:
        thoughts, self._thoughts = self._thoughts, ""
        if thoughts and turn["role"] == "assistant":
            turn["reasoning_content"] = thoughts
        self.turns.append(turn)

    def _read_call(self, item: dict[str, Any], field: str) -> None:
        call_id, name = self._text(item, "call_id", field), self._text(item, "name", field)
        self._names[call_id] = name
        arguments = arguments_of(item.get("arguments"), f"{field}.arguments", self._violations)
        if not self.turns or self.turns[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""})
        self.turns[-1].setdefault("tool_calls", []).append(call_turn(call_id, name, arguments))

    def _read_output(self, item: dict[str, Any], field: str) -> None:
        call_id = self._text(item, "call_id", field)
        text = text_of(item.get("output"), f"{field}.output", _TEXT_PARTS, frozenset(), self._violations)
        turn: Turn = {"role": "tool", "content": text, "tool_call_id": call_id}
        self.turns.append(turn | ({"name": self._names[call_id]} if call_id in self._names else {}))

    def _text(self, item: dict[str, Any], name: str, field: str) -> str:
        value = item.get(name)
        if isinstance(value, str) and value:
            return value
        self._violations.append(FieldViolation(f"{field}.{name}", "must be a text with at least one character"))
        return ""


def _thoughts_of(item: dict[str, Any]) -> str:
    """Those that can be read: of others nobody here has the key."""
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text")
    return "".join(text for text in texts if isinstance(text, str))


def turns_to_json(turns: Sequence[Turn]) -> list[Any]:
    """Turns of texts as pairs, which gateways before tools read too."""
    return [[turn["role"], turn["content"]] if turn.keys() == _PLAIN else turn for turn in turns]


def turns_from_json(values: object) -> tuple[Turn, ...]:
    """Raises ValueError, TypeError for what no gateway has written."""
    if not isinstance(values, list):
        raise TypeError(f"a list was kept, not {type(values).__name__}")
    return tuple(_turn_from_json(value) for value in values)


def _turn_from_json(value: Any) -> Turn:
    if not isinstance(value, dict):
        role, text = value
        return {"role": str(role), "content": str(text)}
    if not isinstance(value.get("role"), str) or not isinstance(value.get("content"), str):
        raise ValueError("a turn has a role and a content")
    return value


def _item_problem(kind: object) -> str:
    if kind in _OTHER_CALLS:
        return f"is a {kind}: of tools functions are served alone; leave it out, or tell the model of it in a message"
    if kind == "item_reference":
        return "is an item_reference: items are not kept alone; give the message itself, or previous_response_id"
    return f"is of type {shown(kind)}, which is not served; a message is, and calls of functions and their outputs"
