"""Grammars as parts of a larger one, in Lark's notation as llguidance has it (`docs/syntax.md` there)."""

import json
import re
from collections.abc import Mapping
from typing import Any

from weir.core.grammar import Grammar
from weir.grammar.protocol import GrammarError
from weir.grammar.sources import choices_of

JSON_OPTIONS: Mapping[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""How JSON may be written, wherever a schema stands. White space is bounded: models never end it."""
_SLASH_OR_ESCAPE = re.compile(r"\\.|/", re.DOTALL)


def rule_of(grammar: Grammar) -> str:
    """The right side of a rule that has the texts of this grammar and no others. Raises GrammarError."""
    match grammar.kind:
        case "json_schema":
            return f"%json {_with_options(grammar.source)}"
        case "regex":
            return _between_slashes(grammar.source)
        case "choice":
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in choices_of(grammar))
        case "grammar":
            return f"%lark {{\n{grammar.source}\n}}"


def check_schema(source: str) -> None:
    """The engine would take the schema of anything else for any text. Raises GrammarError."""
    if not source.lstrip().startswith("{"):
        raise GrammarError("must be a JSON schema, which is an object")


def _with_options(source: str) -> str:
    """What a schema says of itself does not count."""
    check_schema(source)
    try:
        schema = json.loads(source)
        return json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"is no JSON that can be read: {error}") from None


def _between_slashes(regex: str) -> str:
    """The notation ends a regular expression at a slash, or a line."""
    escaped = _SLASH_OR_ESCAPE.sub(lambda found: r"\/" if found[0] == "/" else found[0], regex)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"
