"""`tools` and `tool_choice` as OpenAI's two APIs write them: chats have a function's fields one level deeper."""

from dataclasses import dataclass
from typing import Any

from weir.core.errors import FieldViolation
from weir.core.tools import Tool
from weir_gateway.frontends.bodies.function_tools import ToolChoice, is_list_of_tools, one_of, read_tool, tool_use_of
from weir_gateway.tools.definitions import ToolUse

_MODES = ("none", "auto", "required")
_ALLOWED_MODES = ("auto", "required")


@dataclass(frozen=True, slots=True)
class ToolFields:
    """Reads the tools of one API. `function` and `allowed`: the fields that hold those of a function, and those of
    allowed tools; empty: they stand beside `type`."""

    function: str = ""
    allowed: str = ""

    def tool_use_of(
        self, tools: list[Any] | None, tool_choice: object, parallel: bool | None, violations: list[FieldViolation]
    ) -> ToolUse | None:
        """None: nothing may be called, and the model is told of no tools, whatever they are; or it is in
        `violations`."""
        choice = self._choice_of(tool_choice, violations)
        if choice is None or choice.is_none:
            return None
        return tool_use_of(
            self._tools_of(tools or [], violations), choice, violations, is_parallel=parallel is not False
        )

    def _tools_of(self, entries: list[Any], violations: list[FieldViolation]) -> list[Tool]:
        if not is_list_of_tools(entries, violations):
            return []
        tools = []
        for index, entry in enumerate(entries):
            function = self._function_of(entry, f"tools[{index}]", violations)
            tool = None if function is None else read_tool(function, self._within(f"tools[{index}]"), violations)
            if tool is not None:
                tools.append(tool)
        return tools

    def _function_of(self, entry: object, field: str, violations: list[FieldViolation]) -> dict[str, Any] | None:
        function = _inner(entry, self.function)
        if isinstance(entry, dict) and entry.get("type") == "function" and function is not None:
            return function
        own = '"name": …, "parameters": …'
        shown = f'"{self.function}": {{{own}}}' if self.function else own
        problem = f'must be {{"type": "function", {shown}}}; no other kind is served'
        violations.append(FieldViolation(field, problem))
        return None

    def _choice_of(self, value: object, violations: list[FieldViolation]) -> ToolChoice | None:
        """None: it is in `violations`."""
        if value is None or isinstance(value, str):
            mode = one_of("auto" if value is None else value, _MODES, "tool_choice", violations)
            return None if mode is None else ToolChoice(is_none=mode == "none", is_required=mode == "required")
        kind, allowed = value.get("type") if isinstance(value, dict) else None, _inner(value, self.allowed)
        if kind == "function":
            name = self._name_of(value, "tool_choice", violations)
            field = f"{self._within('tool_choice')}.name"
            return None if name is None else ToolChoice(is_required=True, names=(name,), is_named=True, field=field)
        if kind == "allowed_tools" and allowed is not None:
            return self._allowed_of(allowed, violations)
        problem = "must be none, auto, required, or an object whose type is function or allowed_tools"
        violations.append(FieldViolation("tool_choice", problem))
        return None

    def _allowed_of(self, allowed: dict[str, Any], violations: list[FieldViolation]) -> ToolChoice | None:
        field = f"tool_choice.{self.allowed}" if self.allowed else "tool_choice"
        mode = one_of(allowed.get("mode", "auto"), _ALLOWED_MODES, f"{field}.mode", violations)
        entries = allowed.get("tools")
        if not isinstance(entries, list):
            violations.append(FieldViolation(f"{field}.tools", "must be a list of tools by their names"))
            return None
        if mode is None or not is_list_of_tools(entries, violations):
            return None
        names = [self._name_of(entry, f"{field}.tools[{index}]", violations) for index, entry in enumerate(entries)]
        found = tuple(dict.fromkeys(name for name in names if name is not None))
        return ToolChoice(is_required=mode == "required", names=found, field=f"{field}.tools")

    def _name_of(self, value: object, field: str, violations: list[FieldViolation]) -> str | None:
        name = (_inner(value, self.function) or {}).get("name")
        if isinstance(name, str):
            return name
        violations.append(FieldViolation(f"{self._within(field)}.name", "must be the name of a tool"))
        return None

    def _within(self, field: str) -> str:
        return f"{field}.{self.function}" if self.function else field


def _inner(value: object, name: str) -> dict[str, Any] | None:
    found = value.get(name) if name and isinstance(value, dict) else value
    return found if isinstance(found, dict) else None


CHAT_TOOLS = ToolFields(function="function", allowed="allowed_tools")
RESPONSE_TOOLS = ToolFields()
