"""How the tools of a request may be called, in the gateway's own form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weir.core.tools import Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools there are, and how they may be called.

    `allowed`: the names of those that may be; the model is told of all. `is_required`: an answer is at least one call.
    `is_named`: the client chose the one function that is called. `is_parallel`: there may be several calls.
    """

    tools: tuple[Tool, ...]
    allowed: frozenset[str]
    is_required: bool = False
    is_named: bool = False
    is_parallel: bool = True

    @classmethod
    def of_all(cls, tools: Sequence[Tool], *, is_required: bool = False, is_parallel: bool = True) -> "ToolUse":
        """Any of them."""
        allowed = frozenset(tool.name for tool in tools)
        return cls(tuple(tools), allowed, is_required=is_required, is_parallel=is_parallel)

    @property
    def definitions(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(tool.definition for tool in self.tools)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.allowed)

    @property
    def is_held_to_grammar(self) -> bool:
        """Whether something of it is a promise. Else the model writes what it wants."""
        is_restricted = len(self.allowed) < len(self.tools) or not self.is_parallel
        return self.is_required or is_restricted or any(tool.is_strict for tool in self.callable_tools)

    @property
    def num_bytes(self) -> int:
        """Of the definitions as JSON, which are a part of the prompt."""
        return len(json.dumps(self.definitions, ensure_ascii=False).encode("utf-8", "surrogatepass"))
