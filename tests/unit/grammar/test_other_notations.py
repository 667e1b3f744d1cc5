"""GBNF, structural tags, and how white space in JSON is bounded otherwise, over a toy of bytes."""

from typing import Any

import pytest

from benchmarks.structured.drawing import says, try_draw
from weir.core.grammar import Grammar
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import GrammarError, Vocabulary
from weir.grammar.structural_tags import grammar_of_structural_tag

GBNF = """# a list of numbers, as llama.cpp writes it
root   ::= "[" item ("," ws item)* "]"
item   ::= [0-9]{1,3} | "x"
ws     ::= [ \\t]?
"""
ADD = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=add>", "schema": ADD, "end": "</f>"},
        {"begin": "<f=now>", "schema": {"type": "null"}, "end": "</f>"},
    ],
}
LIST = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(("text", "expected"), [("[1,2]", True), ("[1, x]", True), ("[1000]", False), ("[]", False)])
def test_gbnf_is_read_as_llama_cpp_does(
    text: str, expected: bool, toy_engine: LlguidanceEngine, toy: Vocabulary
) -> None:
    compiled = toy_engine.compile(Grammar("grammar", GBNF))
    assert says(compiled, toy, list(text.encode())) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("free é\ntext", True),
        ('so <f=add>{"x":1}</f>', True),
        ('<f=now>null</f> and <f=add>{"x": 2}</f> again', True),
        ("<f<f=now>null</f>", True),
        ('so <f=add>{"x":"a"}</f>', False),
        ('so <f=add>{"x":1}', False),
        ("so <f=", False),
        ("<f=other>", False),
    ],
)
def test_a_text_is_free_until_a_trigger_and_then_a_structure(
    text: str, expected: bool, toy_engine: LlguidanceEngine, toy: Vocabulary
) -> None:
    compiled = toy_engine.compile(grammar_of_structural_tag(TAGS))
    assert says(compiled, toy, list(text.encode())) == expected


def test_a_key_in_a_tag_has_one_spelling_too(toy_engine: LlguidanceEngine, toy: Vocabulary) -> None:
    open_schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": {"type": "null"}}
    tag = {
        "type": "structural_tag",
        "triggers": ["<"],
        "structures": [{"begin": "<", "schema": open_schema, "end": ">"}],
    }
    compiled = toy_engine.compile(grammar_of_structural_tag(tag))
    assert says(compiled, toy, list(b'<{"y":null}>'))
    assert not says(compiled, toy, list(b'<{"\\u0078":null}>'))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({}, ["[1,2]", "[1, 2]", "[1,  2]", "[1,\n2]"]),
        ({"whitespace_flexible": False}, ["[1,2]"]),
        ({"whitespace_pattern": "[ ]?"}, ["[1,2]", "[1, 2]"]),
        ({"whitespace_pattern": r"[\x20\n]?"}, ["[1,2]", "[1, 2]", "[1,\n2]"]),
        ({"whitespace_pattern": ""}, ["[1,2]"]),
    ],
    ids=str,
)
def test_white_space_comes_where_it_was_asked_for(
    wanted: dict[str, Any], said: list[str], toy_engine: LlguidanceEngine, toy: Vocabulary
) -> None:
    compiled = toy_engine.compile(Grammar.json_schema({**LIST, "x-guidance": wanted}))
    texts = ["[1,2]", "[1, 2]", "[1,  2]", "[1,\n2]"]
    assert [text for text in texts if says(compiled, toy, list(text.encode()))] == said
    for seed in range(3):
        drawn = try_draw(compiled, toy, seed)
        assert drawn is None or drawn.startswith(b"[")


@pytest.mark.parametrize("pattern", [".*", "a", "[ ]*x", r"\s*", "[^a]", r"[\x20-a]", "(", " " * 65])
def test_white_space_is_nothing_else(pattern: str, toy_engine: LlguidanceEngine) -> None:
    with pytest.raises(GrammarError, match="whitespace_pattern must be a regular expression of spaces"):
        toy_engine.compile(Grammar.json_schema({**LIST, "x-guidance": {"whitespace_pattern": pattern}}))
