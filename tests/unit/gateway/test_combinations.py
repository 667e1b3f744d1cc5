"""What a structured answer can be asked for with: the worker gets the grammar and the rest, or the field is named."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.gateway.test_batches_api import chat, client_of, ended, submit
from tests.unit.gateway.world import World, open_world, with_batches

from weir.core.grammar import Grammar
from weir.rpc.conversions import sampling_from_pb

SCHEMA = {"type": "object"}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
COMPLETION: dict[str, Any] = {"prompt": "Say hello", "max_tokens": 8}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(with_batches(tmp_path)) as world:
        yield world


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


def taken_grammars(world: World) -> list[Grammar | None]:
    """Of all that a worker was given since the last time."""
    found = [sampling_from_pb(start.sampling).grammar for start in world.pair.starts.values()]
    world.pair.starts.clear()
    return found


async def test_these_are_served_together(world: World, http: httpx.AsyncClient) -> None:
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/completions", COMPLETION | fields, num_answers)
        for fields, num_answers in (
            ({"n": 3}, 3),
            ({"prompt": ["a", "b"]}, 2),
            ({"stream": True}, 1),
            ({"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 5}, 1),
            ({"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.2, "logit_bias": {"65": 5}}, 1),
            ({"logprobs": 2, "prompt_logprobs": 1}, 1),
            ({"stop": ["wide"], "include_stop_str_in_output": True}, 1),
            ({"stop_token_ids": [65]}, 1),
            ({"min_tokens": 4}, 1),
            ({"echo": True}, 1),
            ({"cache_salt": "s", "cache_prompt": False}, 1),
            ({"lane": "batch", "deadline_ms": 60_000, "partial_at_deadline": True, "expected_output_tokens": 3}, 1),
        )
    ]
    goes_on = [*CHAT["messages"], {"role": "assistant", "content": "{"}]
    cases.append(
        (
            "/v1/chat/completions",
            {"messages": goes_on, "continue_final_message": True, "add_generation_prompt": False},
            1,
        )
    )
    for path, body, num_answers in cases:
        answer = await http.post(path, json=body | {"response_format": FORM})
        assert answer.status_code == 200, (body, answer.text)
        assert taken_grammars(world) == [Grammar.json_schema(SCHEMA)] * num_answers, body


async def test_other_apis_and_batch_jobs_have_it(world: World, http: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for path, body in (
        ("/v1/responses", {"input": "x", "text": {"format": {**form, "name": "x"}}}),
        ("/v1/messages", CHAT | {"output_config": {"format": form}}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert taken_grammars(world) == [Grammar.json_schema(SCHEMA)]
    async with client_of(world) as client:
        done = await ended(client, await submit(client, chat("a", response_format=FORM), chat("b")))
    assert done.status == "completed"
    assert set(taken_grammars(world)) == {Grammar.json_schema(SCHEMA), None}


async def test_a_keyed_answer_is_the_same_again_and_another_form_under_its_key_is_refused(
    world: World, http: httpx.AsyncClient
) -> None:
    key = {"Idempotency-Key": "k"}
    body = COMPLETION | {"response_format": FORM, "temperature": 0}
    first = await http.post("/v1/completions", json=body, headers=key)
    again = await http.post("/v1/completions", json=body, headers=key)
    assert (first.status_code, again.json()["choices"]) == (200, first.json()["choices"])
    assert taken_grammars(world) == [Grammar.json_schema(SCHEMA)]
    for other in ({"structured_outputs": {"regex": "a"}}, {}):
        refused = await http.post("/v1/completions", json=COMPLETION | {"temperature": 0} | other, headers=key)
        assert refused.status_code == 409
        assert "Idempotency-Key" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"response_format": FORM, "ignore_eos": True}, "ignore_eos", "whose end is the answer's end"),
        ({"response_format": FORM, "structured_outputs": {"regex": "a"}}, "structured_outputs", "give one of them"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "is of JSON",
        ),
    ],
    ids=str,
)
async def test_these_are_refused_with_the_reason(
    world: World, http: httpx.AsyncClient, fields: dict[str, Any], field: str, said: str
) -> None:
    answer = await http.post("/v1/completions", json=COMPLETION | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert said in error["message"]
    assert taken_grammars(world) == []
