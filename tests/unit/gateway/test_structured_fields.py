"""`response_format` and `structured_outputs`: which grammar each makes, and what is refused under which name."""

import json
from typing import Any

import pytest

from weir.core.errors import FieldViolation
from weir.core.grammar import Grammar
from weir_gateway.frontends.openai.structured import grammar_of

NULL = {"type": "null"}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f"],
    "structures": [{"begin": "<f=x>", "schema": NULL, "end": "</f>"}],
}


def made(response_format: object = None, structured_outputs: object = None) -> tuple[Grammar | None, str]:
    violations: list[FieldViolation] = []
    found = grammar_of(response_format, structured_outputs, violations)
    assert violations == []
    return found


def refused(response_format: object = None, structured_outputs: object = None) -> tuple[str, str]:
    violations: list[FieldViolation] = []
    grammar_of(response_format, structured_outputs, violations)
    [violation] = violations
    return violation.field, violation.description


def with_space(**wanted: object) -> Grammar:
    return Grammar.json_schema({**NULL, "x-guidance": wanted})


@pytest.mark.parametrize(
    ("given", "grammar", "field"),
    [
        ({"json": NULL}, Grammar.json_schema(NULL), "json"),
        ({"json": json.dumps(NULL)}, Grammar("json_schema", json.dumps(NULL)), "json"),
        ({"regex": "a"}, Grammar("regex", "a"), "regex"),
        ({"choice": ["a"]}, Grammar.choice(["a"]), "choice"),
        ({"grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"'), "grammar"),
        ({"json": NULL, "disable_any_whitespace": True}, with_space(whitespace_flexible=False), "json"),
        ({"json": NULL, "disable_any_whitespace": False}, with_space(whitespace_flexible=True), "json"),
        ({"json": "{}", "whitespace_pattern": " ?"}, with_space(whitespace_pattern=" ?"), "json"),
        ({"json": NULL, "regex": None, "whitespace_pattern": None}, Grammar.json_schema(NULL), "json"),
    ],
    ids=str,
)
def test_a_constraint_makes_its_grammar(given: dict[str, Any], grammar: Grammar, field: str) -> None:
    if given.get("json") == "{}":
        grammar = Grammar.json_schema({"x-guidance": {"whitespace_pattern": " ?"}})
    assert made(structured_outputs=given) == (grammar, f"structured_outputs.{field}")


def test_a_structural_tag_is_the_same_by_either_field_and_as_a_text() -> None:
    grammar, field = made(response_format=TAG)
    assert field == "response_format"
    for tag in (TAG, json.dumps(TAG)):
        assert made(structured_outputs={"structural_tag": tag}) == (grammar, "structured_outputs.structural_tag")


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern", "is of JSON"),
        ({"json": NULL, "disable_any_whitespace": 1}, "disable_any_whitespace", "true or false"),
        ({"json": NULL, "disable_any_whitespace": True, "whitespace_pattern": ""}, "whitespace_pattern", "comes with"),
        ({"json": NULL, "disable_additional_properties": True}, "disable_additional_properties", "is not served"),
        ({"structural_tag": "{"}, "structural_tag", "is no JSON"),
        ({"structural_tag": {"type": "tag"}}, "structural_tag", '"structural_tag"'),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structural_tag", "has a format"),
        ({"structural_tag": TAG | {"triggers": ["<g"]}}, "structural_tag", "structures[0].begin begins with none"),
        ({"structural_tag": TAG | {"triggers": []}}, "structural_tag", "triggers must be"),
        ({"structural_tag": TAG | {"structures": [1]}}, "structural_tag", "structures[0] must be"),
        ({"structural_tag": TAG | {"structures": [{"begin": "<f", "schema": 5, "end": ""}]}}, "structural_tag",
         "structures[0].schema must be a JSON schema"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_held_to_is_refused_by_name(given: dict[str, Any], field: str, said: str) -> None:
    name, problem = refused(structured_outputs=given)
    assert name == f"structured_outputs.{field}"
    assert said in problem


def test_two_fields_at_once_are_one_too_many() -> None:
    assert refused({"type": "json_object"}, {"regex": "a"})[0] == "structured_outputs"
