"""Reasoning over OpenAI's chat API: told apart from content, counted, bounded, and before an answer with a form."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from tests.unit.gateway.fake_model import byte_model
from tests.unit.gateway.thinking_model import CALL, CLOSES, EOS, OPENS, thinking_model, tokens_of
from tests.unit.gateway.world import World, open_world

from weir.core.errors import InvalidRequest
from weir.core.grammar import Grammar
from weir.core.options import GenerateOptions
from weir_gateway.answers.formats import THINK, AnswerFormat
from weir_gateway.frontends.openai.schema import HTTP_NAMES
from weir_gateway.requests.client_request import ClientRequest, Conversation, Operation
from weir_gateway.requests.reasoning import with_reasoning_grammar

USER: Any = [{"role": "user", "content": "Hi"}]
ASKED: Any = {"model": "bytes", "messages": USER}
NOW: Any = {"type": "function", "function": {"name": "now"}}
THOUGHT = "<think>\nOne and <b>one</b>.\n</think>\n\nIt is 2."
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(model=thinking_model()) as world:
        yield world


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def answers(world: World, text: str) -> None:
    world.pair.answer = [*tokens_of(text), EOS]


def extra(**fields: Any) -> Any:
    return {**ASKED, "extra_body": fields}


def last_start(world: World) -> Any:
    return world.prefill.named("start")[-1]


def prompt_of(world: World) -> list[int]:
    return list(last_start(world).prompt_token_ids)


async def test_reasoning_is_told_apart_and_counted(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, THOUGHT)
    found = await client.chat.completions.create(**ASKED)
    [choice] = found.choices
    assert (choice.message.content, choice.finish_reason) == ("It is 2.", "stop")
    assert choice.message.reasoning_content == "One and <b>one</b>."
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    num_reasoning = len(tokens_of(THOUGHT.partition("\n\nIt")[0]))
    assert found.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    assert found.usage.completion_tokens == len(tokens_of(THOUGHT)) + 1
    assert not last_start(world).sampling.HasField("grammar")
    await world.until_idle()
    assert world.metric("reasoning_tokens_total") == num_reasoning
    [span] = [span for span in world.spans.get_finished_spans() if span.name == "chat bytes"]
    assert (span.attributes or {})["gen_ai.usage.reasoning.output_tokens"] == num_reasoning


TEXTS = (THOUGHT, "Plain.", "<think>on and on", "<think></think>x", '<think>t</think><tool_call>{"name": "now"}')


@pytest.mark.parametrize("asked", [{}, {"tools": [NOW]}], ids=["plain", "tools"])
async def test_a_stream_adds_up_to_the_whole_answer(
    world: World, client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    for text in TEXTS:
        answers(world, text)
        whole = (await client.chat.completions.create(**ASKED, **asked)).choices[0].message
        state, parts = ChatCompletionStreamState(), list[tuple[str, str]]()
        async for chunk in await client.chat.completions.create(**ASKED, **asked, stream=True):
            state.handle_chunk(chunk)
            delta = chunk.choices[0].delta.model_dump()
            parts += [(name, piece) for name in ("reasoning_content", "content") if (piece := delta.get(name))]
        thoughts = "".join(piece for name, piece in parts if name == "reasoning_content")
        assert thoughts == (whole.model_dump().get("reasoning_content") or "")
        assert (state.get_final_completion().choices[0].message.content or None) == whole.content
        names = [name for name, _ in parts]
        assert names == sorted(names, reverse=True)  # reasoning comes before content


async def test_the_end_of_the_prompt_says_where_the_answer_begins(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, "So 2.\n</think>\n\nTwo")
    opened = await client.chat.completions.create(**extra(chat_template_kwargs={"opens": True}))
    assert prompt_of(world)[-2:] == [OPENS, ord("\n")]
    message = opened.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("So 2.", "Two")
    answers(world, "Two, not <think>.")
    for asked in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        closed = await client.chat.completions.create(**extra(**asked))
        message = closed.choices[0].message.model_dump()
        assert (message.get("reasoning_content"), message["content"]) == (None, "Two, not <think>.")
        assert closed.usage is not None
        assert closed.usage.completion_tokens_details is not None
        assert closed.usage.completion_tokens_details.reasoning_tokens == 0
        assert not last_start(world).sampling.HasField("grammar")


async def test_an_answer_that_is_cut_off_within_reasoning_has_no_content(
    world: World, client: openai.AsyncOpenAI
) -> None:
    answers(world, THOUGHT)
    [choice] = (await client.chat.completions.create(**ASKED, max_tokens=6)).choices
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.model_dump()["reasoning_content"] == "One "


async def test_reasoning_need_not_be_shown(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, THOUGHT)
    whole = await client.chat.completions.create(**extra(include_reasoning=False))
    assert "reasoning_content" not in whole.choices[0].message.model_dump()
    assert whole.choices[0].message.content == "It is 2."
    async for chunk in await client.chat.completions.create(**extra(include_reasoning=False), stream=True):
        assert "reasoning_content" not in chunk.choices[0].delta.model_dump()


async def test_earlier_reasoning_is_the_templates_to_show(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, "ok")
    for name in ("reasoning_content", "reasoning"):
        turns: Any = [*USER, {"role": "assistant", "content": "2", name: "1 + 1"}, {"role": "user", "content": "?"}]
        await client.chat.completions.create(model="bytes", messages=turns)
        assert bytes(prompt_of(world)) == b"user: Hi\nassistant: (1 + 1) 2\nuser: ?\n"


async def test_a_message_that_goes_on_may_be_within_reasoning(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, " more</think>\n2")
    turns: Any = [*USER, {"role": "assistant", "content": "<think>Well,"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    found = await client.chat.completions.create(model="bytes", messages=turns, extra_body=body)
    message = found.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("more", "2")


async def test_a_form_is_that_of_the_content_behind_free_reasoning(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, '<think>hm</think>{"a": 1}')
    found = await client.chat.completions.create(**ASKED, response_format=FORMAT)
    assert found.choices[0].message.content == '{"a": 1}'
    grammar = last_start(world).sampling.grammar
    assert grammar.source.startswith(f"start: (<[{OPENS}]> thought <[{CLOSES}]> LINES?)? content")
    answers(world, '{"a": 1}')
    asked = extra(chat_template_kwargs={"enable_thinking": False})
    await client.chat.completions.create(**asked, response_format=FORMAT)
    assert "thought" not in last_start(world).sampling.grammar.source


async def test_a_budget_ends_reasoning_whatever_the_form(world: World, client: openai.AsyncOpenAI) -> None:
    answers(world, "hm</think>2")
    for asked in ({}, {"response_format": FORMAT}, {"tools": [NOW], "tool_choice": "required"}):
        body = {"thinking_token_budget": 7, "chat_template_kwargs": {"opens": True}}
        await client.chat.completions.create(**ASKED, **asked, extra_body=body)
        source = last_start(world).sampling.grammar.source
        assert source.startswith(f"start: thought <[{CLOSES}]> LINES? content")
        assert "thought[max_tokens=7]:" in source
        assert asked or f"content: (FREE | <[{CALL}]>)*" in source  # which may call all the same


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "none", "thinking_token_budget": 5}, "reasoning_effort"),
    ({"thinking_token_budget": 5, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"json": "[1"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs.json"),
)


async def test_what_cannot_be_is_refused_by_name(world: World) -> None:
    async with world.http_client() as http:
        for fields, named in REFUSED:
            answer = await http.post("/v1/chat/completions", json={**ASKED, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


async def test_a_model_that_does_not_reason_has_no_budget_and_no_count() -> None:
    async with open_world() as world, world.http_client() as http:
        refused = await http.post("/v1/chat/completions", json={**ASKED, "thinking_token_budget": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")
        assert "--reasoning-format" in refused.json()["error"]["message"]
        plain = (await http.post("/v1/chat/completions", json={**ASKED, "reasoning_effort": "none"})).json()
        assert "completion_tokens_details" not in plain["usage"]
        assert plain["choices"][0]["message"]["content"] == "hello world"


def test_without_tokens_of_their_own_markers_hold_nothing() -> None:
    model = replace(byte_model(), answer_format=AnswerFormat(THINK))
    free, held = GenerateOptions(), GenerateOptions(grammar=Grammar("regex", "a"))

    def ask(tail: str, options: GenerateOptions, budget: int | None = None) -> ClientRequest:
        prompt = Conversation(({"role": "user", "content": "x"},), max_reasoning_tokens=budget)
        asked = ClientRequest(Operation.CHAT, prompt, HTTP_NAMES, options)
        return with_reasoning_grammar(asked, model, list(tail.encode()))

    assert ask("x", held).options == held  # it answers at once
    assert ask("<think>\n\n</think>\n", held, 5).options == held
    assert ask("<think>\n", free).options == free
    for tail, options, budget in (("<think>\n", held, None), ("x", free, 5), ("<think>", free, 5)):
        with pytest.raises(InvalidRequest, match="in several tokens"):
            ask(tail, options, budget)
