"""Calls of tools through a whole stack, by way of each surface: a small model calls what it is made to call."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from weir.client import ChatAnswer, GenerateOptions, Tool, Tools, Turn, WeirClient
from weir.testing.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

MODEL = "smollm2-135m"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = Tool("get_weather", "The weather in a city.", SCHEMA, is_strict=True)
QUESTION = "What is the weather in Paris?"
MAX_TOKENS = 80
CUT_TOKENS = 24
"""Amid the arguments: the name and what is around it takes 17."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run"), flags=("--chat-template", "hermes")) as stack:
        yield stack


def asked_by_grpc(stack: Stack, turns: list[Turn], tools: Tools, **options: Any) -> tuple[ChatAnswer, str, int]:
    """The answer, why it ended, and of how many messages with parts it was joined."""
    with WeirClient(stack.grpc_address, timeout_s=100) as client:
        chunks = list(client.chat(turns, GenerateOptions(max_tokens=MAX_TOKENS, **options), tools=tools))
    parts = [part for chunk in chunks for part in chunk.parts]
    ends = [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]
    return ChatAnswer.of(parts), str(ends[-1]), sum(bool(chunk.parts) for chunk in chunks)


def asked_by_http(stack: Stack, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=100)
    tool: Any = {"type": "function", "function": {**WEATHER.definition["function"], "strict": True}}
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[tool],
        max_tokens=MAX_TOKENS,
        **fields,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_forced_call_fits_its_schema_and_is_the_same_by_grpc_and_http_whole_and_streamed(
    stack: Stack, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 5}
    answer, end, num_messages = asked_by_grpc(
        stack, [Turn("user", QUESTION)], Tools((WEATHER,), "required", is_parallel=False), **sampling
    )
    (call,) = answer.tool_calls
    assert (call.name, call.is_complete, answer.content) == ("get_weather", True, "")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert num_messages > 1
    forced = {"tool_choice": "required", "parallel_tool_calls": False, **sampling}
    choice = asked_by_http(stack, **forced).choices[0]
    (whole,) = choice.message.tool_calls
    assert (whole.function.name, whole.function.arguments) == ("get_weather", call.arguments)
    assert (choice.finish_reason, end) == ("tool_calls", "tool_calls")
    deltas = [chunk.choices[0].delta for chunk in asked_by_http(stack, stream=True, **forced) if chunk.choices]
    streamed = [delta.tool_calls[0].function for delta in deltas if delta.tool_calls]
    assert [function.name for function in streamed if function.name] == ["get_weather"]
    assert "".join(function.arguments or "" for function in streamed) == call.arguments


def test_the_result_of_a_call_is_answered_in_words(stack: Stack) -> None:
    tools = Tools((WEATHER,), "required")
    answer, *_ = asked_by_grpc(stack, [Turn("user", QUESTION)], tools, temperature=0.0)
    result = Turn("tool", "18 degrees", tool_call_id=answer.tool_calls[0].id)
    spoken, *_ = asked_by_grpc(
        stack, [Turn("user", QUESTION), answer.turn, result], Tools((WEATHER,), "none"), temperature=0.0
    )
    assert spoken.content != ""
    assert spoken.tool_calls == ()


def test_a_call_that_is_cut_off_is_told_to_be_not_complete(stack: Stack) -> None:
    with WeirClient(stack.grpc_address, timeout_s=100) as client:
        options = GenerateOptions(max_tokens=CUT_TOKENS, temperature=0.0)
        chunks = list(client.chat([Turn("user", QUESTION)], options, tools=Tools((WEATHER,), "required")))
    answer = ChatAnswer.of(part for chunk in chunks for part in chunk.parts)
    assert [(call.name, call.is_complete) for call in answer.tool_calls] == [("get_weather", False)]
    assert answer.turn.tool_calls == ()
    assert str(chunks[-1].finish_reason) == "length"
