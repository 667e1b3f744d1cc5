"""Grammars of calls: what models were taught is in them, what was not declared is not, and the parser reads what is."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.unit.gateway.fake_model import EOS, ByteTokenizer

from weir.core.grammar import Grammar
from weir.core.tools import Tool
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import Vocabulary
from weir_gateway.answers.events import AnswerEvent, ToolArguments, ToolCallBegan
from weir_gateway.answers.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    PHI4_MINI,
    QWEN3_CODER,
    TOOL_FORMATS,
    AnswerFormat,
    ToolFormat,
)
from weir_gateway.answers.parser import AnswerParser
from weir_gateway.tools.definitions import ToolUse
from weir_gateway.tools.grammar import ToolSchemaError, tool_grammar

PLACE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 5}},
}
FLAT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER, NOW = Tool("get_weather", "The weather.", PLACE, is_strict=True), Tool("now")
REQUIRED = ToolUse.of_all([WEATHER, NOW], is_required=True)
AUTO = ToolUse.of_all([WEATHER, NOW])
SPECIAL = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>"]
"""Tokens of their own, after the bytes and the end."""


@pytest.fixture(scope="module")
def engine() -> LlguidanceEngine:
    spelled = [bytes([byte]) for byte in range(EOS)] + [b"<end>", *(marker.encode() for marker in SPECIAL)]
    special = frozenset(range(EOS, len(spelled)))
    return LlguidanceEngine(Vocabulary(spelled, special, (EOS,), ByteTokenizer().encode))


def token_of(marker: str) -> int | None:
    return EOS + 1 + SPECIAL.index(marker) if marker in SPECIAL else None


def no_token_of(marker: str) -> int | None:
    del marker
    return None


def ids_of(text: str, *, has_tokens: bool) -> list[int]:
    """With the markers as tokens, or as text."""
    ids: list[int] = []
    while text:
        marker = next((one for one in SPECIAL if has_tokens and text.startswith(one)), None)
        ids += [token_of(marker) or 0] if marker else list(text[0].encode())
        text = text[len(marker or text[0]) :]
    return ids


def is_in(engine: LlguidanceEngine, grammar: Grammar | None, ids: list[int]) -> bool:
    assert grammar is not None
    matcher = engine.compile(grammar).matcher()
    for token_id in [*ids, EOS]:
        words = np.zeros(9, np.uint32)
        matcher.fill(words)
        if matcher.error or not words[token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.accept([token_id])
    return True


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALLS = {
    HERMES.name: hermes("get_weather", '{"city": "Paris"}'),
    LLAMA3_JSON.name: '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    MISTRAL_LIST.name: '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    MISTRAL_NAMED.name: '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
    PHI4_MINI.name: '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
    QWEN3_CODER.name: (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
}


def use_of(tool_format: ToolFormat, *, is_required: bool) -> ToolUse:
    schema = FLAT if tool_format is QWEN3_CODER else PLACE
    return ToolUse.of_all([Tool("get_weather", None, schema, is_strict=True), NOW], is_required=is_required)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("has_tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("is_required", [False, True], ids=["auto", "required"])
def test_a_call_as_its_family_writes_it_is_in_the_grammar_and_is_read(
    engine: LlguidanceEngine, tool_format: ToolFormat, has_tokens: bool, is_required: bool
) -> None:
    use, text = use_of(tool_format, is_required=is_required), CALLS[tool_format.name]
    grammar = tool_grammar(use, tool_format, token_of if has_tokens else no_token_of)
    assert is_in(engine, grammar, ids_of(text, has_tokens=has_tokens))
    other = text.replace("get_weather", "get_whether")
    assert not is_in(engine, grammar, ids_of(other, has_tokens=has_tokens))
    assert is_in(engine, grammar, ids_of("Just words", has_tokens=has_tokens)) != is_required
    parser = AnswerParser(AnswerFormat(tools=tool_format), tool_names=use.allowed, schemas={"get_weather": FLAT})
    events: list[AnswerEvent] = [*parser.feed(text), *parser.finish()]
    assert [event for event in events if isinstance(event, ToolCallBegan)] == [ToolCallBegan(0, "get_weather")]
    arguments = "".join(event.text for event in events if isinstance(event, ToolArguments))
    assert json.loads(arguments)["city"] == "Paris"


@pytest.mark.parametrize(
    ("use", "text", "is_good"),
    [
        (REQUIRED, hermes("get_weather", '{"city": "Prague"}'), False),
        (REQUIRED, hermes("get_weather", "{}"), False),
        (REQUIRED, hermes("now", "{}"), True),
        (REQUIRED, hermes("now", '{"a": 1}'), False),
        (REQUIRED, hermes("now", "{}") + "\n" + hermes("get_weather", '{"city":"Rom"}'), True),
        (REQUIRED, hermes("now", "{}") + " and", False),
        (REQUIRED, "", False),
        (AUTO, "", True),
        (AUTO, "a < b <tool_cal", True),
        (AUTO, "see <tool_call> there", False),
        (AUTO, "I look.\n" + hermes("get_weather", '{"city": "Rom"}'), True),
        (AUTO, "I look.\n" + hermes("get_weather", '{"town": "Rom"}'), False),
        (AUTO, hermes("now", '{"not": "strict"}'), True),
        (ToolUse.of_all([NOW], is_parallel=False), hermes("now", "{}"), True),
        (ToolUse.of_all([NOW], is_parallel=False), hermes("now", "{}") + "\n" + hermes("now", "{}"), False),
        (ToolUse((WEATHER, NOW), frozenset({"now"})), hermes("get_weather", '{"city": "Rom"}'), False),
        (ToolUse((NOW,), frozenset({"now"}), is_required=True, is_named=True), hermes("now", "{}") * 2, False),
    ],
)
def test_the_grammar_keeps_what_the_request_promises(
    engine: LlguidanceEngine, use: ToolUse, text: str, is_good: bool
) -> None:
    assert is_in(engine, tool_grammar(use, HERMES, no_token_of), ids_of(text, has_tokens=False)) is is_good


def test_an_answer_in_json_and_calls_are_in_one_grammar(engine: LlguidanceEngine) -> None:
    grammar = tool_grammar(AUTO, HERMES, no_token_of, Grammar.json_object())
    for text, is_good in (('{"a": 1}', True), (hermes("now", "{}"), True), ("words", False)):
        assert is_in(engine, grammar, ids_of(text, has_tokens=False)) is is_good


def test_a_schema_cannot_loosen_how_it_is_read() -> None:
    use = ToolUse.of_all([NOW, Tool("f", None, {**PLACE, "x-guidance": {"lenient": True}})], is_required=True)
    with pytest.raises(ToolSchemaError, match=r"x-guidance\.lenient is not taken") as refused:
        tool_grammar(use, HERMES, no_token_of)
    assert refused.value.place == 1


def test_without_a_promise_there_is_no_grammar() -> None:
    assert tool_grammar(ToolUse.of_all([NOW, Tool("f", None, PLACE)]), HERMES, no_token_of) is None


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL_LIST, LLAMA3_JSON], ids=lambda one: one.name)
def test_free_text_cannot_spell_a_marker_that_is_a_token(engine: LlguidanceEngine, tool_format: ToolFormat) -> None:
    grammar = tool_grammar(AUTO, tool_format, token_of)
    text = f"see {tool_format.opens[0]} there"
    assert is_in(engine, grammar, ids_of(text[:-8], has_tokens=False))
    assert not is_in(engine, grammar, ids_of(text, has_tokens=False))
