"""Answers of each family, and what they are made of."""

from dataclasses import dataclass

from weir_gateway.answers.events import (
    AnswerEvent,
    ContentText,
    ReasoningText,
    ToolArguments,
    ToolCallBegan,
    ToolCallEnded,
)
from weir_gateway.answers.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    PHI4_MINI,
    QWEN3_CODER,
    THINK,
    AnswerFormat,
)
from weir_gateway.answers.parser import AnswerParser

TOOLS = frozenset({"get", "get_weather", "search", "now"})
"""One is the beginning of another."""
QWEN = AnswerFormat(THINK, HERMES)
LLAMA = AnswerFormat(None, LLAMA3_JSON)
MISTRAL = AnswerFormat(None, MISTRAL_LIST)
MISTRAL_11 = AnswerFormat(THINK, MISTRAL_NAMED)
CODER = AnswerFormat(THINK, QWEN3_CODER)
SCHEMAS = {
    "get": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "either": {"type": ["string", "null"]},
            "is_on": {"type": "boolean"},
        }
    }
}
PHI = AnswerFormat(None, PHI4_MINI)


def call(index: int, name: str, arguments: str) -> list[AnswerEvent]:
    return [ToolCallBegan(index, name), ToolArguments(index, arguments), ToolCallEnded(index)]


def new_parser(answer_format: AnswerFormat, *, starts_in_reasoning: bool = False) -> AnswerParser:
    return AnswerParser(answer_format, tool_names=TOOLS, starts_in_reasoning=starts_in_reasoning, schemas=SCHEMAS)


@dataclass(frozen=True)
class Answer:
    name: str
    answer_format: AnswerFormat
    text: str
    events: list[AnswerEvent]
    starts_in_reasoning: bool = False


PARIS = '{"city": "Paris", "days": 3}'
BRACES = r'{"city": "a } \" {{[ \\", "deep": {"list": [{"x": "]"}, []]}}'
ESCAPES = r'{"city": "Z\u00fcrich \ud83c\udf27 ' + 'Köln 🌧"}'

ANSWERS = [
    Answer("only content", QWEN, "Hello <there>, {friend}.", [ContentText("Hello <there>, {friend}.")]),
    Answer("empty", QWEN, "", []),
    Answer("only spaces", QWEN, " \n ", [ContentText(" \n ")]),
    Answer(
        "reasoning, then content",
        QWEN,
        "<think>\nTwo and two …\n\nfour.\n</think>\n\nIt is 4.\n",
        [ReasoningText("Two and two …\n\nfour."), ContentText("It is 4.\n")],
    ),
    Answer("reasoning of nothing", QWEN, "<think>\n\n</think>\n\nHi", [ContentText("Hi")]),
    Answer(
        "the prompt has begun the reasoning",
        QWEN,
        "\nWell, <think> is a word.</think>\nYes",
        [ReasoningText("Well, <think> is a word."), ContentText("Yes")],
        starts_in_reasoning=True,
    ),
    Answer("reasoning without an end", QWEN, "<think>On and on </thi", [ReasoningText("On and on </thi")]),
    Answer("a marker of reasoning in content", QWEN, "x <think>y</think>", [ContentText("x <think>y</think>")]),
    Answer(
        "reasoning, words and a call",
        QWEN,
        f'<think>hm</think>\nI look. \n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        [ReasoningText("hm"), ContentText("I look."), *call(0, "get_weather", PARIS)],
    ),
    Answer(
        "a call within reasoning",
        QWEN,
        f'<think>I call <tool_call>{{"name": "get", "arguments": {PARIS}}}</tool_call> now</think>Done',
        [ReasoningText("I call"), *call(0, "get", PARIS), ReasoningText("now"), ContentText("Done")],
    ),
    Answer(
        "two calls",
        QWEN,
        '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "search", "arguments": {BRACES}}}\n</tool_call>\nThat is all.',
        [*call(0, "get", "{}"), *call(1, "search", BRACES), ContentText("That is all.")],
    ),
    Answer(
        "a list of calls, as SmolLM2 writes it",
        QWEN,
        f'<tool_call>[{{"name": "get", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
        [*call(0, "get", PARIS), *call(1, "now", "{}")],
    ),
    Answer(
        "escapes and other letters",
        QWEN,
        f'<tool_call>{{"arguments": {ESCAPES}, "name": "get_weather", "x": [1, 2]}}</tool_call>',
        call(0, "get_weather", ESCAPES),
    ),
    Answer(
        "an escaped name",
        QWEN,
        r'<tool_call>{"id": 7, "name": "g\u0065t", "arguments": {"a": null}, "more": "}"}</tool_call>',
        call(0, "get", '{"a": null}'),
    ),
    Answer(
        "arguments in a string",
        QWEN,
        r'<tool_call>{"name": "get", "arguments": "{\"city\": \"Bonn\"}"}</tool_call>',
        call(0, "get", '{"city": "Bonn"}'),
    ),
    Answer("no arguments", QWEN, '<tool_call>{"name": "now"}</tool_call>', call(0, "now", "{}")),
    Answer(
        "the last brace is missing",
        QWEN,
        f'<tool_call>{{"name": "get", "arguments": {PARIS}</tool_call>ok',
        [*call(0, "get", PARIS), ContentText("ok")],
    ),
    Answer(
        "cut off within arguments",
        QWEN,
        '<tool_call>{"name": "get", "arguments": {"city": "Par',
        [ToolCallBegan(0, "get"), ToolArguments(0, '{"city": "Par')],
    ),
    Answer(
        "cut off before its name ends",
        QWEN,
        'So: <tool_call>\n{"name": "get_we',
        [ContentText('So: <tool_call>\n{"name": "get_we')],
    ),
    Answer(
        "a tool that nobody declared",
        QWEN,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call> or <tool_call>{"name": "get", "arguments": {}}',
        [ContentText('<tool_call>{"name": "rm", "arguments": {}}</tool_call> or'), *call(0, "get", "{}")],
    ),
    Answer(
        "prose about markers",
        QWEN,
        "<think>write <tool_call> or <tool_call>{} or\n<tool_call>\n[] here</think>Use <tool_cal and <tool_call>!",
        [
            ReasoningText("write <tool_call> or <tool_call>{} or\n<tool_call>\n[] here"),
            ContentText("Use <tool_cal and <tool_call>!"),
        ],
    ),
    Answer(
        "a marker where a call broke off",
        QWEN,
        '<tool_call>{"name"<tool_call>{"name": "get", "arguments": {}}</tool_call>',
        [ContentText('<tool_call>{"name"'), *call(0, "get", "{}")],
    ),
    Answer(
        "a name without an end",
        QWEN,
        '<think>say <tool_call>{"name": "get</think>' + "and so on " * 30 + "</think>Yes",
        [ReasoningText('say <tool_call>{"name": "get</think>' + "and so on " * 29 + "and so on"), ContentText("Yes")],
    ),
    Answer(
        "the whole answer is a call",
        LLAMA,
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        call(0, "get_weather", PARIS),
    ),
    Answer(
        "after a python tag",
        LLAMA,
        f'<|python_tag|>{{"type": "function", "name": "get", "parameters": {BRACES}}}',
        call(0, "get", BRACES),
    ),
    Answer(
        "calls with semicolons",
        LLAMA,
        '\n{"name": "get", "parameters": {}}; {"name": "now", "parameters": {}}\n',
        [*call(0, "get", "{}"), *call(1, "now", "{}")],
    ),
    Answer("JSON that is no call", LLAMA, '{"city": {"name": "get"}}', [ContentText('{"city": {"name": "get"}}')]),
    Answer("JSON with a tool's name", LLAMA, '{"name": "get"} ok', [ContentText('{"name": "get"} ok')]),
    Answer(
        "JSON after words",
        LLAMA,
        'A {"name": "get", "parameters": {}}',
        [ContentText('A {"name": "get", "parameters": {}}')],
    ),
    Answer("code after a python tag", LLAMA, "<|python_tag|>f(x)", [ContentText("<|python_tag|>f(x)")]),
    Answer(
        "a list",
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get", "arguments": {PARIS}, "id": "a1"}}, {{"name": "now", "arguments": {{}}}}]',
        [*call(0, "get", PARIS), *call(1, "now", "{}")],
    ),
    Answer(
        "a list that breaks off",
        MISTRAL,
        '[TOOL_CALLS][{"name": "get", "arguments": {}}, {"name": "rm", "arguments": {}}]',
        [*call(0, "get", "{}"), ContentText(', {"name": "rm", "arguments": {}}]')],
    ),
    Answer(
        "names before arguments",
        MISTRAL_11,
        f"Yes.[TOOL_CALLS]get[ARGS]{PARIS}[TOOL_CALLS]get_weather[CALL_ID]a1B2[ARGS]{BRACES}[TOOL_CALLS]now{{}}",
        [ContentText("Yes."), *call(0, "get", PARIS), *call(1, "get_weather", BRACES), *call(2, "now", "{}")],
    ),
    Answer(
        "names that are none",
        MISTRAL_11,
        "[TOOL_CALLS]rm[ARGS]{} [TOOL_CALLS]get[TOOL_CALLS]get[ARGS]{}",
        [ContentText("[TOOL_CALLS]rm[ARGS]{} [TOOL_CALLS]get"), *call(0, "get", "{}")],
    ),
    Answer("a name alone", MISTRAL_11, "[TOOL_CALLS]get[AR", [ContentText("[TOOL_CALLS]get[AR")]),
    Answer(
        "Phi's markers",
        PHI,
        f'<|tool_call|>[{{"name": "get", "arguments": {PARIS}}}]<|/tool_call|>',
        call(0, "get", PARIS),
    ),
    Answer("Phi's function tools", PHI, f'functools[{{"name": "get", "arguments": {PARIS}}}]', call(0, "get", PARIS)),
    Answer(
        "arguments one by one",
        CODER,
        "<think>hm</think>\n<tool_call>\n<function=get>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=is_on>\nTrue\n</parameter>\n<parameter=either>\nnull\n"
        '</parameter>\n<parameter=other>\n[1, "]"]\n</parameter>\n</function>\n</tool_call>\nDone',
        [
            ReasoningText("hm"),
            *call(0, "get", '{"city": "12", "days": 3, "is_on": true, "either": null, "other": [1, "]"]}'),
            ContentText("Done"),
        ],
    ),
    Answer(
        "arguments of several lines that do not fit",
        CODER,
        '<tool_call><function=get><parameter=city>\n\na </para> {"ü"}\n </parameter><parameter=days>soon</parameter>'
        "<parameter=either>7</parameter></function></tool_call><tool_call><function=now></function></tool_call>",
        [
            *call(0, "get", '{"city": "\\na </para> {\\"ü\\"}\\n ", "days": "soon", "either": "7"}'),
            *call(1, "now", "{}"),
        ],
    ),
    Answer(
        "functions that are none",
        CODER,
        "<tool_call><function=rm></function></tool_call>, <tool_call>\n<tool_call><function=now>",
        [
            ContentText("<tool_call><function=rm></function></tool_call>, <tool_call>"),
            ToolCallBegan(0, "now"),
            ToolArguments(0, "{"),
        ],
    ),
    Answer(
        "a function without its end",
        CODER,
        "<tool_call><function=get><parameter=days>1</parameter></tool_call>ok",
        [*call(0, "get", '{"days": 1}'), ContentText("ok")],
    ),
]
