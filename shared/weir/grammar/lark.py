"""Grammars as parts of a larger one, in Lark's notation as llguidance has it (`docs/syntax.md` there)."""

import json
import re

from weir.core.grammar import Grammar
from weir.grammar.json_schema import engine_schema
from weir.grammar.sources import choices_of

_SLASH_OR_ESCAPE = re.compile(r"\\.|/", re.DOTALL)


def rule_of(grammar: Grammar) -> str:
    """The right side of a rule that has the texts of this grammar and no others. Raises GrammarError."""
    match grammar.kind:
        case "json_schema":
            return f"%json {engine_schema(grammar.source)}"
        case "regex":
            return _between_slashes(grammar.source)
        case "choice":
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in choices_of(grammar))
        case "grammar":
            return f"%lark {{\n{grammar.source}\n}}"


def _between_slashes(regex: str) -> str:
    """The notation ends a regular expression at a slash, or a line."""
    escaped = _SLASH_OR_ESCAPE.sub(lambda found: r"\/" if found[0] == "/" else found[0], regex)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"
