"""Answers that fit a schema, a regular expression, a choice or a grammar, through a whole stack with the real model;
the same tokens alone, in a batch, and after a worker's death."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import openai
import pytest

from weir.client import GenerateOptions, WeirClient
from weir.core.errors import InvalidRequest
from weir.core.grammar import Grammar
from weir.core.life import FinishReason
from weir.rpc.conversions import options_to_pb
from weir.testing.load import StreamRecord, open_stub, stream
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

MODEL = "smollm2-135m"
NUM_REQUESTS = 6
"""Alone, in a batch, and as a worker dies: two of each kind."""
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ROWS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"key": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99999}},
        "required": ["key", "n"],
        "additionalProperties": False,
    },
    "minItems": 12,
    "maxItems": 12,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run"), num_decode=2) as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=100)


def complete(
    stack: Stack, options: GenerateOptions, prompt: str = "A person, as JSON: "
) -> tuple[str, FinishReason | None]:
    """The text, and how it ended."""
    with WeirClient(stack.grpc_address, timeout_s=200) as weir:
        chunks = list(weir.generate(prompt, options))
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_chat_with_a_schema_is_valid_json(client: openai.OpenAI, temperature: float) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Describe Ada Lovelace."}],
            temperature=temperature,
            seed=seed,
            max_tokens=400,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PERSON)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"regex": "[0-9]{4}-[0-9]{2}"}, r"[0-9]{4}-[0-9]{2}"),
        ({"choice": ["Berlin", "Paris", "Rome"]}, r"Berlin|Paris|Rome"),
        ({"grammar": 'start: "(" /[a-z]{1,5}/ ")"'}, r"\([a-z]{1,5}\)"),
        ({"grammar": 'root ::= "(" [a-z]{1,5} ")"'}, r"\([a-z]{1,5}\)"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 7}}, r"[567]"),
        ({"json": {"const": [1, 2]}, "disable_any_whitespace": True}, r"\[1,2\]"),
        ({"json": '{"const": {"a": [1, null]}}'}, r'\{\s*"a"\s*:\s*\[\s*1\s*,\s*null\s*\]\s*\}'),
    ],
    ids=["regex", "choice", "grammar", "gbnf", "json", "compact json", "json as text"],
)
def test_vllms_constraints_hold_at_any_temperature(
    client: openai.OpenAI, constraint: dict[str, Any], expected: str
) -> None:
    for seed in range(3):
        answer = client.completions.create(
            model=MODEL,
            prompt="The capital of France is",
            temperature=2,
            seed=seed,
            max_tokens=200,
            extra_body={"structured_outputs": constraint},
        )
        assert answer.choices[0].finish_reason == "stop"
        assert re.fullmatch(expected, answer.choices[0].text)


def test_every_answer_of_a_stream_fits_and_has_its_log_probabilities(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    num_told = 0
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is water wet?"}],
        n=3,
        seed=5,
        temperature=1,
        logprobs=True,
        stream=True,
        extra_body={"structured_outputs": {"choice": ["yes", "no", "it depends"]}},
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            num_told += len(choice.logprobs.content or []) if choice.logprobs else 0
    assert set(texts) == {0, 1, 2}
    assert set(texts.values()) <= {"yes", "no", "it depends"}
    assert num_told > 3


def test_a_json_object_is_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A small JSON object, please."}],
        temperature=0,
        max_tokens=300,
        response_format={"type": "json_object"},
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_finished_grammar_ends_an_answer_before_min_tokens(stack: Stack) -> None:
    options = GenerateOptions(grammar=Grammar("regex", "[0-9]{4}"), min_tokens=150, max_tokens=200, temperature=0)
    text, reason = complete(stack, options)
    assert re.fullmatch("[0-9]{4}", text)
    assert reason is FinishReason.STOP


def test_a_stop_string_may_cut_an_answer_short(stack: Stack) -> None:
    options = GenerateOptions(grammar=Grammar.json_schema(PERSON), stop=('"age"',), temperature=0, max_tokens=200)
    text, reason = complete(stack, options)
    assert text.lstrip().startswith("{")
    assert '"age"' not in text
    assert reason is FinishReason.STOP


def test_no_bias_lets_a_token_in_that_the_grammar_leaves_out(stack: Stack) -> None:
    with WeirClient(stack.grpc_address) as weir:
        (wanted,) = weir.tokenize(" the")
    options = GenerateOptions(
        grammar=Grammar("regex", "[0-9]{3}"), logit_bias=((wanted, 100.0),), temperature=0, max_tokens=50
    )
    assert re.fullmatch("[0-9]{3}", complete(stack, options)[0])


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format.json_schema.schema", "not"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structural_tag"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"structured_outputs": {"regex": "a" * 60_001}}, "structured_outputs.regex", "60001"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_is_refused_by_name(stack: Stack, body: dict[str, Any], param: str, said: str) -> None:
    sent = {"model": MODEL, "prompt": "Hello", "max_tokens": 5} | body
    answer = httpx.post(f"{stack.http_url}/v1/completions", json=sent, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


def test_grpc_names_the_field(stack: Stack) -> None:
    with pytest.raises(InvalidRequest, match=r"options\.sampling\.grammar.*uniqueItems"):
        complete(stack, GenerateOptions(grammar=Grammar.json_schema({"type": "array", "uniqueItems": True})))


def test_the_command_line_takes_a_schema_file(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "person.json"
    path.write_text(json.dumps(PERSON))
    shown = stack.weir(
        "generate", "--address", stack.grpc_address, "--temperature", "0", "--max-tokens", "300",
        "--json-schema", str(path), "A person: ",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    jsonschema.validate(json.loads(shown.stdout), PERSON)


def request_of(number: int) -> inference_pb2.GenerateRequest:
    """Of every third the output is free; greedy and seeded."""
    grammar = (
        None if number % 3 == 2 else Grammar.json_schema(ROWS) if number % 3 else Grammar("regex", "([a-z]{3},){60}")
    )
    options = GenerateOptions(
        grammar=grammar, temperature=0 if number % 2 else 0.9, seed=number, max_tokens=120, ignore_eos=grammar is None
    )
    return inference_pb2.GenerateRequest(text=f"Row {number}: ", options=options_to_pb(options))


async def serve(stack: Stack, at_a_time: int, kill_after_s: float | None = None) -> list[StreamRecord]:
    channel, stub = open_stub(stack.grpc_address)
    places = asyncio.Semaphore(at_a_time)

    async def one(number: int) -> StreamRecord:
        async with places:
            return await stream(stub, request_of(number), timeout_s=200)

    async with channel:
        tasks = [asyncio.create_task(one(number)) for number in range(NUM_REQUESTS)]
        if kill_after_s is not None:
            await asyncio.sleep(kill_after_s)
            assert not all(task.done() for task in tasks), "the worker dies amid them"
            stack.kill(stack.processes("decode")[0])
        return await asyncio.gather(*tasks)


async def test_tokens_are_the_same_alone_in_a_batch_and_after_a_decode_workers_death(stack: Stack) -> None:
    alone = await serve(stack, 1)
    assert [record.code for record in alone] == [grpc.StatusCode.OK] * NUM_REQUESTS
    batch = await serve(stack, NUM_REQUESTS)
    assert [record.token_ids for record in batch] == [record.token_ids for record in alone]
    disturbed = await serve(stack, NUM_REQUESTS, kill_after_s=0.7)  # benchmarks.structured.validity kills more often
    assert [record.token_ids for record in disturbed] == [record.token_ids for record in alone]
    wait_until(stack.is_idle, timeout_s=60, what="idle")
    assert stack.integrity_errors() == []
