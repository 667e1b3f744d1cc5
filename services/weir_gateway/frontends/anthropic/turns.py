"""The messages of a Messages request as turns of a conversation, with calls of tools and their results."""

from collections.abc import Mapping
from typing import Any

from weir.core.errors import FieldViolation
from weir_gateway.frontends.adapter_schema import text_of
from weir_gateway.frontends.bodies.checks import shown
from weir_gateway.frontends.openai.messages import Turn, call_turn

TEXT_BLOCKS = frozenset({"text"})

_ROLES = ("user", "assistant")
_THINKING = "thinking"
_DROPPED_BLOCKS = frozenset({_THINKING, "redacted_thinking"})
"""Of earlier answers: they are no text of it, and templates decide what becomes of thoughts that can be read."""
_CALLS_OF_ROLE = {"assistant": "tool_use", "user": "tool_result"}


class MessageReader:
    """Reads messages one after the other into `turns`; what is wrong goes to `violations`."""

    def __init__(self, violations: list[FieldViolation]) -> None:
        self.turns: list[Turn] = []
        self._violations = violations
        self._names: dict[str, str] = {}
        """Of tools, by the ids of their calls."""

    def read(self, message: Mapping[str, Any], field: str) -> None:
        role = message.get("role")
        if role not in _ROLES:
            problem = f"is {shown(role)}; must be one of {', '.join(_ROLES)}"
            self._violations.append(FieldViolation(f"{field}.role", problem))
        content, of_tools = message.get("content"), _CALLS_OF_ROLE.get(str(role), "")
        text = text_of(content, f"{field}.content", TEXT_BLOCKS, _DROPPED_BLOCKS | {of_tools}, self._violations)
        blocks = enumerate(content) if isinstance(content, list) else ()
        found = [
            (block, f"{field}.content[{index}]")
            for index, block in blocks
            if isinstance(block, dict) and of_tools and block.get("type") == of_tools
        ]
        turn: Turn = {"role": str(role), "content": text}
        if role == "assistant" and (thoughts := self._thoughts_of(content, field)):
            turn["reasoning_content"] = thoughts
        if role == "assistant" and found:
            turn["tool_calls"] = [self._call_of(block, place) for block, place in found]
        elif found:
            self.turns += [self._result_of(block, place) for block, place in found]
            if not text:
                return
        self.turns.append(turn)

    def _thoughts_of(self, content: object, field: str) -> str:
        texts = []
        for index, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict) and block.get("type") == _THINKING:
                text = block.get("thinking")
                if isinstance(text, str):
                    texts.append(text)
                else:
                    self._violations.append(FieldViolation(f"{field}.content[{index}].thinking", "must be a text"))
        return "".join(texts)

    def _call_of(self, block: Mapping[str, Any], field: str) -> Turn:
        call_id, name, given = self._text(block, "id", field), self._text(block, "name", field), block.get("input")
        if not isinstance(given, dict):
            self._violations.append(FieldViolation(f"{field}.input", "must be an object"))
            given = {}
        self._names[call_id] = name
        return call_turn(call_id, name, given)

    def _result_of(self, block: Mapping[str, Any], field: str) -> Turn:
        call_id, content = self._text(block, "tool_use_id", field), block.get("content")
        text = ""
        if content is not None:
            text = text_of(content, f"{field}.content", TEXT_BLOCKS, frozenset(), self._violations)
        if block.get("is_error") is True:
            text = f"Error: {text}"  # templates have no other way to say it
        turn: Turn = {"role": "tool", "content": text, "tool_call_id": call_id}
        return turn | ({"name": self._names[call_id]} if call_id in self._names else {})

    def _text(self, block: Mapping[str, Any], name: str, field: str) -> str:
        value = block.get(name)
        if isinstance(value, str) and value:
            return value
        self._violations.append(FieldViolation(f"{field}.{name}", "must be a text with at least one character"))
        return ""
