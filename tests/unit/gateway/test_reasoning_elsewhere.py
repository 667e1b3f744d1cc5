"""Reasoning in OpenAI's Responses API, as items, and in Anthropic's Messages API, as blocks of thinking."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from tests.unit.gateway.fake_model import MAX_CONTEXT
from tests.unit.gateway.test_reasoning import NOW, THOUGHT, USER, answers, last_start, prompt_of
from tests.unit.gateway.thinking_model import CLOSES, OPENS, thinking_model, tokens_of
from tests.unit.gateway.world import World, open_world

MESSAGE: Any = {"model": "bytes", "max_tokens": MAX_CONTEXT // 4, "messages": USER}
RESPONSE: Any = {"model": "bytes", "input": "Hi"}
CALLS = '<think>t</think>I look.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TEXTS = (THOUGHT, "Plain.", "<think>on and on", "<think></think>x", CALLS, '<think>a<tool_call>{"name": "now"} b')
NOW_OF_MESSAGES: Any = {"name": "now", "input_schema": {"type": "object"}}
NOW_OF_RESPONSES: Any = {"type": "function", **NOW["function"], "parameters": {"type": "object"}, "strict": None}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(model=thinking_model()) as world:
        yield world


@pytest.fixture
async def claude(world: World) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=world.http_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_message_has_its_thinking_in_a_block(world: World, claude: anthropic.AsyncAnthropic) -> None:
    answers(world, THOUGHT)
    message = await claude.messages.create(**MESSAGE)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "One and <b>one</b>."
    assert message.content[1].text == "It is 2."
    cut = await claude.messages.create(**{**MESSAGE, "max_tokens": 6})
    assert ([block.type for block in cut.content], cut.stop_reason) == (["thinking"], "max_tokens")


async def test_a_stream_of_blocks_is_the_whole_message(world: World, claude: anthropic.AsyncAnthropic) -> None:
    for text in TEXTS:
        answers(world, text)
        for tools in ((), (NOW_OF_MESSAGES,)):
            asked: Any = {**MESSAGE, "tools": list(tools)}
            whole = await claude.messages.create(**asked)
            async with claude.messages.stream(**asked) as stream:
                streamed = await stream.get_final_message()
            assert _plain(streamed.content) == _plain(whole.content)
            assert streamed.stop_reason == whole.stop_reason


def _plain(blocks: Any) -> list[Any]:
    return [block.model_dump(exclude={"citations", "parsed_output", "id", "caller"}) for block in blocks]


async def test_arguments_that_are_no_json_are_given_as_they_are(world: World, claude: anthropic.AsyncAnthropic) -> None:
    answers(world, '<tool_call>{"name": "now", "arguments": {"x": True}}</tool_call>')
    message = await claude.messages.create(**{**MESSAGE, "tools": [NOW_OF_MESSAGES]})
    [block] = message.content
    assert block.type == "tool_use"
    assert block.input == {"arguments": '{"x": True}'}


async def test_thinking_is_asked_for_bounded_and_switched_off(world: World, claude: anthropic.AsyncAnthropic) -> None:
    answers(world, "hm</think>2")
    await claude.messages.create(**MESSAGE, thinking={"type": "enabled", "budget_tokens": 9})
    assert "thought[max_tokens=9]:" in last_start(world).sampling.grammar.source
    await claude.messages.create(**MESSAGE, thinking={"type": "adaptive"})
    assert not last_start(world).sampling.HasField("grammar")
    answers(world, "2")
    message = await claude.messages.create(**MESSAGE, thinking={"type": "disabled"})
    assert prompt_of(world)[-5:] == [OPENS, 10, 10, CLOSES, 10, 10][-5:]
    assert [block.type for block in message.content] == ["text"]


async def test_thinking_of_earlier_messages_is_the_templates_to_show(
    world: World, claude: anthropic.AsyncAnthropic
) -> None:
    answers(world, "ok")
    blocks: Any = [
        {"type": "thinking", "thinking": "1 + 1", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "2"},
    ]
    turns: Any = [*USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": "?"}]
    await claude.messages.create(**{**MESSAGE, "messages": turns})
    assert bytes(prompt_of(world)) == b"user: Hi\nassistant: (1 + 1) 2\nuser: ?\n"


async def test_a_response_has_its_reasoning_in_an_item(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, THOUGHT)
    response = await client.responses.create(**RESPONSE)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "One and <b>one</b>."
    assert response.output_text == "It is 2."
    assert response.usage is not None
    num_reasoning = len(tokens_of(THOUGHT.partition("\n\nIt")[0]))
    assert response.usage.output_tokens_details.reasoning_tokens == num_reasoning
    answers(world, "ok")
    await client.responses.create(model="bytes", input="?", previous_response_id=response.id)
    assert b"assistant: (One and <b>one</b>.) It is 2.\n" in bytes(prompt_of(world))
    items: Any = [item.model_dump() for item in response.output]
    await client.responses.create(model="bytes", input=[{"role": "user", "content": "Hi"}, *items])
    assert b"assistant: (One and <b>one</b>.) It is 2.\n" in bytes(prompt_of(world))


async def test_a_stream_of_items_is_the_whole_response(world: World, client: openai.AsyncOpenAI) -> None:
    for text in TEXTS:
        answers(world, text)
        for tools in ((), (NOW_OF_RESPONSES,)):
            asked: Any = {**RESPONSE, "tools": list(tools)}
            whole = await client.responses.create(**asked)
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            ended: Any = events[-1]
            assert _items(ended.response) == _items(whole)
            done: list[Any] = [event for event in events if event.type == "response.output_item.done"]
            done.sort(key=lambda event: event.output_index)
            assert [_item(event.item) for event in done] == _items(whole)
            thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
            ends = [event.text for event in events if event.type == "response.reasoning_text.done"]
            assert "".join(thoughts) == "".join(ends)
            assert ends == [item.content[0].text for item in whole.output if item.type == "reasoning" and item.content]


def _items(response: Any) -> list[Any]:
    return [_item(item) for item in response.output]


def _item(item: Any) -> Any:
    """Without names, which follow from the request's."""
    return item.model_dump(exclude={"id", "call_id"})


async def test_effort_and_budget_of_a_response(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, "2")
    response = await client.responses.create(**RESPONSE, reasoning={"effort": "none"})
    assert [item.type for item in response.output] == ["message"]
    assert response.reasoning is not None
    assert response.reasoning.effort == "none"
    answers(world, "<think>hm</think>2")
    await client.responses.create(**RESPONSE, extra_body={"thinking_token_budget": 9})
    assert "thought[max_tokens=9]:" in last_start(world).sampling.grammar.source


async def test_what_cannot_be_is_refused_by_name(world: World) -> None:
    refused: tuple[tuple[str, Any, str], ...] = (
        ("/v1/messages", {**MESSAGE, "thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ("/v1/messages", {**MESSAGE, "thinking": {"type": "deep"}}, "thinking.type"),
        ("/v1/responses", {**RESPONSE, "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/responses", {**RESPONSE, "thinking_token_budget": -1}, "thinking_token_budget"),
        ("/v1/completions", {"prompt": "x", "thinking_token_budget": 3}, "thinking_token_budget"),
    )
    async with world.http_client() as http:
        for path, body, named in refused:
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, body
            assert named in answer.json()["error"]["message"]
    async with open_world() as plain, plain.http_client() as http:
        body = {**MESSAGE, "thinking": {"type": "enabled", "budget_tokens": 9}}
        answer = await http.post("/v1/messages", json=body)
        assert answer.status_code == 400
        assert "thinking.budget_tokens" in answer.json()["error"]["message"]
        assert "--reasoning-format" in answer.json()["error"]["message"]
