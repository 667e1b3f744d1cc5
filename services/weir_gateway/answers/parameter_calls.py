"""Calls whose arguments come one by one between markers, without types, as Qwen3-Coder writes them. They become JSON:

<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
"""

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from weir_gateway.answers.calls import Reading
from weir_gateway.answers.events import AnswerEvent, ToolArguments, ToolCallBegan, ToolCallEnded
from weir_gateway.answers.markers import MarkerSet

_FUNCTION, _END_OF_FUNCTION, _PARAMETER = "<function=", "</function>", "<parameter="
_MAX_TAG_CHARS = 300
_TAG = re.compile(r"<(?:function|parameter)=([^<>]+)>")
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_JSON_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


class _At(Enum):
    FUNCTION = auto()
    PARAMETERS = auto()
    """Before one, or before the end of the function."""
    VALUE = auto()


class ParameterCallReader:
    """Tells of a call with its name, and of each argument once it is complete. What comes where an argument, or the end
    of the function, should ends the call."""

    def __init__(self, tool_names: frozenset[str], first_index: int, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: by the tool's name, of its arguments: they say what is a number and what is a text."""
        self.state = Reading.GOING_ON
        self.next_index = first_index
        self.has_told = False
        self._tool_names = tool_names
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._at = _At.FUNCTION
        self._ends = MarkerSet(("</parameter>",))
        self._key = ""
        self._value: list[str] = []
        self._num_arguments = 0

    def held(self) -> str:
        return ""

    def read(self, text: str, start: int, events: list[AnswerEvent]) -> int:
        position = start
        while position < len(text) and self.state is Reading.GOING_ON:
            step = {_At.FUNCTION: self._function, _At.PARAMETERS: self._parameter, _At.VALUE: self._read_value}
            end = step[self._at](text, position, events)
            if end is None:
                break
            position = end
        return position

    def _function(self, text: str, start: int, events: list[AnswerEvent]) -> int | None:
        """Read as a whole, with white space before it, so that what is none can be looked through for markers."""
        tag_start = _after_space(text, start)
        name, end = _read_tag(text, tag_start, _FUNCTION) if tag_start - start < _MAX_TAG_CHARS else (None, tag_start)
        if name is None and end is None:
            return None
        if name not in self._tool_names or name is None:
            self.state = Reading.NO_CALL
            return start
        self.has_told = True
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._at = _At.PARAMETERS
        events += [ToolCallBegan(self.next_index, name), ToolArguments(self.next_index, "{")]
        return end

    def _parameter(self, text: str, start: int, events: list[AnswerEvent]) -> int | None:
        start = _after_space(text, start)
        if start == len(text):
            return start
        if text.startswith(_END_OF_FUNCTION, start):
            self._end(events)
            return start + len(_END_OF_FUNCTION)
        if len(text) - start < len(_END_OF_FUNCTION) and _END_OF_FUNCTION.startswith(text[start:]):
            return None
        key, end = _read_tag(text, start, _PARAMETER)
        if key is None and end is None:
            return None
        if key is None:
            self._end(events)
            return start
        self._key, self._value, self._at = key, [], _At.VALUE
        return end

    def _read_value(self, text: str, start: int, events: list[AnswerEvent]) -> int | None:
        found = self._ends.find(text, start)
        end = self._ends.held_from(text, start) if found is None else found.end - len(found.marker)
        self._value.append(text[start:end])
        if found is None:
            return end if end > start else None
        value = _json_of("".join(self._value).removeprefix("\n").removesuffix("\n"), self._properties.get(self._key))
        separator = ", " if self._num_arguments else ""
        pair = f"{separator}{json.dumps(self._key, ensure_ascii=False)}: {value}"
        events.append(ToolArguments(self.next_index, pair))
        self._num_arguments += 1
        self._at = _At.PARAMETERS
        return found.end

    def _end(self, events: list[AnswerEvent]) -> None:
        events += [ToolArguments(self.next_index, "}"), ToolCallEnded(self.next_index)]
        self.next_index += 1
        self.state = Reading.DONE


def _after_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _read_tag(text: str, start: int, opening: str) -> tuple[str | None, int | None]:
    """What a tag names, and where it ends. (None, None): more must come first; (None, somewhere): it is no such tag."""
    begins_so = text.startswith(opening, start) or opening.startswith(text[start : start + len(opening)])
    end = text.find(">", start, start + _MAX_TAG_CHARS) + 1
    if begins_so and not end and len(text) - start < _MAX_TAG_CHARS:
        return None, None
    tag = _TAG.fullmatch(text, start, end) if end and text.startswith(opening, start) else None
    return (None, start) if tag is None else (tag.group(1).strip(), end)


def _json_of(value: str, schema: object) -> str:
    """A value of the type that its schema has; one that does not fit, or has none, is what it looks like."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    types = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else None
    literal = value.strip()
    literal = _PYTHON_LITERALS.get(literal, literal)
    try:
        parsed = json.loads(literal)
    except (ValueError, RecursionError):
        parsed = ""
    is_text = isinstance(parsed, str) or (types is not None and "string" in types and not _fits(parsed, types))
    return json.dumps(value, ensure_ascii=False) if is_text else literal


def _fits(parsed: object, types: list[Any]) -> bool:
    return any(name in types for name in _JSON_TYPES.get(type(parsed), ()))
