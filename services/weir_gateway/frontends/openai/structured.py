"""What an answer must look like, as OpenAI (`response_format`, `text.format`), vLLM (`structured_outputs`) and
Anthropic (`output_config.format`, once `output_format`) write it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weir.core.errors import FieldViolation
from weir.core.grammar import Grammar, GrammarKind
from weir.grammar.protocol import GrammarError
from weir.grammar.structural_tags import grammar_of_structural_tag

_NAMES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MODIFIERS = ("disable_any_whitespace", "whitespace_pattern")
"""Of white space in JSON."""
_KINDS_OF_TEXTS: Mapping[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
"""A schema may be an object too; as a text it is the object's, as vLLM takes it."""
_SCHEMA_NAMES = ("name", "description", "schema", "strict")


def grammar_of(
    response_format: object, structured_outputs: object, violations: list[FieldViolation]
) -> tuple[Grammar | None, str]:
    """And the field that it came from. None: the answer is free. What is wrong goes to `violations`."""
    found = _of_response_format(response_format, violations)
    other = _of_structured_outputs(structured_outputs, violations)
    if found is not None and other is not None:
        violations.append(FieldViolation("structured_outputs", "comes with response_format; give one of them"))
    return found or other or (None, "response_format")


def _of_response_format(value: object, violations: list[FieldViolation]) -> tuple[Grammar, str] | None:
    """A schema counts in any case: `strict: false` would let an answer miss it, and nobody wants that."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object(), "response_format"
    if kind == "structural_tag":
        return _of_structural_tag(value, "response_format", violations)
    if not isinstance(value, dict) or kind != "json_schema":
        problem = "must be an object whose type is text, json_object, json_schema or structural_tag"
        violations.append(FieldViolation("response_format", problem))
        return None
    return _of_form(value.get("json_schema"), violations)


def grammar_of_format(
    value: object, field: str, names: Sequence[str], violations: list[FieldViolation]
) -> tuple[Grammar, str] | None:
    """Of a format that has its schema in itself, with `names` beside its type. None: the answer is free."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return Grammar.json_object(), field
    if not isinstance(value, dict) or kind != "json_schema" or "schema" not in value:
        violations.append(FieldViolation(field, 'must be an object of type json_schema with a "schema"'))
        return None
    unknown = next((name for name in value if name not in ("type", *names)), None)
    if unknown is not None:
        known = f"known are type, {', '.join(names)}"
        violations.append(FieldViolation(field, f"has {str(unknown)[:64]!r}, which is not known; {known}"))
        return None
    return _of_schema(value["schema"], f"{field}.schema", violations)


def _of_form(form: object, violations: list[FieldViolation]) -> tuple[Grammar, str] | None:
    field = "response_format.json_schema"
    if not isinstance(form, dict) or "schema" not in form:
        violations.append(FieldViolation(field, 'must be an object with a "schema"'))
        return None
    unknown = next((name for name in form if name not in _SCHEMA_NAMES), None)
    if unknown is not None:
        known = f"known are {', '.join(_SCHEMA_NAMES)}"
        violations.append(FieldViolation(field, f"has {str(unknown)[:64]!r}, which is not known; {known}"))
        return None
    return _of_schema(form["schema"], f"{field}.schema", violations)


def _of_structured_outputs(value: object, violations: list[FieldViolation]) -> tuple[Grammar, str] | None:
    if value is None:
        return None
    given = {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else {}
    modifiers = {name: given.pop(name) for name in _MODIFIERS if name in given}
    unknown = next((name for name in given if name not in _NAMES), None)
    if unknown is not None:
        problem = f"is not served; one of {', '.join(_NAMES)} is, and {' or '.join(_MODIFIERS)} beside JSON"
        violations.append(FieldViolation(f"structured_outputs.{str(unknown)[:64]}", problem))
        return None
    if len(given) != 1:
        violations.append(FieldViolation("structured_outputs", f"must have exactly one of {', '.join(_NAMES)}"))
        return None
    ((name, one),) = given.items()
    found = _of_constraint(name, one, violations)
    return _with_white_space(found, modifiers, violations) if found is not None and modifiers else found


def _with_white_space(
    found: tuple[Grammar, str], modifiers: Mapping[str, Any], violations: list[FieldViolation]
) -> tuple[Grammar, str] | None:
    """Written into the schema, as llguidance has it there, so that the record of a sequence has it too."""
    grammar, field = found
    is_disabled, pattern = (modifiers.get(name) for name in _MODIFIERS)
    given = f"structured_outputs.{next(iter(modifiers))}"
    if grammar.kind != "json_schema":
        violations.append(FieldViolation(given, "is of JSON; leave it out"))
    elif is_disabled is not None and not isinstance(is_disabled, bool):
        violations.append(FieldViolation(f"structured_outputs.{_MODIFIERS[0]}", "must be true or false"))
    elif pattern is not None and is_disabled:
        violations.append(FieldViolation(f"structured_outputs.{_MODIFIERS[1]}", f"comes with {_MODIFIERS[0]}"))
    else:
        try:
            schema = json.loads(grammar.source)
        except (ValueError, RecursionError):
            return found  # which is told when it is compiled
        if isinstance(schema, dict):
            wanted = (
                {"whitespace_pattern": pattern} if pattern is not None else {"whitespace_flexible": not is_disabled}
            )
            return Grammar.json_schema(schema | {"x-guidance": wanted}), field
        return found
    return None


def _of_structural_tag(value: object, field: str, violations: list[FieldViolation]) -> tuple[Grammar, str] | None:
    try:
        return grammar_of_structural_tag(value), field
    except GrammarError as error:
        violations.append(FieldViolation(field, str(error)))
        return None


def _of_constraint(name: str, value: Any, violations: list[FieldViolation]) -> tuple[Grammar, str] | None:
    field = f"structured_outputs.{name}"
    if name == "json" and not isinstance(value, str):
        return _of_schema(value, field, violations)
    if name == "structural_tag":
        return _of_structural_tag(value, field, violations)
    if name == "json_object" and value is True:
        return Grammar.json_object(), field
    if name == "choice" and isinstance(value, list) and all(isinstance(text, str) for text in value):
        return Grammar.choice(value), field
    kind = _KINDS_OF_TEXTS.get(name)
    if kind is not None and isinstance(value, str):
        return Grammar(kind, value), field
    wanted = {"json_object": "true", "choice": "a list of texts"}.get(name, "a text")
    violations.append(FieldViolation(field, f"must be {wanted}"))
    return None


def _of_schema(value: object, field: str, violations: list[FieldViolation]) -> tuple[Grammar, str] | None:
    if not isinstance(value, Mapping):
        violations.append(FieldViolation(field, "must be a JSON schema, which is an object"))
        return None
    try:
        return Grammar.json_schema(value), field
    except (ValueError, RecursionError):
        violations.append(FieldViolation(field, "is nested too deeply"))
        return None
