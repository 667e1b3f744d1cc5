"""What an answer is made of is found wherever its text is cut, as soon as it is certain, and nothing of it is lost."""

import itertools
import json
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.opcodes import num_opcodes
from tests.unit.gateway.answers.corpus import ANSWERS, QWEN, Answer, call, new_parser

from weir_gateway.answers.events import (
    AnswerEvent,
    ContentText,
    ReasoningText,
    ToolArguments,
    ToolCallBegan,
    ToolCallEnded,
    join_events,
)
from weir_gateway.answers.formats import THINK, TOOL_FORMATS, AnswerFormat
from weir_gateway.answers.parser import AnswerParser

by_name = pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "functools",
    "<function=get>", "<parameter=days>", "</parameter>", "</function>",
    "<|tool_call|>", "<|/tool_call|>", '{"name": "get", ', '"arguments": {', '"parameters": ', "{}", "}}",
    "[", "]", '"', "\\", "get", "rm", "a", " ", "\n" * 17, ",", ";", ":", "null", "é", '{"name": "get_weather"}',
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
formats = st.builds(AnswerFormat, st.sampled_from([None, THINK]), st.sampled_from([None, *TOOL_FORMATS.values()]))


def parse(parser: AnswerParser, parts: Iterable[str]) -> list[AnswerEvent]:
    events = [event for part in parts for event in parser.feed(part)]
    return join_events([*events, *parser.finish()])


def parse_answer(answer: Answer, parts: Iterable[str]) -> list[AnswerEvent]:
    return parse(new_parser(answer.answer_format, starts_in_reasoning=answer.starts_in_reasoning), parts)


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def text_of(events: Sequence[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText | ReasoningText))


@by_name
def test_an_answer_is_told_apart(answer: Answer) -> None:
    assert parse_answer(answer, [answer.text]) == answer.events


@by_name
def test_a_cut_in_two_changes_nothing(answer: Answer) -> None:
    for place in range(len(answer.text) + 1):
        assert parse_answer(answer, cut(answer.text, [place])) == answer.events, place


@by_name
def test_single_characters_change_nothing(answer: Answer) -> None:
    assert parse_answer(answer, answer.text) == answer.events


@by_name
def test_cuts_anywhere_change_nothing(answer: Answer) -> None:
    generator = random.Random(20261126)
    for _ in range(20):
        places = generator.choices(range(len(answer.text) + 1), k=generator.randint(1, 12))
        assert parse_answer(answer, cut(answer.text, places)) == answer.events, places


def test_space_behind_reasoning_is_dropped_though_a_marker_seems_to_begin_behind_it() -> None:
    for text in ("</think> <", "</think>\n<tool", "</think> <tool_call>{} <"):
        whole, in_parts = (
            parse(new_parser(AnswerFormat(THINK, TOOL_FORMATS["hermes"]), starts_in_reasoning=True), parts)
            for parts in ([text], text)
        )
        assert whole == in_parts
        assert not text_of(whole).startswith((" ", "\n"))


@given(text=texts, answer_format=formats, starts_in_reasoning=st.booleans(), seed=st.integers(0, 2**32))
def test_no_text_whatever_depends_on_its_cuts(
    text: str, answer_format: AnswerFormat, starts_in_reasoning: bool, seed: int
) -> None:
    starts_in_reasoning = starts_in_reasoning and answer_format.reasoning is not None
    generator = random.Random(seed)
    places = generator.choices(range(len(text) + 1), k=8)
    whole, in_parts, by_character = (
        parse(new_parser(answer_format, starts_in_reasoning=starts_in_reasoning), parts)
        for parts in ([text], cut(text, places), text)
    )
    assert in_parts == whole
    assert by_character == whole


@given(text=texts, answer_format=formats)
def test_calls_are_of_declared_tools_in_order_and_one_at_a_time(text: str, answer_format: AnswerFormat) -> None:
    num_begun = num_ended = 0
    for event in parse(new_parser(answer_format), [text]):
        if isinstance(event, ToolCallBegan):
            assert event.index == num_begun
            assert event.name in ("get", "get_weather", "search", "now")
            num_begun += 1
        elif isinstance(event, ToolArguments | ToolCallEnded):
            assert event.index == num_begun - 1 == num_ended
            num_ended += isinstance(event, ToolCallEnded)
        else:
            assert num_begun == num_ended


@given(text=texts, answer_format=formats)
def test_what_is_no_call_is_text_to_the_last_character(text: str, answer_format: AnswerFormat) -> None:
    """But for white space at markers of reasoning, and these."""
    parser = AnswerParser(answer_format, tool_names=frozenset({"tools_of_another_name"}))
    kept = text_of(parse(parser, [text]))
    if answer_format.reasoning is None or not text.lstrip().startswith("<think>"):
        assert kept == text
    else:
        expected = text.replace("<think>", "", 1).replace("</think>", "", 1)
        assert "".join(kept.split()) == "".join(expected.split())


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=12,
    ),
    is_ascii=st.booleans(),
    row=st.sampled_from(sorted(TOOL_FORMATS.keys() - {"qwen3_coder"})),
)
def test_any_arguments_pass_verbatim(value: object, is_ascii: bool, row: str) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=is_ascii)
    tools = TOOL_FORMATS[row]
    body = (
        f"get[ARGS]{arguments}"
        if row == "mistral_named"
        else f'{{"name": "get", "{tools.arguments_key}": {arguments}}}'
    )
    text = tools.opens[0] + body + (tools.closes[0] if tools.closes else "")
    assert parse(new_parser(AnswerFormat(None, tools)), text) == call(0, "get", arguments)


def test_text_that_can_be_no_marker_is_passed_on_at_once() -> None:
    parser = new_parser(QWEN)
    assert parser.feed("Hello") == [ContentText("Hello")]
    assert parser.feed(" <b> <tool") == [ContentText(" <b>")]
    assert parser.feed("s>") == [ContentText(" <tools>")]


def test_without_tools_content_is_never_held_back() -> None:
    parser = AnswerParser(AnswerFormat(THINK), starts_in_reasoning=True)
    assert parser.feed("x</think>\n\nHello <\n\n") == [ReasoningText("x"), ContentText("Hello <\n\n")]
    assert parser.finish() == []


def test_arguments_come_as_they_are_written() -> None:
    parser = new_parser(QWEN)
    assert parser.feed('<tool_call>{"name": "get", "arguments": ') == []
    assert parser.feed('{"ci') == [ToolCallBegan(0, "get"), ToolArguments(0, '{"ci')]
    assert parser.feed('ty": 1') == [ToolArguments(0, 'ty": 1')]
    assert parser.feed("}}") == [ToolArguments(0, "}"), ToolCallEnded(0)]


def test_two_calls_that_end_in_one_piece_are_both_there() -> None:
    parser = new_parser(QWEN)
    first, second = ('{"name": "get", "arguments": {}}', '{"name": "now", "arguments": {}}')
    assert parser.feed("<tool_call>") == []
    assert parser.feed(f"{first}</tool_call><tool_call>{second}</tool_call>") == [
        *call(0, "get", "{}"),
        *call(1, "now", "{}"),
    ]
    assert parser.num_calls == 2


def test_a_run_of_white_space_is_not_held_back() -> None:
    parser = new_parser(QWEN)
    assert len(text_of(parser.feed("x" + "\n" * 1000))) == 1 + 1000 - 16


@pytest.mark.parametrize(
    ("row", "opening"),
    [("qwen3_coder", "<tool_call><function="), ("mistral_named", "[TOOL_CALLS]"), ("hermes", '<tool_call>{"name": "')],
)
def test_a_name_without_an_end_is_not_held_back(row: str, opening: str) -> None:
    parser = new_parser(AnswerFormat(None, TOOL_FORMATS[row]))
    text = opening + "x" * 500
    assert text_of(parser.feed(text)) == text


def test_it_says_whether_it_is_in_reasoning() -> None:
    parser = new_parser(QWEN)
    seen = [(parser.feed(part), parser.is_reasoning)[1] for part in ("<thi", "nk>", "hm</think", ">", "\n\nYes")]
    assert seen == [False, True, True, False, False]


def test_reasoning_can_begin_only_where_the_format_has_it() -> None:
    with pytest.raises(ValueError, match="format has reasoning"):
        AnswerParser(AnswerFormat(), starts_in_reasoning=True)


@pytest.mark.parametrize(
    ("row", "piece"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "'),
        ("hermes", '<tool_call>{"x": "'),
        ("hermes", " "),
        ("mistral_named", "[TOOL_CALLS]ge"),
        ("qwen3_coder", "<tool_call><function=ge"),
        ("qwen3_coder", "<tool_call><function=now><parameter=x>y</"),
        ("llama3_json", '{"name": "get", "type": {'),
    ],
)
def test_work_is_linear_in_the_text(row: str, piece: str) -> None:
    def work(num_pieces: int) -> int:
        parser = new_parser(AnswerFormat(THINK, TOOL_FORMATS[row]))
        return num_opcodes(lambda: parse(parser, piece * num_pieces))

    first, second, third = (work(num_pieces) for num_pieces in (18, 36, 54))
    assert third - second < 1.2 * (second - first)
