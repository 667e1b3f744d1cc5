"""Calls of tools and reasoning over gRPC, through the Python client: the same as over HTTP, as parts of the answer."""

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.test_tool_calls import BOTH, CLOCK, NOW, PARIS, USER, WEATHER
from tests.unit.gateway.thinking_model import CLOSES, EOS, thinking_model, tokens_of
from tests.unit.gateway.world import World, open_world

from weir.client import (
    AsyncWeirClient,
    ChatAnswer,
    Chunk,
    FinishReason,
    GenerateOptions,
    Tool,
    ToolCall,
    ToolCallDelta,
    Tools,
    Turn,
)
from weir.client.chats import parts_from_pb
from weir.core.errors import InvalidRequest
from weir.core.grammar import Grammar
from weir.wire.v1 import inference_pb2
from weir_gateway.answers.formats import HERMES, THINK, AnswerFormat
from weir_gateway.answers.parser import AnswerParser
from weir_gateway.frontends.grpc_chats import parts_to_pb

HI = [Turn("user", "Hi")]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET_WEATHER, TELL_TIME = Tool("get_weather", "The weather in a city.", CITY), Tool("now")
TOOLS = Tools((GET_WEATHER, TELL_TIME))
THOUGHT = "<think>\nHm.\n</think>\n\n"
TEXTS = (BOTH, CLOCK, "Plain words.", PARIS[:-20], "<tool_call>\nnot one", THOUGHT + BOTH, THOUGHT + "2", "<think>on")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(model=thinking_model()) as world:
        yield world


@pytest.fixture
async def client(world: World) -> AsyncIterator[AsyncWeirClient]:
    async with AsyncWeirClient(world.grpc_address) as client:
        yield client


def answers(world: World, text: str) -> None:
    world.pair.answer = [*tokens_of(text), EOS]


def last_start(world: World) -> Any:
    return world.prefill.named("start")[-1]


def source_of(world: World) -> str:
    return str(last_start(world).sampling.grammar.source)


def answer_of(chunks: Sequence[Chunk], choice: int = 0) -> ChatAnswer:
    return ChatAnswer.of(part for chunk in chunks if chunk.choice == choice for part in chunk.parts)


async def ask(client: AsyncWeirClient, turns: Sequence[Turn] = HI, tools: Tools | None = TOOLS, **more: Any) -> Any:
    """All chunks. `more`: options, and `max_reasoning_tokens`."""
    budget = more.pop("max_reasoning_tokens", None)
    options = GenerateOptions(**more)
    return [chunk async for chunk in client.chat(turns, options, tools=tools, max_reasoning_tokens=budget)]


async def test_calls_are_told_apart_counted_and_traced(world: World, client: AsyncWeirClient) -> None:
    answers(world, BOTH)
    chunks = await ask(client)
    answer = answer_of(chunks)
    called = [(call.name, call.arguments, call.is_complete) for call in answer.tool_calls]
    assert called == [("get_weather", '{"city": "Par\\u0069s}"}', True), ("now", "{}", True)]
    assert (answer.content, answer.reasoning) == ("I look.", "")
    assert len({call.id for call in answer.tool_calls}) == 2
    assert chunks[-1].finish_reason is FinishReason.TOOL_CALLS
    assert bytes(last_start(world).prompt_token_ids).startswith(b"tool: get_weather\ntool: now\n")
    assert not last_start(world).sampling.HasField("grammar")
    await world.until_idle()
    assert world.metric("tool_calls_total") == 2
    [span] = [span for span in world.spans.get_finished_spans() if span.name == "chat bytes"]
    assert (span.attributes or {})["weir.response.num_tool_calls"] == 2


async def test_reasoning_is_told_apart_and_counted(world: World, client: AsyncWeirClient) -> None:
    answers(world, THOUGHT + "It is 2.")
    chunks = await ask(client, tools=None)
    answer = answer_of(chunks)
    assert (answer.content, answer.reasoning, chunks[-1].finish_reason) == ("It is 2.", "Hm.", "stop")
    assert chunks[-1].num_reasoning_tokens == len(tokens_of(THOUGHT.rstrip()))
    assert "".join(chunk.text for chunk in chunks) == THOUGHT + "It is 2.", "the text is all that the model wrote"


async def test_answers_are_those_of_http(world: World, client: AsyncWeirClient) -> None:
    async with world.http_client() as http:
        for text in TEXTS:
            answers(world, text)
            body = {"messages": USER, "tools": [WEATHER, NOW], "return_token_ids": True}
            [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
            chunks = await ask(client)
            answer = answer_of(chunks)
            message = choice["message"]
            assert (answer.content or None) == message["content"]
            assert answer.reasoning == message.get("reasoning_content", "")
            calls = [(call.name, call.arguments) for call in answer.tool_calls]
            said = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
            assert calls == said
            assert chunks[-1].finish_reason == choice["finish_reason"]
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == choice["token_ids"]


async def test_a_call_is_streamed_while_it_is_written(world: World, client: AsyncWeirClient) -> None:
    answers(world, BOTH)
    deltas = [part for chunk in await ask(client) for part in chunk.parts if isinstance(part, ToolCallDelta)]
    assert [delta.index for delta in deltas if delta.id and delta.name] == [0, 1]
    assert [delta.index for delta in deltas if delta.is_complete] == [0, 1]
    assert sum(bool(delta.arguments) for delta in deltas if delta.index == 0) > 1


@given(text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 120), max_size=12))
def test_wherever_the_stream_is_cut_the_parts_join_to_the_same_answer(text: str, cuts: list[int]) -> None:
    def answer(places: Sequence[int]) -> ChatAnswer:
        parser = AnswerParser(AnswerFormat(THINK, HERMES), tool_names=frozenset({"get_weather", "now"}))
        events = [parser.feed(text[start:end]) for start, end in itertools.pairwise(places)]
        messages = [parts_to_pb(some, str) for some in (*events, parser.finish())]
        return ChatAnswer.of(part for message in messages for part in parts_from_pb(message))

    whole = answer([0, len(text)])
    assert answer(sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})) == whole
    assert [call.is_complete for call in whole.tool_calls] == [text != PARIS[:-20]] * len(whole.tool_calls)


async def test_a_stream_that_is_gone_on_with_has_the_rest_of_the_parts(world: World, client: AsyncWeirClient) -> None:
    answers(world, THOUGHT + BOTH)
    whole = await ask(client, idempotency_key="k")
    for number in range(1, len(whole), 1 + len(whole) // 8):
        rest = await ask(client, idempotency_key="k", resume_from=whole[number].first_index)
        assert answer_of([*whole[:number], *rest]) == answer_of(whole)
        assert rest[-1].finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("names", [(), ("now",)], ids=["any", "one"])
async def test_a_call_that_is_asked_for_is_held_to_a_grammar(
    world: World, client: AsyncWeirClient, names: tuple[str, ...]
) -> None:
    answers(world, THOUGHT + CLOCK)
    chunks = await ask(client, tools=Tools(TOOLS.tools, "required", names))
    assert chunks[-1].finish_reason is FinishReason.TOOL_CALLS
    assert ("get_weather" in source_of(world)) == (not names)
    assert ("{0,15}" in source_of(world)) == (not names), "one name: one call"
    await ask(client, tools=Tools(TOOLS.tools, "required", is_parallel=False))
    assert "{0,15}" not in source_of(world)


async def test_with_none_a_model_knows_of_no_tools(world: World, client: AsyncWeirClient) -> None:
    answers(world, CLOCK)
    chunks = await ask(client, tools=Tools(TOOLS.tools, "none"))
    assert (answer_of(chunks).content, chunks[-1].finish_reason) == (CLOCK, "stop")
    assert bytes(last_start(world).prompt_token_ids) == b"user: Hi\n"


async def test_a_cut_call_is_no_reason_to_run_it(world: World, client: AsyncWeirClient) -> None:
    answers(world, BOTH)
    chunks = await ask(client, max_tokens=70)
    assert chunks[-1].finish_reason == "length"
    assert [call.is_complete for call in answer_of(chunks).tool_calls] == [False]
    assert answer_of(chunks).turn.tool_calls == ()


async def test_the_next_turn_has_calls_results_and_thoughts(world: World, client: AsyncWeirClient) -> None:
    answers(world, "12:00")
    said = ChatAnswer("I look.", "Hm.", (ToolCall("call_1", "now"),)).turn
    await ask(client, [*HI, said, Turn("tool", "noon", tool_call_id="call_1")])
    prompt = bytes(last_start(world).prompt_token_ids).decode()
    assert "assistant: (Hm.) I look." in prompt
    assert "noon" in prompt


async def test_a_budget_ends_reasoning_and_none_closes_it_at_once(world: World, client: AsyncWeirClient) -> None:
    answers(world, THOUGHT + "2")
    await ask(client, tools=None, max_reasoning_tokens=7)
    assert "thought[max_tokens=7]:" in source_of(world)
    assert f"<[{CLOSES}]>" in source_of(world)
    await ask(client, tools=None, max_reasoning_tokens=0)
    assert list(last_start(world).prompt_token_ids)[-3:] == [CLOSES, 10, 10]


async def test_each_of_several_answers_has_its_own_calls(world: World, client: AsyncWeirClient) -> None:
    answers(world, CLOCK)
    chunks = await ask(client, n=2)
    ids = [answer_of(chunks, choice).tool_calls[0].id for choice in (0, 1)]
    assert len(set(ids)) == 2
    ends = [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
    assert ends == [FinishReason.TOOL_CALLS] * 2


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tools": Tools((Tool("a b"),))}, r"tools\[0\].name: is a b; give 1 to 64 characters"),
    ({"tools": Tools((TELL_TIME, TELL_TIME))}, r"tools\[1\]: has 'now' twice"),
    ({"tools": Tools((Tool("x"),) * 129)}, r"tools: has 129 tools; at most 128"),
    ({"tools": Tools((Tool("x", parameters={"type": "array"}),))}, r"tools\[0\].parameters: is of type array"),
    ({"tools": Tools((Tool("x", parameters={"not": {}}, is_strict=True),))}, r"tools\[0\].parameters: "),
    ({"tools": Tools((TELL_TIME,), "required", ("then",))}, "tool_choice.names: names then, which is none"),
    ({"tools": Tools((TELL_TIME,), "none", ("now",))}, "tool_choice.names: come with TOOL_MODE_NONE"),
    ({"tools": Tools((), "required")}, "tool_choice.mode: asks for a call; give tools"),
    ({"tools": Tools((TELL_TIME,)), "grammar": Grammar("regex", "a")}, "options.sampling.grammar: leaves no room"),
    ({"turns": [Turn("user", "x", (ToolCall("1", "now"),))]}, r"messages\[0\].tool_calls: is of role 'user'"),
    ({"turns": [Turn("tool", "x")]}, r"messages\[0\].tool_call_id: is missing"),
    ({"turns": [Turn("assistant", "x", (ToolCall("1", "now", "[]"),))]}, r"tool_calls\[0\].arguments: must be a text"),
    ({"turns": [Turn("assistant", "x", (ToolCall("", ""),))]}, r"tool_calls\[0\].id: is missing"),
    ({"max_reasoning_tokens": 5, "ignore_eos": True}, "ignore_eos"),
)


async def test_what_cannot_be_is_refused_by_name(world: World, client: AsyncWeirClient) -> None:
    for asked, problem in REFUSED:
        with pytest.raises(InvalidRequest, match=problem):
            await ask(client, **asked)
    assert world.prefill.named("start") == []


@pytest.mark.parametrize("text", ["{", "1", "null", "[" * 5000, '{"a": NaN}', '"' + "x" * 70_000 + '"'])
async def test_a_schema_that_is_none_is_refused(world: World, text: str) -> None:
    tool = inference_pb2.Tool(name="x", parameters=text)
    request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="x")], tools=[tool])
    with pytest.raises(Exception, match=r"tools\[0\].parameters: ") as caught:
        _ = [response async for response in world.stub.Chat(request)]
    assert len(str(caught.value)) < 2000


async def test_a_model_that_does_not_reason_has_no_parts_and_no_budget() -> None:
    async with open_world() as world, AsyncWeirClient(world.grpc_address) as client:
        with pytest.raises(InvalidRequest, match="max_reasoning_tokens: model bytes is not known to reason"):
            await ask(client, tools=None, max_reasoning_tokens=5)
        chunks = await ask(client, tools=None, max_reasoning_tokens=0)
        assert {chunk.told_parts for chunk in chunks} == {None}
        assert "".join(chunk.content for chunk in chunks) == "hello world"
        assert chunks[-1].num_reasoning_tokens == 0
