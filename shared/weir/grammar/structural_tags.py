"""Texts with tags in which a part is held to a schema, as vLLM and xgrammar write them (`structural_tag`).

    {"type": "structural_tag", "triggers": ["<call"],
     "structures": [{"begin": "<call=now>", "schema": {"type": "object"}, "end": "</call>"}]}

The answer is free until a trigger comes; then it goes on as one of the structures that begin with it, and is free
again. It may end where it is free. The notation is that of llguidance (`docs/syntax.md` there), with lazy lexemes for
triggers.
"""

import json
from typing import Any, NamedTuple

from weir.core.grammar import Grammar
from weir.grammar.json_schema import engine_schema
from weir.grammar.protocol import GrammarError

MAX_STRUCTURES = 128
_FREE = """%llguidance {}
start: (TAGS)* rest
rest: FREE
FREE: /(.|\\n)*/
"""


class _Structure(NamedTuple):
    begin: str
    schema: str
    end: str


def grammar_of_structural_tag(value: object) -> Grammar:
    """Of the object, or its text in JSON. Raises GrammarError that names the part that is wrong."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise GrammarError("is no JSON") from None
    if not isinstance(value, dict) or value.get("type") != "structural_tag":
        raise GrammarError('must be an object whose type is "structural_tag"')
    if "format" in value:
        raise GrammarError("has a format, which is not served: give structures and triggers")
    triggers = _texts_of(value.get("triggers"), "triggers")
    by_trigger: dict[str, list[_Structure]] = {trigger: [] for trigger in triggers}
    for index, structure in enumerate(_structures_of(value.get("structures"))):
        trigger = next((trigger for trigger in triggers if structure.begin.startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"structures[{index}].begin begins with none of the triggers")
        by_trigger[trigger].append(structure)
    return Grammar("grammar", _lark_of({trigger: found for trigger, found in by_trigger.items() if found}))


def _texts_of(value: object, field: str) -> list[str]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_STRUCTURES or not all(map(_is_some_text, value)):
        raise GrammarError(f"{field} must be a list of 1 to {MAX_STRUCTURES} texts")
    return sorted(set(value), key=lambda text: (-len(text), text))


def _is_some_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _structures_of(value: object) -> list[_Structure]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_STRUCTURES:
        raise GrammarError(f"structures must be a list of 1 to {MAX_STRUCTURES} objects")
    return [_structure_of(one, f"structures[{index}]") for index, one in enumerate(value)]


def _structure_of(value: Any, field: str) -> _Structure:
    begin, end = (value.get(name) if isinstance(value, dict) else None for name in ("begin", "end"))
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"{field} must be an object with the texts begin and end, and a schema")
    try:
        return _Structure(begin, engine_schema(json.dumps(value.get("schema", {}), ensure_ascii=False)), end)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{field}.schema: {error}") from None
    except GrammarError as error:
        raise GrammarError(f"{field}.schema {error}") from None


def _lark_of(by_trigger: dict[str, list[_Structure]]) -> str:
    lines = [_FREE.replace("TAGS", " | ".join(f"tag_{index}" for index in range(len(by_trigger))))]
    for index, (trigger, structures) in enumerate(by_trigger.items()):
        bodies = (
            f"{_literal(one.begin.removeprefix(trigger))} %json {one.schema} {_literal(one.end)}" for one in structures
        )
        lines.append(f"trigger_{index}[lazy]: FREE {_literal(trigger)}")
        lines.append(f"tag_{index}: trigger_{index} ({' | '.join(bodies)})")
    return "\n".join(lines)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
