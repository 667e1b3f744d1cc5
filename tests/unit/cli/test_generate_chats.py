"""`weir generate --chat` and `weir chat` with calls of tools and reasoning, against a gateway that is scripted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.test_generate_and_chat import ReversingGateway, answers, gateway, run

from weir.wire.v1 import inference_pb2

__all__ = ["gateway"]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": SCHEMA}}
NOW = {"name": "now", "strict": True}


def parts() -> list[inference_pb2.AnswerPart]:
    part, delta = inference_pb2.AnswerPart, inference_pb2.ToolCallDelta
    return [
        part(reasoning="Hm"),
        part(reasoning="."),
        part(content="I "),
        part(content="look."),
        part(tool_call=delta(index=0, id="c1", name="get_weather", arguments='{"city": ')),
        part(tool_call=delta(index=0, arguments='"Paris"}', is_complete=True)),
        part(tool_call=delta(index=1, id="c2", name="now", arguments="{")),
    ]


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([WEATHER, NOW]))
    return str(path)


def test_tools_and_budgets_arrive_and_calls_are_shown(gateway: ReversingGateway, tools: str) -> None:
    gateway.parts = parts()
    code, out, err = run("generate", "--chat", "--tools", tools, "--max-reasoning-tokens", "9", "Paris?")
    shown = 'I look.\nget_weather({"city": "Paris"})\nnow({… (cut off)\n'
    assert (code, out, err) == (0, shown, "Hm.\n")
    [chat] = gateway.chats
    assert [(turn.role, turn.content) for turn in chat.messages] == [("user", "Paris?")]
    weather, now = chat.tools
    assert (weather.name, weather.description, json.loads(weather.parameters)) == ("get_weather", "It.", SCHEMA)
    assert (now.name, now.HasField("description"), now.parameters, now.strict) == ("now", False, "", True)
    assert (chat.tool_choice.mode, list(chat.tool_choice.names)) == (inference_pb2.TOOL_MODE_AUTO, [])
    assert (chat.parallel_tool_calls, chat.max_reasoning_tokens) == (True, 9)


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("none", inference_pb2.TOOL_MODE_NONE, []),
        ("required", inference_pb2.TOOL_MODE_REQUIRED, []),
        ("now", inference_pb2.TOOL_MODE_REQUIRED, ["now"]),
    ],
)
def test_a_choice_is_a_mode_or_a_name(
    gateway: ReversingGateway, tools: str, choice: str, mode: int, names: Sequence[str]
) -> None:
    run("generate", "--chat", "--tools", tools, "--tool-choice", choice, "--no-parallel-tool-calls", "x")
    [chat] = gateway.chats
    assert (chat.tool_choice.mode, list(chat.tool_choice.names), chat.parallel_tool_calls) == (mode, names, False)


def test_lines_of_json_have_reasoning_and_calls(gateway: ReversingGateway, tools: str, tmp_path: Path) -> None:
    gateway.parts = parts()
    calls = [
        {"id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}', "is_complete": True},
        {"id": "c2", "name": "now", "arguments": "{", "is_complete": False},
    ]
    expected = {
        "id": 1,
        "text": "I look.",
        "reasoning": "Hm.",
        "tool_calls": calls,
        "finish_reason": "tool_calls",
        "num_prompt_tokens": 3,
        "num_output_tokens": 9,
        "num_reasoning_tokens": 2,
    }
    code, out, _ = run("generate", "--chat", "--tools", tools, "--json", "x")
    assert (code, json.loads(out)) == (0, expected)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n')
    run("generate", "--chat", "--tools", tools, "--input", str(source), "--output", str(target))
    assert answers(target)[1] == expected
    source.write_text('{"prompt": [1, 2]}\n')
    code, _, err = run("generate", "--chat", "--input", str(source), "--output", str(target))
    assert (code, "with --chat a prompt is a text" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--tools", "T"), "--tools and --max-reasoning-tokens are of chats: give --chat too"),
        (("--max-reasoning-tokens", "1"), "are of chats: give --chat too"),
        (("--chat", "--tool-choice", "required"), "are of tools: give --tools FILE too"),
        (("--chat", "--no-parallel-tool-calls"), "are of tools: give --tools FILE too"),
        (("--chat", "--tools", "T", "--tool-choice", "noon"), "must be one of auto, none, required, get_weather, now"),
        (("--chat", "--tools", "gone.json"), "--tools gone.json: "),
    ],
)
def test_what_does_not_go_together_is_refused(
    gateway: ReversingGateway, tools: str, arguments: Sequence[str], problem: str
) -> None:
    code, out, err = run("generate", *(tools if word == "T" else word for word in arguments), "x")
    assert (code, out) == (2, "")
    assert problem in err
    assert (gateway.prompts, gateway.chats) == ([], [])


@pytest.mark.parametrize(
    "entries",
    [[], {}, [1], [{"function": 1}], [{"name": 1}], [{"name": "x", "schema": {}}], [{"name": "x", "strict": 1}]],
)
def test_a_file_that_is_no_list_of_tools_is_named(gateway: ReversingGateway, tmp_path: Path, entries: Any) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(entries))
    code, _, err = run("generate", "--chat", "--tools", str(path), "x")
    assert code == 2
    assert err.startswith(f"error: --tools {path}")


def test_a_conversation_keeps_thoughts_apart_from_what_was_said(gateway: ReversingGateway) -> None:
    gateway.parts = parts()[:4]
    code, out, _ = run("chat", "--max-reasoning-tokens", "5", stdin="one\ntwo\n")
    assert code == 0
    assert out == "I look.\nI look.\n"
    _, said, _ = gateway.chats[1].messages
    assert (said.role, said.content, said.reasoning) == ("assistant", "I look.", "Hm.")
    assert gateway.chats[0].max_reasoning_tokens == 5
