"""A list of prompts is one piece of work: all are queued at once, and each has the answer it would have alone."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import openai
import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.world import World

from weir.bus.messages import RefusalReason, SubmitReply
from weir_gateway.frontends.openai import whole_answer

_VARYING = re.compile(r'"id":"[^"]*"|"created":\d+')
ANSWER = "hé"  # é is two bytes, so two tokens


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    world.pair.answer = ids_of(ANSWER)
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    world.pair.answer = ids_of(ANSWER)
    async with world.http_client() as client:
        yield client


async def test_each_prompt_has_n_answers_in_order(world: World, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="bytes", prompt=["one", "three", "x"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(index, ANSWER) for index in range(6)]
    starts = [world.pair.starts[submit.request_id] for submit in world.scheduler.submits]
    assert [bytes(start.prompt_token_ids).decode() for start in starts] == ["one", "one", "three", "three", "x", "x"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3 + 5 + 1, 6 * 3)
    await world.until_idle()


async def test_lists_of_token_ids_are_prompts_too(world: World, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="bytes", prompt=[[65, 66], [67]])
    assert len(answer.choices) == 2
    assert sorted(bytes(start.prompt_token_ids) for start in world.pair.starts.values()) == [b"AB", b"C"]


async def test_all_are_in_the_queue_before_one_is_granted(world: World, http: httpx.AsyncClient) -> None:
    world.scheduler.grants_at_once = False
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["one", "two", "three"]}))
    await world.until(lambda: len(world.scheduler.submits) == 3, "all are submitted")
    assert not world.pair.starts
    for submit in list(world.scheduler.submits):
        await world.scheduler.grant(submit)
    assert [choice["text"] for choice in (await asking).json()["choices"]] == [ANSWER] * 3


async def test_a_stream_says_whose_each_piece_is(world: World, client: openai.AsyncOpenAI) -> None:
    texts = {0: "", 1: ""}
    reasons = {}
    async for chunk in await client.completions.create(model="bytes", prompt=["one", "two"], stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == {0: ANSWER, 1: ANSWER}
    assert reasons == {0: "stop", 1: "stop"}


async def test_what_refuses_one_refuses_all(world: World, http: httpx.AsyncClient) -> None:
    world.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUEUE_FULL, "lane standard is full", 2100)
    refused = await http.post("/v1/completions", json={"prompt": ["one", "two"]})
    assert refused.status_code == 429
    await world.until_idle()


async def test_a_client_that_leaves_cancels_them_all(world: World, http: httpx.AsyncClient) -> None:
    world.pair.stops_after = 1
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["one", "two"]}))
    await world.until(lambda: len(world.pair.starts) == 2, "both run")
    asking.cancel()
    await world.until(lambda: len({cancel.request_id for cancel in world.decode.named("cancel")}) == 2, "cancelled")
    await world.until_idle()


async def test_a_key_is_for_one_prompt(http: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    refused = await http.post("/v1/completions", json={"prompt": ["one", "two"]}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "has 2 prompts; with Idempotency-Key there is one answer" in refused.json()["error"]["message"]


async def test_the_room_of_a_list_is_that_of_all_its_answers(world: World, http: httpx.AsyncClient) -> None:
    max_requests = world.gateway.processor._driver._settings.max_requests
    assert max_requests < 256 * 16
    refused = await http.post("/v1/completions", json={"prompt": ["x"] * 256, "n": 16})
    assert refused.status_code == 429
    assert world.metric("accepted_total") == 0


async def test_log_probabilities_of_prompts_are_bounded_over_the_whole_list(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["x" * 400] * 8, "prompt_logprobs": 20}
    refused = await http.post("/v1/completions", json=body)
    assert refused.json()["error"]["param"] == "prompt_logprobs"
    assert "3200 tokens of prompt times 1 + 20 are 67200, at most 65536" in refused.json()["error"]["message"]


async def test_an_echo_begins_with_the_prompt_as_it_was_sent(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="bytes", prompt=["abc", "d"], echo=True)
    assert [choice.text for choice in answer.choices] == ["abc" + ANSWER, "d" + ANSWER]
    of_ids = await client.completions.create(model="bytes", prompt=[97, 98], echo=True)
    assert of_ids.choices[0].text == "ab" + ANSWER


async def test_an_echo_has_the_log_probabilities_of_its_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="bytes", prompt=["abc", "de"], n=2, echo=True, logprobs=1)
    for choice, prompt in zip(answer.choices, ("abc", "abc", "de", "de"), strict=True):
        found = choice.logprobs
        assert found is not None
        assert found.tokens == [*prompt, "h", "\ufffd", "\ufffd"]
        expected = [None, *(-token_id / 64 for token_id in ids_of(prompt[1:] + ANSWER))]
        assert found.token_logprobs == expected
        assert found.text_offset == list(range(len(prompt) + 3))
        assert (found.top_logprobs or [])[:2] == [None, {"\x00": 0.0, prompt[1]: expected[1]}]
    assert "prompt_logprobs" not in answer.choices[0].model_dump()


async def test_an_echo_alone_is_the_prompt_and_no_output(client: openai.AsyncOpenAI) -> None:
    """As evaluations ask for the likelihood of a text."""
    answer = await client.completions.create(model="bytes", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


async def test_an_echo_is_streamed_before_the_output(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="bytes", prompt="abc", echo=True, stream=True)
    texts = [chunk.choices[0].text for chunk in [chunk async for chunk in stream]]
    assert texts[0] == "abc"
    assert "".join(texts) == "abc" + ANSWER


async def test_token_ids_come_in_vllms_form(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["ab", "c"], "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids_of(ANSWER)] * 2
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids_of("ab"), ids_of("c")]
    chat = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True}
    answer = (await http.post("/v1/chat/completions", json=chat)).json()
    assert answer["prompt_token_ids"] == ids_of("user: x\n")
    assert answer["choices"][0]["token_ids"] == ids_of(ANSWER)


async def test_others_have_their_turn_between_the_prompts_of_a_list(
    world: World, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = world.gateway.processor._entry
    turn, num_turns = entry.turn, 0

    async def counted() -> None:
        nonlocal num_turns
        num_turns += 1
        await turn()

    monkeypatch.setattr(entry, "turn", counted)
    await client.completions.create(model="bytes", prompt=["one", "two", "three"])
    assert num_turns == 3


async def test_template_variables_are_bounded(http: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": ["x"] * 5000}}
    refused = await http.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
    few = await http.post("/v1/chat/completions", json={**chat, "chat_template_kwargs": {"a": ["x"] * 20}})
    assert few.status_code == 200, few.text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("wants", [{"echo": True}, {"return_token_ids": True}])
async def test_many_ids_are_rendered_beside_the_event_loop_as_few_are(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, wants: dict[str, bool], *, is_stream: bool
) -> None:
    """Two prompts of two answers each: 10 ids of prompts, and 12 of output."""
    body = {"prompt": [[97, 98], [99, 100, 101]], "n": 2, "seed": 1, "stream": is_stream, **wants}
    in_threads: list[object] = []

    async def to_thread(render: Callable[[], object]) -> object:
        in_threads.append(render)
        return render()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    num_shown = 22 if "return_token_ids" in wants and not is_stream else 10
    found = []
    for max_inline in (num_shown, num_shown - 1):
        monkeypatch.setattr(whole_answer, "MAX_INLINE_ENTRIES", max_inline)
        answer = _VARYING.sub("", (await http.post("/v1/completions", json=body)).text)
        found.append([line for line in answer.splitlines() if line][:4])  # of a stream, its opening
        assert len(in_threads) == (max_inline < num_shown)
    assert found[0] == found[1]


async def test_the_prompt_ids_of_a_chat_count_once(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def to_thread(render: Callable[[], object]) -> object:
        raise AssertionError(f"{render} is short")

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    monkeypatch.setattr(whole_answer, "MAX_INLINE_ENTRIES", len("user: x\n"))
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 3, "return_token_ids": True, "stream": True}
    assert (await http.post("/v1/chat/completions", json=chat)).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_of_ids_is_decoded_once_for_all_its_answers(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, *, is_stream: bool
) -> None:
    decoded: list[bytes] = []
    decode = world.tokenizer.decode

    def noted(token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        decoded.append(bytes(token_ids))
        return decode(token_ids, skip_special=skip_special)

    monkeypatch.setattr(world.tokenizer, "decode", noted)
    body = {"prompt": [[97, 98], [99]], "n": 3, "echo": True, "stream": is_stream}
    answer = (await http.post("/v1/completions", json=body)).text
    assert decoded == [b"ab", b"c"]
    assert (answer.count('"text":"ab'), answer.count('"text":"c')) == (3, 3)
