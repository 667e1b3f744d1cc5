"""What the engine alone would let pass, and a parser of the answer would not; each is ruled out, or refused by name."""

from typing import Any

import pytest

from benchmarks.structured.drawing import says
from weir.core.grammar import Grammar
from weir.grammar.json_schema import engine_schema
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import GrammarError, Vocabulary

OPEN: dict[str, Any] = {
    "type": "object",
    "properties": {"é": {"type": "integer"}},
    "additionalProperties": {"type": "string"},
}


@pytest.mark.parametrize(
    ("schema", "text", "may_be_said"),
    [
        (OPEN, r'{"\u00e9":"x"}', False),  # the key é, and what others may have
        (OPEN, '{"é":1,"e":"x"}', True),
        ({"type": "string", "format": "date"}, '"2024-02-29"', True),
        ({"type": "string", "format": "date"}, '"2023-02-29"', False),
        ({"type": "string", "format": "date"}, '"1900-02-29"', False),
        ({"type": "string", "format": "date"}, '"2000-02-29"', True),
        ({"type": "string", "format": "date"}, '"0000-01-01"', False),
        ({"type": "string", "format": "date"}, '"2023-12-31"', True),
        ({"format": "date", "pattern": "1$"}, '"2023-12-30"', False),
        ({"format": "date", "pattern": "1$"}, "7", True),
        ({"type": "string", "format": "date-time"}, '"2023-02-29T10:11:12Z"', False),
        ({"type": "string", "format": "date-time"}, '"2023-02-28T10:11:60Z"', False),
        ({"type": "string", "format": "date-time"}, '"2023-02-28T10:11:12.5+01:00"', True),
        ({"type": "string", "format": "time"}, '"10:11:60Z"', False),
        ({"type": "string", "format": "time"}, '"10:11:59Z"', True),
        ({"$ref": "#/x/a~1b", "x": {"a/b": {"type": "string", "format": "date"}}}, '"2023-02-29"', False),
        ({"const": {"format": "date"}}, '{"format":"date"}', True),  # data that looks like a schema
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}', True),
        ({"type": "object", "minProperties": 1}, '{"a":1,"a":2}', True),
    ],
)
def test_what_may_be_said(
    schema: dict[str, Any], text: str, may_be_said: bool, toy_engine: LlguidanceEngine, toy: Vocabulary
) -> None:
    assert says(toy_engine.compile(Grammar.json_schema(schema)), toy, list(text.encode())) == may_be_said


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 2},
        {"minProperties": 3, "required": ["a"]},
        {"minProperties": 2, "additionalProperties": False, "patternProperties": {"^a": {}}},
        {"$defs": {"x": {"anyOf": [{"items": {"minProperties": 2}}]}}},
    ],
)
def test_keys_that_may_come_twice_are_not_counted(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"^minProperties \([23]\) cannot be held to"):
        engine_schema(Grammar.json_schema(schema).source)


def test_drafts_whose_keywords_the_engine_does_not_know_are_refused() -> None:
    with pytest.raises(GrammarError, match="draft 3"):
        engine_schema('{"$schema":"http://json-schema.org/draft-03/schema#","divisibleBy":3}')


def test_a_schema_whose_author_wrote_a_key_twice_is_refused() -> None:
    with pytest.raises(GrammarError, match="has the key 'type' twice"):
        engine_schema('{"properties":{"a":{"type":"string","type":"integer"}}}')


def test_a_schema_that_refers_to_itself_is_looked_at_once() -> None:
    source = '{"properties":{"a":{"$ref":"#/properties/a"},"b":{"$ref":"#/nowhere"}}}'
    assert engine_schema(source).startswith(source[:-1])


def test_a_deep_schema_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(GrammarError, match="nested too deeply"):
        engine_schema('{"items":' * 6000 + "{}" + "}" * 6000)
