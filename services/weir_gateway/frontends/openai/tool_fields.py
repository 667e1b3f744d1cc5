"""`tools` and `tool_choice` of a chat, as OpenAI writes them."""

from typing import Any

from weir.core.errors import FieldViolation
from weir_gateway.frontends.function_tools import ToolChoice, is_list_of_tools, one_of, read_tool, tool_use_of
from weir_gateway.tools.definitions import Tool, ToolUse

_MODES = ("none", "auto", "required")
_ALLOWED_MODES = ("auto", "required")


def chat_tools_of(
    tools: list[Any] | None, tool_choice: object, parallel: bool | None, violations: list[FieldViolation]
) -> ToolUse | None:
    """None: nothing may be called, and the model is told of no tools, whatever they are; or it is in `violations`."""
    choice = _choice_of(tool_choice, violations)
    if choice is None or choice.is_none:
        return None
    return tool_use_of(_tools_of(tools or [], violations), choice, violations, is_parallel=parallel is not False)


def _tools_of(entries: list[Any], violations: list[FieldViolation]) -> list[Tool]:
    if not is_list_of_tools(entries, violations):
        return []
    tools = []
    for index, entry in enumerate(entries):
        function = _function_of(entry, f"tools[{index}]", violations)
        tool = None if function is None else read_tool(function, f"tools[{index}].function", violations)
        if tool is not None:
            tools.append(tool)
    return tools


def _function_of(entry: object, field: str, violations: list[FieldViolation]) -> dict[str, Any] | None:
    kind = entry.get("type") if isinstance(entry, dict) else None
    function = entry.get("function") if isinstance(entry, dict) else None
    if kind == "function" and isinstance(function, dict):
        return function
    problem = 'must be {"type": "function", "function": {"name": …, "parameters": …}}; no other kind is served'
    violations.append(FieldViolation(field, problem))
    return None


def _choice_of(value: object, violations: list[FieldViolation]) -> ToolChoice | None:
    """None: it is in `violations`."""
    if value is None or isinstance(value, str):
        mode = one_of("auto" if value is None else value, _MODES, "tool_choice", violations)
        return None if mode is None else ToolChoice(is_none=mode == "none", is_required=mode == "required")
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "function":
        name = _name_of(value, "tool_choice", violations)
        field = "tool_choice.function.name"
        return None if name is None else ToolChoice(is_required=True, names=(name,), is_named=True, field=field)
    if isinstance(value, dict) and kind == "allowed_tools" and isinstance(value.get("allowed_tools"), dict):
        return _allowed_of(value["allowed_tools"], violations)
    problem = "must be none, auto, required, or an object whose type is function or allowed_tools"
    violations.append(FieldViolation("tool_choice", problem))
    return None


def _allowed_of(allowed: dict[str, Any], violations: list[FieldViolation]) -> ToolChoice | None:
    field = "tool_choice.allowed_tools"
    mode = one_of(allowed.get("mode", "auto"), _ALLOWED_MODES, f"{field}.mode", violations)
    entries = allowed.get("tools")
    if not isinstance(entries, list):
        violations.append(FieldViolation(f"{field}.tools", "must be a list of tools by their names"))
        return None
    if mode is None or not is_list_of_tools(entries, violations):
        return None
    names = [_name_of(entry, f"{field}.tools[{index}]", violations) for index, entry in enumerate(entries)]
    found = tuple(dict.fromkeys(name for name in names if name is not None))
    return ToolChoice(is_required=mode == "required", names=found, field=f"{field}.tools")


def _name_of(value: object, field: str, violations: list[FieldViolation]) -> str | None:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str):
        return name
    violations.append(FieldViolation(f"{field}.function.name", "must be the name of a tool"))
    return None
