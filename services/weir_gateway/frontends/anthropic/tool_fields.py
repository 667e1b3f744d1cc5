"""`tools` and `tool_choice` as Anthropic writes them."""

from typing import Any

from weir.core.errors import FieldViolation
from weir.core.tools import Tool
from weir_gateway.frontends.bodies.checks import shown
from weir_gateway.frontends.bodies.function_tools import ToolChoice, is_list_of_tools, one_of, read_tool, tool_use_of
from weir_gateway.tools.definitions import ToolUse

SCHEMA = "input_schema"
_CHOICES = ("auto", "any", "tool", "none")


def message_tools_of(
    tools: list[Any] | None, tool_choice: dict[str, Any] | None, violations: list[FieldViolation]
) -> ToolUse | None:
    """None: nothing may be called, and the model is told of no tools, whatever they are; or it is in `violations`."""
    given = tool_choice or {"type": "auto"}
    choice = _choice_of(given, violations)
    if choice is None or choice.is_none:
        return None
    is_parallel = given.get("disable_parallel_tool_use") is not True
    return tool_use_of(_tools_of(tools or [], violations), choice, violations, is_parallel=is_parallel)


def _tools_of(entries: list[Any], violations: list[FieldViolation]) -> list[Tool]:
    if not is_list_of_tools(entries, violations):
        return []
    tools = []
    for index, entry in enumerate(entries):
        field = f"tools[{index}]"
        kind = (entry.get("type") or "custom") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or kind != "custom":
            problem = f"is of type {shown(kind)}; tools of one's own are served alone, with name and {SCHEMA}"
            violations.append(FieldViolation(field, problem))
            continue
        tool = read_tool(entry, field, violations, schema=SCHEMA)
        if tool is not None:
            tools.append(tool)
    return tools


def _choice_of(value: dict[str, Any], violations: list[FieldViolation]) -> ToolChoice | None:
    """None: it is in `violations`."""
    kind = one_of(value.get("type"), _CHOICES, "tool_choice.type", violations)
    if kind != "tool":
        return None if kind is None else ToolChoice(is_none=kind == "none", is_required=kind == "any")
    name = value.get("name")
    if isinstance(name, str):
        return ToolChoice(is_required=True, names=(name,), is_named=True, field="tool_choice.name")
    violations.append(FieldViolation("tool_choice.name", "must be the name of a tool"))
    return None
