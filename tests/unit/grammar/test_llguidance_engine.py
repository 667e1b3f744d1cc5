"""The engine over the built-in model's real tokenizer, and over a toy of bytes: what it allows is in the language, and
all of the language can be said."""

import json
import re
from typing import Any

import jsonschema
import pytest

from benchmarks.structured.drawing import allowed_bits, allowed_ids, draw, schema
from weir.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import GrammarError, Vocabulary
from weir.model.tokens.tokenizer import Tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "an object": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a"],
    },
    "nothing else": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    "an enum": {"enum": ["red", "grün", 3, None, True, {"a": [1]}]},
    "a const": {"const": {"kind": "x", "n": [1, 2.5]}},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -2, "maximum": 7.5}, "maxItems": 4},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 6},
    "a tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": False, "minItems": 2},
    "one of several": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 8}, {"type": "null"}]},
    "all of several": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"enum": ["p", "q"]}}, "required": ["b"]},
        ]
    },
    "itself": {
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "required": []}},
        "$ref": "#/$defs/tree",
    },
    "a date": {"type": "string", "format": "date"},
    "keys by pattern": {"type": "object", "patternProperties": {"^n_[a-z]$": {"type": "integer"}}, "maxProperties": 3},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_is_json_and_valid(name: str, engine: LlguidanceEngine, vocabulary: Vocabulary) -> None:
    compiled = engine.compile(Grammar.json_schema(SCHEMAS[name]))
    for seed in range(2):
        said = draw(compiled, vocabulary, seed).decode()
        jsonschema.validate(json.loads(said), SCHEMAS[name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_toy_vocabulary_keeps_to_it_too(name: str, toy_engine: LlguidanceEngine, toy: Vocabulary) -> None:
    compiled = toy_engine.compile(Grammar.json_schema(SCHEMAS[name]))
    for seed in range(6):
        jsonschema.validate(json.loads(draw(compiled, toy, seed)), SCHEMAS[name])


DOCUMENTS: list[tuple[str, Any]] = [
    ("an object", {"a": 'say "hi" to é and 漢字\n', "b": -7}),
    ("an object", {"a": "", "other": [1, {"deep": None}]}),
    ("nothing else", {}),
    ("an enum", "grün"),
    ("numbers", [-2, 7.5, 0.125]),
    ("a pattern", "AB123"),
    ("a tuple", [None, 12]),
    ("all of several", {"a": 1, "b": "q"}),
    ("itself", {"left": {"left": {}}}),
    ("keys by pattern", {"n_a": 1, "n_b": 2}),
]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
def test_a_valid_document_can_be_said_and_may_end_at_its_end_alone(
    name: str,
    document: Any,
    separators: tuple[str, str],
    engine: LlguidanceEngine,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
) -> None:
    text = json.dumps(document, ensure_ascii=False, separators=separators)
    matcher = engine.compile(Grammar.json_schema(SCHEMAS[name])).matcher()
    end = vocabulary.end_token_ids[0]
    said = ""
    for token_id in tokenizer.encode(text, add_bos=False):
        allowed = allowed_bits(matcher, vocabulary)
        assert allowed[token_id], (said, vocabulary.token_bytes[token_id])
        assert allowed[end] == _is_whole(said, SCHEMAS[name]), said
        matcher.accept([token_id])
        said += tokenizer.decode([token_id])
    assert allowed_bits(matcher, vocabulary)[end]


def _is_whole(said: str, against: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(said), against)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize(
    "regex",
    [r"[a-c]{3}[0-9]+", r"(yes|no)( really)*", r"[0-9]{4}-[0-9]{2}", r"x*"],
)
def test_a_regular_expression_is_of_the_whole_answer(
    regex: str, engine: LlguidanceEngine, vocabulary: Vocabulary
) -> None:
    compiled = engine.compile(Grammar("regex", regex))
    for seed in range(3):
        assert re.fullmatch(regex, draw(compiled, vocabulary, seed).decode())


def test_a_choice_is_one_of_its_texts_to_the_letter(toy_engine: LlguidanceEngine, toy: Vocabulary) -> None:
    texts = ["yes", "yes, but", 'say "so"', "a\\b\nc", "<|im_end|>", "été", ""]
    compiled = toy_engine.compile(Grammar.choice(texts))
    drawn = {draw(compiled, toy, seed).decode() for seed in range(100)}
    assert drawn == set(texts)


def test_a_grammar_in_larks_notation_counts(engine: LlguidanceEngine, vocabulary: Vocabulary) -> None:
    compiled = engine.compile(Grammar("grammar", 'start: "(" start ")" | /[0-9]/'))
    for seed in range(3):
        said = draw(compiled, vocabulary, seed).decode()
        depth = said.count("(")
        assert re.fullmatch(rf"\({{{depth}}}[0-9]\){{{depth}}}", said)


def test_special_tokens_and_logits_of_no_token_are_never_allowed(toy_engine: LlguidanceEngine, toy: Vocabulary) -> None:
    matcher = toy_engine.compile(Grammar("regex", r"(.|\n)*")).matcher()
    allowed = allowed_ids(matcher, toy)
    assert allowed.isdisjoint({263, 264, 265, 266})
    assert 262 in allowed


def test_every_end_token_may_come_where_the_text_may_end(vocabulary: Vocabulary) -> None:
    ends = (2, 0)
    several = Vocabulary(vocabulary.token_bytes, vocabulary.special_token_ids, ends, vocabulary.encode)
    matcher = LlguidanceEngine(several).compile(Grammar("regex", "ab?")).matcher()
    assert set(ends).isdisjoint(allowed_ids(matcher, several))
    matcher.accept(vocabulary.encode("a"))
    assert set(ends) < allowed_ids(matcher, several)
    matcher.accept(vocabulary.encode("b"))
    assert allowed_ids(matcher, several) == set(ends)


def test_white_space_comes_to_an_end(engine: LlguidanceEngine, vocabulary: Vocabulary) -> None:
    """A model that has lost its way would fill its answer with it."""
    matcher = engine.compile(schema(type="object", properties={"a": {"type": "integer"}}, required=["a"])).matcher()
    matcher.accept(vocabulary.encode("{"))
    (space,) = vocabulary.encode(" ")
    num_spaces = 0
    while allowed_bits(matcher, vocabulary)[space]:
        matcher.accept([space])
        num_spaces += 1
    assert num_spaces == 20


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"not": {"type": "null"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "object", "if": {}, "then": {}}, 'Unimplemented keys: ["if", "then"]'),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"properties": {"a": {"type": "array", "contains": {}}}}, 'Unimplemented keys: ["contains"]'),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance.lenient is not taken"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater than maxLength (2)"),
        ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
        ({"$ref": "#/$defs/none"}, "Pointer '/$defs/none' does not exist"),
        ({"type": "text"}, "Invalid type: text"),
        ({"$ref": "#"}, "goes on for ever"),
    ],
)
def test_what_a_schema_cannot_have_is_named(keywords: dict[str, Any], said: str, engine: LlguidanceEngine) -> None:
    with pytest.raises(GrammarError, match=re.escape(said)):
        engine.compile(Grammar.json_schema(keywords))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("json_schema", '{"type": "object"'), "is no JSON: Expecting ',' delimiter"),
        (Grammar("json_schema", "[1]"), "must be a JSON schema, which is an object"),
        (Grammar("json_schema", '{"a": "\\ud800"}'), "has a lone surrogate, written as"),
        (Grammar("json_schema", '{"properties":{"a":' * 200 + "{}" + "}}" * 200), "recursion limit exceeded"),
        (Grammar("regex", "a(?=b)"), "^look-around, including look-ahead and look-behind, is not supported$"),
        (Grammar("regex", r"(a)\1"), "^backreferences are not supported$"),
        (Grammar("regex", "a("), "^unclosed group$"),
        (Grammar("regex", "a\0b"), "has a NUL at character 1"),
        (Grammar("regex", "a\ud800"), "has a lone surrogate at character 1"),
        (Grammar("choice", "[]"), "at least one text"),
        (Grammar("choice", '["a", 1]'), "at least one text"),
        (Grammar("choice", "no JSON"), "at least one text"),
        (Grammar.choice([str(number) for number in range(1025)]), "has 1025 texts; at most 1024"),
        (Grammar("grammar", "start: x"), 'unknown name: "x"'),
        (Grammar("grammar", 'start ::= "a"'), 'has no rule "root"'),
        (Grammar("grammar", 'root ::= "a" ('), "is no GBNF: "),
        (Grammar("grammar", "root ::= other"), "Rule 'other' not found"),
        (Grammar("grammar", "root ::= " + "(" * 2000 + '"a"' + ")" * 2000), "is nested too deeply"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "has 60001 bytes; at most 60000 are taken"),
        (Grammar("json_schema", ""), "is empty; give a json_schema"),
        (Grammar("sql", "select"), "is of kind 'sql'; must be one of json_schema, regex, choice, grammar"),  # type: ignore[arg-type]
    ],
)
def test_a_source_that_is_wrong_is_refused_with_the_reason(
    grammar: Grammar, said: str, engine: LlguidanceEngine
) -> None:
    with pytest.raises(GrammarError, match=said) as refused:
        engine.compile(grammar)
    assert len(str(refused.value)) <= 300
    assert "\n" not in str(refused.value)


def test_a_model_without_an_end_token_has_no_grammars(toy: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="no end-of-text token"):
        LlguidanceEngine(Vocabulary(toy.token_bytes, toy.special_token_ids, (), toy.encode))


def test_a_token_that_was_not_allowed_is_an_error_and_all_may_come(
    engine: LlguidanceEngine, vocabulary: Vocabulary
) -> None:
    matcher = engine.compile(Grammar("regex", "[0-9]+")).matcher()
    matcher.accept(vocabulary.encode("x"))
    assert "doesn't satisfy the grammar" in matcher.error
