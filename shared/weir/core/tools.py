"""Functions that a model may call, as both ends of the wire have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TOOLS = 128
"""Of one request, as OpenAI has it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `parameters`: the JSON schema of its arguments; None: it has none. `is_strict`: a call of it fits
    that schema, whatever the model would write."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False

    @property
    def definition(self) -> Mapping[str, Any]:
        """As templates take it, which is as OpenAI's API has it. Of `strict` no model has been taught anything."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of its arguments, which are an object in any case."""
        return {"type": "object", "additionalProperties": False} if self.parameters is None else self.parameters
