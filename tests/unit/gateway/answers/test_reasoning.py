"""The end of a prompt says whether its model is reasoning, and an answer with a grammar reasons before that begins."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.structured.drawing import allowed_ids
from weir.core.grammar import Grammar
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import GrammarError, Matcher, Vocabulary
from weir_gateway.answers.formats import THINK
from weir_gateway.answers.reasoning import (
    ReasoningState,
    choose_reasoning_format,
    reasoning_grammar,
    state_at_end,
    state_within_message,
)

END, OPENS, CLOSES, TOOL = 256, 257, 258, 259
SPELLED = ["<end>", "<think>", "</think>", "<tool_call>", "</", "think", "think>", "\n\n{", '{"a":', "<"]
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in SPELLED)],
    frozenset({END, OPENS, CLOSES, TOOL}),
    (END,),
    lambda text: list(text.encode()),
)
WITHIN, BEFORE, AFTER = ReasoningState.WITHIN, ReasoningState.BEFORE, ReasoningState.AFTER
SCHEMA = Grammar.json_schema(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
)
CONTENTS = {
    "schema": (SCHEMA, '{"a": 12}'),
    "regex": (Grammar("regex", "[a-c]{2}/\\/\nx"), "ab//\nx"),
    "choice": (Grammar.choice(['"yes"', "n\\o"]), "n\\o"),
    "Lark": (Grammar("grammar", 'start: "{" x{1,2} "}" // }\nx: /[}y]/'), "{}y}"),
    "any": (None, "whatever <x> \n."),
}


@pytest.fixture(scope="module")
def engine() -> LlguidanceEngine:
    return LlguidanceEngine(VOCABULARY)


def grammar_of(content: Grammar | None, state: ReasoningState = WITHIN, max_tokens: int | None = None) -> Grammar:
    markers = (OPENS, CLOSES)
    made = reasoning_grammar(
        content, state, markers, THINK.closes, max_tokens=max_tokens, free_token_ids=frozenset({TOOL})
    )
    assert made is not None
    return made


def after(engine: LlguidanceEngine, grammar: Grammar, *token_ids: int | bytes) -> Matcher:
    """The state after these tokens, or texts of bytes."""
    matcher = engine.compile(grammar).matcher()
    flat = [one for given in token_ids for one in ([given] if isinstance(given, int) else given)]
    matcher.accept(flat)
    return matcher


def may_come(engine: LlguidanceEngine, grammar: Grammar, *token_ids: int | bytes) -> set[int]:
    return allowed_ids(after(engine, grammar, *token_ids), VOCABULARY)


@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ("<|im_start|>assistant\n", BEFORE),
        ("<|im_start|>assistant\n<think>\n", WITHIN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", AFTER),
        ("what is <think> for?<|im_end|>\n<|im_start|>assistant\n", BEFORE),
        ("", BEFORE),
    ],
)
def test_the_end_of_a_prompt_says_where_it_leaves_the_model(tail: str, state: ReasoningState) -> None:
    assert state_at_end(tail, THINK) is state


@pytest.mark.parametrize(
    ("message", "state"),
    [
        ("", BEFORE),
        ("<think>Well, <think> it", WITHIN),
        ("\n<think>", WITHIN),
        ("<think>Well</think>\nSo", AFTER),
        ("So <think>", AFTER),
    ],
)
def test_a_message_that_goes_on_says_it_too(message: str, state: ReasoningState) -> None:
    assert state_within_message(message, THINK) is state


def test_the_format_is_found_in_the_template_or_said() -> None:
    qwen = "{%- if enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}"
    assert choose_reasoning_format("auto", qwen) is THINK
    assert choose_reasoning_format("auto", "{{ messages }}") is None
    assert choose_reasoning_format("none", qwen) is None
    assert choose_reasoning_format("think", "") is THINK
    with pytest.raises(ValueError, match="auto, think, none"):
        choose_reasoning_format("deepseek", qwen)


@pytest.mark.parametrize("name", CONTENTS)
def test_content_begins_after_the_closing_marker_and_keeps_to_its_grammar(name: str, engine: LlguidanceEngine) -> None:
    content, text = CONTENTS[name]
    for max_tokens in (6, 7) if content is None else (None, 6):
        grammar = grammar_of(content, max_tokens=max_tokens)
        for between in (b"", b"\n", b"\n\n"):
            reached = after(engine, grammar, b"so { ", CLOSES, between + text.encode())
            assert reached.error == ""
            assert END in allowed_ids(reached, VOCABULARY)
        assert END not in may_come(engine, grammar, b"so { ")
    if content is not None:
        wrong = after(engine, grammar_of(content), b"so", CLOSES, b"\n\n!")
        wrong.fill(np.zeros(VOCABULARY.num_words, np.uint32))
        assert wrong.error


def test_reasoning_is_free_but_for_what_would_end_it_unseen(engine: LlguidanceEngine) -> None:
    grammar = grammar_of(SCHEMA)
    start = may_come(engine, grammar)
    assert {ord("{"), ord("\n"), ord("<"), CLOSES, 260, 261} <= start
    assert not {END, OPENS, TOOL} & start
    assert ord(">") not in may_come(engine, grammar, b"no </think")
    assert CLOSES in may_come(engine, grammar, b"no </think")
    assert 262 not in may_come(engine, grammar, b"no </")
    assert 261 in may_come(engine, grammar, b"no </")


def test_a_model_that_has_not_begun_may_reason_or_answer(engine: LlguidanceEngine) -> None:
    grammar = grammar_of(SCHEMA, BEFORE)
    start = may_come(engine, grammar)
    assert {ord("{"), OPENS} <= start
    assert not {ord("a"), CLOSES, END} & start
    assert END in may_come(engine, grammar, b'{"a":1}')
    assert END in may_come(engine, grammar, OPENS, b"hm", CLOSES, b'{"a":1}')
    assert OPENS not in may_come(engine, grammar, b"{")


def test_at_its_budget_reasoning_must_end(engine: LlguidanceEngine) -> None:
    for content, _ in CONTENTS.values():
        grammar = grammar_of(content, max_tokens=3)
        assert len(may_come(engine, grammar, b"ab")) > 100
        assert may_come(engine, grammar, b"abc") == {CLOSES}
        assert may_come(engine, grammar, b"</t") == {CLOSES}
        assert may_come(engine, grammar_of(content, max_tokens=0)) == {CLOSES}
        before = grammar_of(content, BEFORE, max_tokens=2)
        assert may_come(engine, before, OPENS, b"ab") == {CLOSES}


def test_a_free_answer_after_a_budget_may_call_tools_but_not_reason_again(engine: LlguidanceEngine) -> None:
    grammar = grammar_of(None, max_tokens=3)
    for said in (b"", b"\n\n", b"text\n"):
        found = may_come(engine, grammar, b"a", CLOSES, said)
        assert {TOOL, END, ord("x"), ord("<")} <= found
        assert not {OPENS, CLOSES} & found
    assert {TOOL, END, ord("{")} <= may_come(engine, grammar, b"a", CLOSES, TOOL, b'{"x', TOOL)


def test_after_reasoning_and_without_a_bound_nothing_is_changed() -> None:
    for content in (None, SCHEMA):
        assert reasoning_grammar(content, AFTER, (OPENS, CLOSES), THINK.closes, max_tokens=5) is content
    assert reasoning_grammar(None, WITHIN, (OPENS, CLOSES), THINK.closes) is None


def test_a_state_is_made_again_from_the_tokens_alone(engine: LlguidanceEngine) -> None:
    generator = random.Random(5)
    compiled = engine.compile(grammar_of(SCHEMA, BEFORE, max_tokens=9))
    for _ in range(6):
        running, said, masks = compiled.matcher(), list[int](), []
        for _ in range(40):
            masks.append(allowed_ids(running, VOCABULARY))
            token_id = generator.choice(sorted(masks[-1] & {OPENS, CLOSES, END, *b'{}"a:1\n '} or masks[-1]))
            if token_id == END:
                break
            said.append(token_id)
            running.accept([token_id])
        for place in range(len(said)):
            again = compiled.matcher()
            again.accept(said[:place])
            assert allowed_ids(again, VOCABULARY) == masks[place]
        assert sum(earlier == OPENS for earlier, _ in pairwise(said)) <= 1


def test_what_is_no_part_of_a_grammar_is_refused() -> None:
    for source in ("true", "{"):
        with pytest.raises(GrammarError):
            grammar_of(Grammar("json_schema", source))
    with pytest.raises(GrammarError, match="at least one"):
        grammar_of(Grammar("choice", "[]"))


def test_a_schema_cannot_loosen_how_it_is_read() -> None:
    source = json.dumps({"type": "object", "x-guidance": {"lenient": True}})
    with pytest.raises(GrammarError, match=r"x-guidance\.lenient is not taken"):
        grammar_of(Grammar("json_schema", source))
