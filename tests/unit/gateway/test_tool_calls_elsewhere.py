"""Calls of tools over the Responses API and Anthropic's, with the official clients."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from tests.unit.gateway.fake_model import EOS, ids_of
from tests.unit.gateway.world import World

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BOTH = f"I look.\n{PARIS}\n{CLOCK}"
CUT = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 3, "city": "Par'
TEXTS = [BOTH, CLOCK, "Plain words.", f"{CLOCK}\nThat was it.", CUT]
RESPONSE: Any = {
    "model": "bytes",
    "input": "Hi",
    "tools": [{"type": "function", "name": "get_weather", "parameters": PLACE}, {"type": "function", "name": "now"}],
}
MESSAGE: Any = {
    "model": "bytes",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "get_weather", "input_schema": PLACE}, {"name": "now", "input_schema": {"type": "object"}}],
}


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(world: World) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=world.http_url, api_key="none", max_retries=0) as client:
        yield client


def answers(world: World, text: str) -> None:
    world.pair.answer = [*ids_of(text), EOS]


def last_prompt(world: World) -> str:
    return bytes(world.prefill.named("start")[-1].prompt_token_ids).decode()


async def test_functions_of_responses_are_called_and_answered(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, BOTH)
    response = await client.responses.create(**RESPONSE)
    message, weather, now = response.output
    assert (response.status, response.output_text, message.type) == ("completed", "I look.", "message")
    assert weather.type == "function_call"
    assert now.type == "function_call"
    assert (weather.name, weather.arguments, now.arguments) == ("get_weather", '{"city": "Paris"}', "{}")
    outputs: Any = [
        {"type": "function_call_output", "call_id": weather.call_id, "output": "Sun."},
        {"type": "function_call_output", "call_id": now.call_id, "output": [{"type": "input_text", "text": "Noon."}]},
    ]
    told = 'assistant: I look. get_weather({"city": "Paris"}) now({})\ntool: Sun.\ntool: Noon.\n'
    await client.responses.create(**{**RESPONSE, "input": outputs}, previous_response_id=response.id)
    assert last_prompt(world) == f"tool: get_weather\ntool: now\nuser: Hi\n{told}"
    turns: Any = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in response.output), *outputs]
    await client.responses.create(**{**RESPONSE, "input": turns})
    assert last_prompt(world) == f"tool: get_weather\ntool: now\nuser: Hi\n{told}"


@pytest.mark.parametrize("text", TEXTS)
async def test_a_stream_of_a_response_is_the_whole_one(world: World, client: openai.AsyncOpenAI, text: str) -> None:
    answers(world, text)
    whole = await client.responses.create(**RESPONSE, store=False)
    arguments: dict[int, str] = {}
    async with client.responses.stream(**RESPONSE, store=False) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
        final = await stream.get_final_response()
    shown = [named(item) for item in whole.output]
    assert [named(item) for item in final.output] == shown
    assert [arguments[index] for index in sorted(arguments)] == [item["arguments"] for item in shown if "name" in item]


def named(item: Any) -> dict[str, Any]:
    """Without ids, which differ between two requests."""
    kept = item.to_dict()
    kept.pop("parsed_arguments", None)
    for part in kept.get("content", ()):
        part.pop("parsed", None)
    return {name: value for name, value in kept.items() if name not in ("id", "call_id")}


async def test_a_function_that_is_asked_for_is_held_to_a_grammar(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, CLOCK)
    choice: Any = {"type": "function", "name": "now"}
    response = await client.responses.create(**RESPONSE, tool_choice=choice, parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["function_call"]
    assert 'start: "<tool_call>" rest' in world.prefill.named("start")[-1].sampling.grammar.source
    assert response.to_dict()["tool_choice"] == choice
    assert [tool.to_dict()["name"] for tool in response.tools] == ["get_weather", "now"]


async def test_a_call_that_is_cut_off_is_incomplete(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, PARIS)
    response = await client.responses.create(**RESPONSE, max_output_tokens=60)
    [item] = response.output
    assert item.type == "function_call"
    assert (response.status, item.status, item.arguments) == ("incomplete", "incomplete", PARIS[49:60])


async def test_tools_of_anthropic_are_used_and_answered(world: World, claude: anthropic.AsyncAnthropic) -> None:
    answers(world, BOTH)
    message = await claude.messages.create(**MESSAGE)
    text, weather, now = message.content
    assert (text.type, weather.type, now.type) == ("text", "tool_use", "tool_use")
    assert weather.type == "tool_use"
    assert now.type == "tool_use"
    assert (message.stop_reason, weather.input, now.input) == ("tool_use", {"city": "Paris"}, {})
    assert weather.id.startswith("toolu_")
    results: Any = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": "Sun."},
        {
            "type": "tool_result",
            "tool_use_id": now.id,
            "content": [{"type": "text", "text": "No clock"}],
            "is_error": True,
        },
        {"type": "text", "text": "And?"},
    ]
    content: Any = [block.to_dict() for block in message.content]
    turns = [*MESSAGE["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    await claude.messages.create(**{**MESSAGE, "messages": turns})
    assert last_prompt(world).endswith(
        'user: Hi\nassistant: I look. get_weather({"city": "Paris"}) now({})\n'
        "tool: Sun.\ntool: Error: No clock\nuser: And?\n"
    )
    count = await claude.messages.count_tokens(model="bytes", messages=MESSAGE["messages"], tools=MESSAGE["tools"])
    assert count.input_tokens == len("tool: get_weather\ntool: now\nuser: Hi\n")


@pytest.mark.parametrize("text", TEXTS)
async def test_a_stream_of_a_message_is_the_whole_one(
    world: World, claude: anthropic.AsyncAnthropic, text: str
) -> None:
    answers(world, text)
    whole = await claude.messages.create(**MESSAGE)
    async with claude.messages.stream(**MESSAGE) as stream:
        final = await stream.get_final_message()
    assert [plain(block) for block in final.content] == [plain(block) for block in whole.content]
    assert final.stop_reason == whole.stop_reason


def plain(block: Any) -> dict[str, Any]:
    return {
        name: value for name, value in json.loads(block.to_json()).items() if name in ("type", "text", "name", "input")
    }


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}], ids=["any", "named"])
async def test_a_tool_that_anthropics_client_asks_for_is_held_to_a_grammar(
    world: World, claude: anthropic.AsyncAnthropic, choice: Any
) -> None:
    answers(world, CLOCK)
    asked: Any = {**MESSAGE, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    message = await claude.messages.create(**asked)
    assert ([block.type for block in message.content], message.stop_reason) == (["tool_use"], "tool_use")
    grammar = world.prefill.named("start")[-1].sampling.grammar.source
    assert ("get_weather" in grammar, "{0,15}" in grammar) == (choice["type"] == "any", False)
