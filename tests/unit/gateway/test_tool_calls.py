"""Calls of tools over OpenAI's chat API: whole, streamed, forced, gone on with, and with the official client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from tests.unit.gateway.fake_model import EOS, ids_of
from tests.unit.gateway.world import World

from weir.core.errors import InvalidRequest
from weir_gateway.frontends.openai.schema import ChatBody, chat_request, parse_body

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
USER: Any = [{"role": "user", "content": "Hi"}]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\\u0069s}"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BOTH = f"I look.\n{PARIS}\n{CLOCK}"
ASKED: Any = {"model": "bytes", "messages": USER, "tools": [WEATHER, NOW]}


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def answers(world: World, text: str) -> None:
    world.pair.answer = [*ids_of(text), EOS]


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


async def test_calls_are_told_apart_from_text(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, BOTH)
    [choice] = (await client.chat.completions.create(**ASKED)).choices
    assert calls_of(choice.message) == [("get_weather", '{"city": "Par\\u0069s}"}'), ("now", "{}")]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    ids = [call.id for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)
    [start] = world.prefill.named("start")
    assert bytes(start.prompt_token_ids).startswith(b"tool: get_weather\ntool: now\n")
    await world.until_idle()
    assert world.metric("tool_calls_total") == 2
    [span] = [span for span in world.spans.get_finished_spans() if span.name == "chat bytes"]
    assert span.attributes is not None
    assert (span.attributes["weir.request.num_tools"], span.attributes["weir.response.num_tool_calls"]) == (2, 2)


async def test_an_answer_of_calls_alone_has_no_content(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, CLOCK)
    [choice] = (await client.chat.completions.create(**ASKED)).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize("text", [BOTH, CLOCK, "Plain words.", PARIS[:-20], "<tool_call>\nnot one"])
async def test_a_stream_adds_up_to_the_whole_answer(world: World, client: openai.AsyncOpenAI, text: str) -> None:
    answers(world, text)
    whole = (await client.chat.completions.create(**ASKED, extra_headers={"Idempotency-Key": "k"})).choices[0]
    state = ChatCompletionStreamState()
    first_deltas = []
    stream = await client.chat.completions.create(**ASKED, stream=True, extra_headers={"Idempotency-Key": "k"})
    async for chunk in stream:
        state.handle_chunk(chunk)
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            first_deltas += [call.index] if call.id and call.type == "function" and call.function.name else []
    streamed = state.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    named = {"content", "tool_calls", "role"}
    plain = whole.message.model_dump(include=named, exclude_none=True)
    found = streamed.message.model_dump(include=named, exclude_none=True)
    for call in found.get("tool_calls", ()):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    assert found == plain
    assert first_deltas == list(range(len(whole.message.tool_calls or ())))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "now"}}, "stop"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
            "tool_calls",
        ),
    ],
    ids=["required", "named", "allowed"],
)
async def test_a_call_that_is_asked_for_is_held_to_a_grammar(
    world: World, client: openai.AsyncOpenAI, choice: Any, reason: str
) -> None:
    answers(world, CLOCK)
    [found] = (await client.chat.completions.create(**ASKED, tool_choice=choice)).choices
    assert (calls_of(found.message), found.finish_reason) == ([("now", "{}")], reason)
    [start] = world.prefill.named("start")
    assert start.sampling.grammar.source.startswith('start: "<tool_call>" rest')
    assert ("get_weather" in start.sampling.grammar.source) == (choice == "required")


async def test_auto_is_free_and_none_knows_of_no_tools(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, CLOCK)
    await client.chat.completions.create(**ASKED, tool_choice="auto")
    found = (await client.chat.completions.create(**ASKED, tool_choice="none")).choices[0]
    assert (found.message.content, found.finish_reason, found.message.tool_calls) == (CLOCK, "stop", None)
    free, unaware = world.prefill.named("start")
    assert not free.sampling.HasField("grammar")
    assert bytes(unaware.prompt_token_ids) == b"user: Hi\n"


async def test_a_cut_call_is_no_reason_to_run_it(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, BOTH)
    [cut] = (await client.chat.completions.create(**ASKED, max_tokens=70)).choices
    assert cut.finish_reason == "length"
    answers(world, PARIS[:-25])
    [ended] = (await client.chat.completions.create(**ASKED)).choices
    assert ended.finish_reason == "stop"


async def test_turns_with_calls_and_results_are_rendered(world: World, client: openai.AsyncOpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}
    history: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun."},
    ]
    await client.chat.completions.create(**{**ASKED, "messages": history})
    [start] = world.prefill.named("start")
    assert (
        bytes(start.prompt_token_ids)
        .decode()
        .endswith('user: Hi\nassistant:  get_weather({"city": "Rom"})\ntool: Sun.\n')
    )


async def test_a_client_that_comes_back_reads_on_in_the_call(world: World, http: httpx.AsyncClient) -> None:
    answers(world, BOTH)
    body = {**ASKED, "stream": True}
    key = {"Idempotency-Key": "k"}
    first = (await http.post("/v1/chat/completions", json=body, headers=key)).text.split("\n\n")
    events = [event.split("\n") for event in first if event.startswith("id: ")]
    full = arguments_of(data for _, data in events)
    assert full == '{"city": "Par\\u0069s}"}'
    ids = [event_id.removeprefix("id: ") for event_id, _ in events]
    for place in range(0, len(ids), 7):
        rest = await http.post("/v1/chat/completions", json=body, headers={**key, "Last-Event-ID": ids[place]})
        later = [line for line in rest.text.split("\n") if line.startswith("data: {")]
        had = arguments_of(data for _, data in events[: place + 1])
        assert had + arguments_of(later) == full
        assert '"finish_reason":"tool_calls"' in later[-1] or place == len(ids) - 1


def arguments_of(data: Any) -> str:
    """Of the first call."""
    found = ""
    for one in data:
        for call in json.loads(one.removeprefix("data: "))["choices"][0]["delta"].get("tool_calls", ()):
            found += call["function"]["arguments"] if call["index"] == 0 else ""
    return found


TOOL_1 = "tools[1].function.parameters"


def strict(properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties}
    return {
        "tools": [WEATHER, {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    }


def function(**fields: Any) -> Any:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [NOW, WEATHER, NOW]}, "tools[2]"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name="a" * 65), "tools[0].function.name"),
        (function(description=5), "tools[0].function.description"),
        (function(strict="yes"), "tools[0].function.strict"),
        (function(parameters=[]), "tools[0].function.parameters"),
        (function(parameters={"type": "array"}), "tools[0].function.parameters"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice.allowed_tools.tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_named(change: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_request(parse_body(ChatBody, json.dumps({**ASKED, **change}).encode()), "id", "ignore")
    assert [violation.field for violation in refused.value.violations] == [param]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        (strict({"a": {"not": {}}}), TOOL_1),
        (
            strict({"a": {"type": "string", "allOf": [{"pattern": "(.*a.{30}){3}"}, {"pattern": "(.*b.{30}){3}"}]}}),
            TOOL_1,
        ),
        (strict({str(number): {} for number in range(20_000)}), "tools"),
    ],
    ids=["ignore_eos", "no room", "keyword", "explodes", "large"],
)
async def test_what_leaves_no_room_for_calls_is_named(http: httpx.AsyncClient, change: Any, param: str) -> None:
    for _ in range(2):  # on a busy machine the first may hear that it is being compiled still
        answer = await http.post("/v1/chat/completions", json={**ASKED, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
