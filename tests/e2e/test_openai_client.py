"""The official OpenAI client, and many streams at once, against the HTTP port."""

import asyncio
import random

import openai
import pytest

from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

NUM_REQUESTS = 256
NUM_STREAMS = 64


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=60)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]


def test_a_chat_completion_answers_and_counts_its_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "What color is the sky on a clear day?"}],
        max_tokens=24,
        temperature=0,
    )
    assert "blue" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_list_of_prompts_has_the_answers_that_each_has_alone(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "Once upon a time", "1 2 3 4", "The sky is"]
    alone = [
        client.completions.create(model="smollm2-135m", prompt=prompt, max_tokens=16, temperature=0)
        for prompt in prompts
    ]
    together = client.completions.create(model="smollm2-135m", prompt=prompts, max_tokens=16, temperature=0)
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)


def test_the_likelier_of_two_texts_is_told_by_their_echoes(client: openai.OpenAI) -> None:
    texts = ["Paris is the capital of France", "Paris is the capital of Peru"]
    answer = client.completions.create(model="smollm2-135m", prompt=texts, max_tokens=0, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == texts
    found = [choice.logprobs.token_logprobs or [] for choice in answer.choices if choice.logprobs]
    assert [logprobs[0] for logprobs in found] == [None, None]
    assert found[0][:-1] == found[1][:-1], "they begin alike, and so to the bit"
    assert (found[0][-1] or 0) > (found[1][-1] or 0)


def test_a_streamed_chat_is_the_chat_that_is_not_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_tokens=24,
        temperature=0,
    )
    chunks = list(
        client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Name three rivers."}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    # what was cached in between is the one difference
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_wrong_field_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="smollm2-135m", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="x")


async def test_256_requests_over_64_streams_give_the_text_of_unstreamed_requests(stack: Stack) -> None:
    source = random.Random(10)
    prompts = [[source.randrange(100, 40_000) for _ in range(source.randint(4, 24))] for _ in range(NUM_REQUESTS // 2)]
    gate = asyncio.Semaphore(NUM_STREAMS)

    async with openai.AsyncOpenAI(
        base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=110
    ) as client:

        async def whole(prompt: list[int]) -> str:
            async with gate:
                answer = await client.completions.create(
                    model="smollm2-135m", prompt=prompt, max_tokens=6, temperature=0, seed=1
                )
                return str(answer.choices[0].text)

        async def streamed(prompt: list[int]) -> str:
            async with gate:
                chunks = await client.completions.create(
                    model="smollm2-135m", prompt=prompt, max_tokens=6, temperature=0, seed=1, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

        texts = await asyncio.gather(*(whole(prompt) for prompt in prompts), *(streamed(prompt) for prompt in prompts))

    half = len(prompts)
    assert texts[half:] == texts[:half]
