"""Tools of a request, as all APIs of the port check them; each reads its own form of them."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weir.core.errors import FieldViolation
from weir.core.tools import MAX_TOOLS, Tool
from weir_gateway.frontends.bodies.checks import shown
from weir_gateway.json_sizes import try_find_size_problem_of
from weir_gateway.tools.definitions import ToolUse

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a client says of calling. `names`: of the tools that may be called; None: all. `field`: where that was
    said, and `is_named` that it was of one function."""

    is_none: bool = False
    is_required: bool = False
    names: tuple[str, ...] | None = None
    is_named: bool = False
    field: str = "tool_choice"


def is_list_of_tools(value: Sequence[object], violations: list[FieldViolation]) -> bool:
    """Not, where there are too many: then that is in `violations`."""
    if len(value) > MAX_TOOLS:
        violations.append(FieldViolation("tools", f"has {len(value)} tools; at most {MAX_TOOLS} are taken"))
    return len(value) <= MAX_TOOLS


def read_tool(
    given: Mapping[str, Any], field: str, violations: list[FieldViolation], *, schema: str = "parameters"
) -> Tool | None:
    """Of an object with `name`, `description`, `strict` and the schema under its name in this API. None: what is wrong
    with it is in `violations`."""
    num_before = len(violations)
    name, description, strict = given.get("name"), given.get("description"), given.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problem = f"is {shown(name)}; give 1 to 64 characters of A-Z a-z 0-9 _ -"
        violations.append(FieldViolation(f"{field}.name", problem))
    if description is not None and not isinstance(description, str):
        violations.append(FieldViolation(f"{field}.description", "must be a text"))
    if strict is not None and not isinstance(strict, bool):
        violations.append(FieldViolation(f"{field}.strict", "must be true or false"))
    parameters = given.get(schema)
    schema_problem = None if parameters is None else _try_find_schema_problem(parameters)
    if schema_problem is not None:
        violations.append(FieldViolation(f"{field}.{schema}", schema_problem))
    if len(violations) > num_before:
        return None
    return Tool(str(name), description, parameters, bool(strict))


def tool_use_of(
    tools: Sequence[Tool], choice: ToolChoice, violations: list[FieldViolation], *, is_parallel: bool
) -> ToolUse | None:
    """None: nothing may be called, or it is in `violations`."""
    names = [tool.name for tool in tools]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        problem = f"has {twice!r} twice; a name means one tool"
        violations.append(FieldViolation(f"tools[{_last_index(names, twice)}]", problem))
    if not tools:
        if choice.is_required or choice.names is not None:
            violations.append(FieldViolation(choice.field, "asks for a call; give tools with it"))
        return None
    unknown = next((name for name in choice.names or () if name not in names), None)
    if unknown is not None:
        violations.append(FieldViolation(choice.field, f"names {shown(unknown)}, which is none of the tools"))
    if choice.names is not None and not choice.names:
        violations.append(FieldViolation(choice.field, "names no tool; name at least one, or say none"))
    allowed = frozenset(names if choice.names is None else choice.names)
    return ToolUse(
        tuple(tools), allowed, is_required=choice.is_required, is_named=choice.is_named, is_parallel=is_parallel
    )


def arguments_of(value: object, field: str, violations: list[FieldViolation]) -> Mapping[str, Any]:
    """Of a call in an earlier turn: an object, which the APIs of OpenAI have written as a text."""
    found: object = None
    if isinstance(value, str):
        problem = try_find_size_problem_of(value)
        if problem is not None:
            violations.append(FieldViolation(field, problem))
            return {}
        try:
            found = json.loads(value or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            found = None
    if isinstance(found, dict):
        return found
    violations.append(FieldViolation(field, "must be a text that is a JSON object"))
    return {}


def one_of(value: object, known: Collection[str], field: str, violations: list[FieldViolation]) -> str | None:
    """None: it is none of them, which is in `violations`."""
    if isinstance(value, str) and value in known:
        return value
    violations.append(FieldViolation(field, f"is {shown(value)}; must be one of {', '.join(known)}"))
    return None


def _try_find_schema_problem(value: object) -> str | None:
    """What of a schema of arguments can be seen without an engine."""
    if not isinstance(value, Mapping):
        return "must be a JSON schema, which is an object"
    if value.get("type", "object") != "object":
        return f"is of type {shown(value['type'])}; arguments are an object"
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _last_index(names: Sequence[str], name: str) -> int:
    return len(names) - 1 - list(reversed(names)).index(name)
