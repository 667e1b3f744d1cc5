"""OpenAI's API and what no client of it should send: every wrong field is named."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.unit.gateway.world import World


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["one", [1, "x"]]}, "prompt[1]"),
        ({"prompt": ["one", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [257]]}, "prompt[1]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "x" * 2_000_000}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [1] * 33}, "stop_token_ids"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"lane": "a/b"}, "lane"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": {"257": 1}}, "logit_bias[257]"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"best_of": 3}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"top_n": 5}, "top_n"),
        ({"maxTokens": 5}, "maxTokens"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"guided_json": {}}, "guided_json"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"suffix": "and"}, "suffix"),
        ({"temprature": 0}, "temprature"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_wrong_or_unserved_field_is_named(http: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/completions", json={"model": "bytes", "prompt": "x", **change})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ],
    ids=str,
)
async def test_a_wrong_message_is_named(http: httpx.AsyncClient, messages: Any, param: str) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_max_completion_tokens_is_named_as_it_was_written(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.json()["error"]["param"] == "max_completion_tokens"


async def test_fields_that_change_nothing_are_taken(world: World, http: httpx.AsyncClient) -> None:
    harmless = {"n": 1, "user": "me", "logprobs": None, "logit_bias": {}, "presence_penalty": 0, "echo": False}
    response = await http.post("/v1/completions", json={"prompt": "x", "best_of": 1, "tools": [], **harmless})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b'{"prompt": "\xff"}', b"[]", b"nan", b'{"prompt": "\\ud800"}']
)
async def test_bytes_that_are_no_request_are_refused(world: World, http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert world.metric("accepted_total") == 0


async def test_a_body_over_the_limit_is_refused_whether_or_not_it_names_its_length(http: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(19):
            yield b"x" * 2**20

    body = b"x" * (18 * 2**20 + 1)
    for content in (body, chunks()):
        response = await http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "larger than 18874368 bytes" in response.json()["error"]["message"]


async def test_a_body_that_is_announced_over_the_limit_is_refused_before_it_is_read(world: World) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.http_url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
    assert b"413" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await writer.wait_closed()
