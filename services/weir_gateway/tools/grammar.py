"""The grammar of an answer that may, or must, call tools: in the form that the model was taught, so that it is held to
what it would write anyway, and the parser of answers finds the calls.

    required      call (between call)*                        names and arguments as declared
    auto          text | text opening-marker call (between call)*    free up to the marker, held to the tools after it

Markers that are tokens of their own are such in the grammar (`<[id]>`), others are text. A tool's schema is the root of
a `%json` of its own, so that its `$ref`s mean what they say. Lark's notation as llguidance has it (`docs/syntax.md`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weir.core.grammar import Grammar
from weir.core.tools import Tool
from weir.grammar.lark import rule_of
from weir.grammar.protocol import GrammarError
from weir_gateway.answers.formats import LLAMA3_JSON, MISTRAL_LIST, PHI4_MINI, CallSyntax, ToolFormat
from weir_gateway.tools.definitions import ToolUse

MAX_CALLS = 16
"""In one answer that is held to a grammar: small models never end a list that need not end."""

_LISTS = (MISTRAL_LIST.name, PHI4_MINI.name)
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

TokenOf = Callable[[str], int | None]
"""The id of the token that a marker is; None: it is text."""


class ToolSchemaError(GrammarError):
    """Of the tool at this place of the list."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True, slots=True)
class _Layout:
    """What of a format is around calls. `opens` and `closes` are around each, or around a list of them."""

    opens: str
    closes: str = ""
    after_opening: str = ""
    before_closing: str = ""
    between: str = ""
    is_list: bool = False


def tool_grammar(
    use: ToolUse, tool_format: ToolFormat, token_of: TokenOf, content: Grammar | None = None
) -> Grammar | None:
    """None: nothing of it is held to a grammar. `content`: a JSON schema of an answer without calls.

    Raises ToolSchemaError for the schema of a tool, GrammarError for that of the content.
    """
    if not use.is_held_to_grammar and content is None:
        return None
    layout = _layout_of(tool_format)
    calls = _Calls(use, tool_format, layout, token_of)
    rules = calls.rules()
    if use.is_required:
        return Grammar("grammar", "\n".join([f"start: {calls.whole}", *rules]))
    if content is not None:
        rules.append(f"content: {rule_of(content)}")
        return Grammar("grammar", "\n".join([f"start: content | {calls.whole}", *rules]))
    return Grammar("grammar", "\n".join([*calls.start_after_text(), *rules]))


class _Calls:
    """The rules of calls, which are read from the top: `first` and its like name rules and texts in Lark."""

    def __init__(self, use: ToolUse, tool_format: ToolFormat, layout: _Layout, token_of: TokenOf) -> None:
        self._tools = use.callable_tools
        self._places = {tool.name: place for place, tool in enumerate(use.tools)}
        self._holds_all = use.is_required
        self._format = tool_format
        self._layout = layout
        self._token_of = token_of
        self._max_calls = MAX_CALLS if use.is_parallel and not use.is_named else 1

    @property
    def whole(self) -> str:
        """From the first marker to the end."""
        return " ".join(filter(None, (self._marker(self._layout.opens), "rest")))

    def start_after_text(self) -> list[str]:
        """Text without a call, or up to one."""
        opens = self._layout.opens
        spelled = "|".join(map(_regex_of, self._format.opens))
        free = rf"& ~/(.|\n)*({spelled})(.|\n)*/"  # the parser would take it for a call
        if not opens:  # a call is the whole answer
            return [f"start: TEXT | {self.whole}", rf"TEXT: /([^\s{{](.|\n)*)?/ {free}"]
        if self._token_of(opens) is not None:
            return [f"start: TEXT | TEXT {self.whole}", rf"TEXT: /(.|\n)*/ {free}"]
        return [
            "start: TEXT | text_and_marker rest",
            rf"TEXT: /(.|\n)*/ {free}",
            rf"text_and_marker[lazy]: /(.|\n)*{_regex_of(opens)}/",
        ]

    def rules(self) -> list[str]:
        layout = self._layout
        opens, closes = self._marker(layout.opens), self._marker(layout.closes)
        more, before, after = self._max_calls - 1, _text(layout.before_closing), _text(layout.after_opening)
        if layout.is_list:
            inner = f'"[" call ({_text(layout.between)} call){{0,{more}}} "]"' if more else '"[" call "]"'
            rest = f"{after} {inner} {before} {closes}"
        else:
            one = f"{after} call {before} {closes}"
            rest = one + (f" ({_text(layout.between)} {opens} {one}){{0,{more}}}" if more else "")
        named = [f"call_{index}" for index in range(len(self._tools))]
        is_by_parameters = self._format.syntax is CallSyntax.PARAMETERS
        return [
            *([r"value_of_text[lazy]: /(.|\n)*\n<\/parameter>/"] if is_by_parameters else []),
            f"rest: {' '.join(rest.split())}",
            f"call: {' | '.join(named)}",
            *(f"{name}: {self._call(tool)}" for name, tool in zip(named, self._tools, strict=True)),
        ]

    def _call(self, tool: Tool) -> str:
        schema = tool.schema if self._holds_all or tool.is_strict else _ANY_OBJECT
        if self._format.syntax is CallSyntax.PARAMETERS:
            return _parameters(tool.name, schema)
        try:
            arguments = rule_of(Grammar.json_schema(schema))
        except GrammarError as error:
            raise ToolSchemaError(self._places[tool.name], str(error)) from None
        if self._format.syntax is CallSyntax.NAMED:
            return f"{_text(tool.name)} {self._marker('[ARGS]')} {arguments}"
        head = f'{{"name": {json.dumps(tool.name)}, "{self._format.arguments_key}": '
        return f'{_text(head)} {arguments} "}}"'

    def _marker(self, text: str) -> str:
        token_id = self._token_of(text) if text else None
        return _text(text) if token_id is None else f"<[{token_id}]>"


def _layout_of(tool_format: ToolFormat) -> _Layout:
    if tool_format.name == LLAMA3_JSON.name:  # without its marker, which is for code; several calls were not taught
        return _Layout("")
    if tool_format.name in _LISTS:
        return _Layout(tool_format.opens[0], "".join(tool_format.closes[:1]), between=", ", is_list=True)
    if tool_format.syntax is CallSyntax.NAMED:
        return _Layout(tool_format.opens[0])
    closes = "".join(tool_format.closes[:1])
    return _Layout(tool_format.opens[0], closes, after_opening="\n", before_closing="\n", between="\n")


def _parameters(name: str, schema: Mapping[str, Any]) -> str:
    """A call whose arguments come one by one: those that must be given, in the schema's order. Values that are no text
    are JSON; what a schema says of them beyond that does not count, so that its `$ref`s need no root."""
    properties = schema.get("properties", {})
    required = [key for key in properties if key in schema.get("required", ())]
    parts = [_text(f"<function={name}>\n"), *(_parameter(key, properties[key]) for key in required)]
    optional = [f"({_parameter(key, properties[key])})?" for key in properties if key not in required]
    return " ".join([*parts, *optional, _text("</function>")])


def _parameter(key: str, schema: object) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    value = "value_of_text"
    if kind in ("number", "integer", "boolean", "object", "array", "null"):
        value = f'{rule_of(Grammar.json_schema({"type": kind}))} "\\n</parameter>"'
    return f'{_text(f"<parameter={key}>" + chr(10))} {value} "\\n"'


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex_of(text: str) -> str:
    """Of a regular expression between slashes: each character as itself."""
    return "".join(char if char.isalnum() or char in "<>_" else f"\\{char}" for char in text)


def schemas_of(use: ToolUse) -> Sequence[tuple[int, Grammar]]:
    """Of each tool that a grammar holds, with its place in the list: to find out which one is wrong."""
    return [
        (index, Grammar.json_schema(tool.schema))
        for index, tool in enumerate(use.tools)
        if tool.name in use.allowed and (use.is_required or tool.is_strict)
    ]
