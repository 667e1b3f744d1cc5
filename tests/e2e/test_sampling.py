"""Sampling parameters through a whole stack: the OpenAI client at one end, the model at the other."""

import asyncio
import math

import openai
import pytest

from weir.client import GenerateOptions, WeirClient
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

MODEL = "smollm2-135m"
PROMPT = "The capital of France is"
PENALISED = GenerateOptions(
    temperature=0.8,
    top_p=0.9,
    seed=5,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.3,
    max_tokens=24,
    ignore_eos=True,
)


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=100)


def complete(stack: Stack, prompt: str | list[int], options: GenerateOptions) -> list[int]:
    with WeirClient(stack.grpc_address) as weir:
        return [token_id for chunk in weir.generate(prompt, options) for token_id in chunk.token_ids]


def test_log_probabilities_of_a_greedy_chat_are_those_of_the_likeliest_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, logprobs[0])
        assert logprobs == sorted(logprobs, reverse=True)
        assert 0 < sum(math.exp(logprob) for logprob in logprobs) <= 1 + 1e-5
    spelled = b"".join(bytes(entry.bytes or ()) for entry in content).decode()
    assert spelled.startswith(choice.message.content or "?")


def test_a_prompt_is_scored_as_its_own_continuation_was(stack: Stack) -> None:
    with WeirClient(stack.grpc_address) as weir:
        prompt = weir.tokenize(PROMPT)
        greedy = GenerateOptions(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
        sampled = [told for chunk in weir.generate(prompt, greedy) for told in chunk.logprobs]
        whole = [*prompt, *(told.token_id for told in sampled)]
        scoring = GenerateOptions(temperature=0, max_tokens=1, prompt_logprobs=2)
        scored = [told for chunk in weir.generate(whole, scoring) for told in chunk.prompt_logprobs]
    assert [told.token_id for told in scored] == whole[1:]
    for from_prompt, from_output in zip(scored[-len(sampled) :], sampled, strict=True):
        assert from_prompt.rank == from_output.rank == 1
        assert from_prompt.logprob == pytest.approx(from_output.logprob, abs=1e-3)
        assert from_prompt.top[0][0] == from_output.top[0][0]


def test_a_bias_forces_a_token_and_another_forbids_one(client: openai.OpenAI, stack: Stack) -> None:
    [first, *_] = complete(stack, PROMPT, GenerateOptions(temperature=0, max_tokens=1))
    with WeirClient(stack.grpc_address) as weir:
        [forced] = weir.tokenize(" zebra")[:1]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={str(forced): 100}, logprobs=0
    )
    assert answer.choices[0].logprobs is not None
    assert len(set(answer.choices[0].logprobs.tokens or ())) == 1
    assert complete(stack, PROMPT, GenerateOptions(temperature=0, max_tokens=1, logit_bias=((forced, 100.0),))) == [
        forced
    ]
    others = complete(stack, PROMPT, GenerateOptions(temperature=0, max_tokens=8, logit_bias=((first, -100.0),)))
    assert first not in others


def test_penalties_make_a_greedy_answer_repeat_itself_less(stack: Stack) -> None:
    def num_repeats(**penalties: float) -> int:
        options = GenerateOptions(temperature=0, max_tokens=60, ignore_eos=True, **penalties)  # type: ignore[arg-type]
        token_ids = complete(stack, "One, two, one, two, one, two, one, two,", options)
        return len(token_ids) - len(set(token_ids))

    plain = num_repeats()
    assert num_repeats(frequency_penalty=2.0) < plain
    assert num_repeats(repetition_penalty=1.5) < plain


def test_no_stop_comes_before_min_tokens(client: openai.OpenAI) -> None:
    def ask(extra: dict[str, int]) -> tuple[int, str]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Say only: yes"}],
            max_tokens=120,
            temperature=0,
            extra_body=extra,
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    num_tokens, reason = ask({})
    assert reason == "stop"
    assert ask({"min_tokens": num_tokens + 5})[0] >= num_tokens + 5


def test_choice_0_of_several_is_the_only_answer_of_one(client: openai.OpenAI) -> None:
    def ask(n: int) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=1.0, seed=3, n=n)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    several = ask(4)
    assert several[:1] == ask(1)
    assert several == ask(4)
    assert len(set(several)) == 4


async def test_a_seeded_request_with_penalties_is_the_same_alone_and_among_32_others(stack: Stack) -> None:
    alone = await asyncio.to_thread(complete, stack, PROMPT, PENALISED)
    async with openai.AsyncOpenAI(
        base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=110
    ) as others:
        load = [
            asyncio.create_task(
                others.completions.create(model=MODEL, prompt=f"{number} {PROMPT}", max_tokens=40, temperature=1.0)
            )
            for number in range(32)
        ]
        await asyncio.sleep(0.3)
        among = await asyncio.to_thread(complete, stack, PROMPT, PENALISED)
        await asyncio.gather(*load)
    assert len(alone) == 24
    assert among == alone


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 17}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"49152": 1}}, "logit_bias[49152]"),
        ({"logprobs": 21}, "logprobs"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"prompt_logprobs": 20}, "prompt": [1] * 4000}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "and"}, "suffix"),
        ({"suffix": "x"}, "suffix"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_out_of_range_or_not_served_is_named(
    client: openai.OpenAI, change: dict[str, object], param: str
) -> None:
    request: dict[str, object] = {"model": MODEL, "prompt": "x", **change}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**request)
    assert refused.value.param == param
