"""Log-probabilities as clients see them: by gRPC, and in both forms of OpenAI's API."""

from collections.abc import AsyncIterator

import openai
import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.world import World

from weir.client import AsyncWeirClient, GenerateOptions

ANSWER = "hé"  # é is two bytes, so two tokens


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    world.pair.answer = ids_of(ANSWER)
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_grpc_sends_them_with_each_token(world: World) -> None:
    world.pair.answer = ids_of(ANSWER)
    async with AsyncWeirClient(world.grpc_address) as client:
        chunks = [chunk async for chunk in client.generate("abc", GenerateOptions(logprobs=2, prompt_logprobs=1))]
    found = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.token_id for entry in found] == ids_of(ANSWER)
    assert [entry.logprob for entry in found] == [-token_id / 64 for token_id in ids_of(ANSWER)]
    assert found[0].rank == ord("h") + 1
    assert found[0].top == ((0, 0.0), (1, -1 / 64))
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert [entry.token_id for entry in chunks[0].prompt_logprobs] == ids_of("bc")


async def test_who_does_not_ask_gets_none(world: World, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="bytes", prompt="abc")
    assert answer.choices[0].logprobs is None
    chat = await client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "x"}], logprobs=False
    )
    assert chat.choices[0].logprobs is None
    assert not any(start.sampling.HasField("logprobs") for start in world.pair.starts.values())


async def test_a_chat_has_text_bytes_and_alternatives_of_each_token(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.bytes, entry.logprob) for entry in content] == [
        ("h", [0x68], -0x68 / 64),
        ("\ufffd", [0xC3], -0xC3 / 64),
        ("\ufffd", [0xA9], -0xA9 / 64),
    ]
    assert [(top.token, top.bytes, top.logprob) for top in content[0].top_logprobs] == [
        ("\x00", [0], 0.0),
        ("\x01", [1], -1 / 64),
    ]
    assert bytes(byte for entry in content for byte in entry.bytes or ()).decode() == ANSWER


async def test_a_chat_without_alternatives_has_the_chosen_tokens_alone(
    world: World, client: openai.AsyncOpenAI
) -> None:
    answer = await client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "x"}], logprobs=True
    )
    assert answer.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or ()] == [[], [], []]
    [start] = world.pair.starts.values()
    assert start.sampling.logprobs == 0


async def test_a_streamed_chat_has_every_token_once(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1, stream=True
    )
    found, text = [], ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None:
            found += [byte for entry in chunk.choices[0].logprobs.content or () for byte in entry.bytes or ()]
    assert text == ANSWER
    assert found == ids_of(ANSWER)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_completion_has_lists_by_token(client: openai.AsyncOpenAI, is_stream: bool) -> None:
    tokens: list[str] = []
    numbers: list[float] = []
    offsets: list[int] = []
    tops: list[dict[str, float]] = []
    if is_stream:
        chunks = [
            chunk async for chunk in await client.completions.create(model="bytes", prompt="x", logprobs=1, stream=True)
        ]
    else:
        chunks = [await client.completions.create(model="bytes", prompt="x", logprobs=1)]
    for chunk in chunks:
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None:
            tokens += logprobs.tokens or []
            numbers += logprobs.token_logprobs or []
            offsets += logprobs.text_offset or []
            tops += logprobs.top_logprobs or []
    assert tokens == ["h", "\ufffd", "\ufffd"]
    assert numbers == [-0x68 / 64, -0xC3 / 64, -0xA9 / 64]
    assert offsets[:2] == [0, 1]
    assert tops[0] == {"\x00": 0.0, "h": -0x68 / 64}


async def test_those_of_the_prompt_come_as_vllm_writes_them(world: World, client: openai.AsyncOpenAI) -> None:
    del client
    body = {"prompt": "abc", "prompt_logprobs": 1}
    async with world.http_client() as http:
        response = await http.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -98 / 64, "rank": 99, "decoded_token": "b"},
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"},
        },
        {
            "99": {"logprob": -99 / 64, "rank": 100, "decoded_token": "c"},
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"},
        },
    ]
