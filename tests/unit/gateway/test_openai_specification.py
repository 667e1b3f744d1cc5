"""What OpenAI's specification allows for the fields that are served is taken, and every answer is as it says."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.openai_specification import (
    DOCUMENT_VARIABLE,
    PackagedTypes,
    PublishedDocument,
    Specification,
)
from tests.unit.gateway.world import World

from weir.bus.messages import RefusalReason, SubmitReply

MESSAGES = [{"role": "user", "content": "x"}]
CHAT: dict[str, Any] = {"model": "bytes", "messages": MESSAGES, "max_completion_tokens": 5}
COMPLETION: dict[str, Any] = {"model": "bytes", "prompt": "x", "max_tokens": 5}
RESPONSE: dict[str, Any] = {"model": "bytes", "input": "x", "max_output_tokens": 16}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "response": "/v1/responses"}
BASES = {"chat": CHAT, "completion": COMPLETION, "response": RESPONSE}

# Fields that are served, each with values that the specification allows.
SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "stream": [False, True],
}
TEXT: dict[str, list[Any]] = {
    "n": [1, 2],
    "stop": ["end", ["a", "b", "c", "d"], None],
    "seed": [0, -5, 2**53],
    "presence_penalty": [-2, 0.5, 2],
    "frequency_penalty": [-2, 0.5, 2],
    "logit_bias": [{}, {"5": -100, "7": 100}, None],
    "user": ["someone"],
}
FIELDS: dict[str, dict[str, list[Any]]] = {
    "chat": SAMPLING
    | TEXT
    | {
        "messages": [
            [{"role": role, "content": "y"}, *MESSAGES] for role in ("system", "developer", "user", "assistant")
        ]
        + [[{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "ann"}]],
        "max_tokens": [5],
        "max_completion_tokens": [1, 5, None],
        "logprobs": [False, True],
        "metadata": [{"a": "b"}],
        "store": [False],
        "response_format": [{"type": "text"}],
        "parallel_tool_calls": [True, False],
        "modalities": [["text"]],
        "service_tier": ["auto"],
        "safety_identifier": ["someone"],
        "prompt_cache_key": ["k"],
        "tools": [[]],
        "tool_choice": ["none", "auto"],
    },
    "completion": SAMPLING
    | TEXT
    | {
        "prompt": ["x", ["x", "y"], ids_of("xy"), [ids_of("x"), ids_of("y")]],
        "max_tokens": [1, 5, None],
        "logprobs": [0, 5, None],
        "echo": [False, True],
        "best_of": [1],
        "suffix": [None],
    },
    "response": SAMPLING
    | {
        "input": [
            "x",
            MESSAGES,
            [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        ],
        "instructions": ["be short", None],
        "max_output_tokens": [16, None],
        "store": [True, False],
        "metadata": [{"a": "b"}, {}],
        "include": [["message.output_text.logprobs"], []],
        "parallel_tool_calls": [True],
        "text": [{"format": {"type": "text"}}],
        "truncation": ["disabled"],
        "tool_choice": ["none", "auto"],
        "tools": [[]],
        "user": ["someone"],
        "service_tier": ["auto"],
        "background": [False],
    },
}

# What answers have that the specification does not allow, and why: (form, where) -> reason. The same in docs/api.md.
DEVIATIONS: dict[tuple[str, str], str] = {
    ("completion chunk", "choices[].finish_reason"): "null until the last chunk, as OpenAI's own service sends it",
    ("completion with echo", "choices[].logprobs.token_logprobs[]"): "null for a prompt's first token, as OpenAI's own",
    ("completion with echo", "choices[].logprobs.top_logprobs[]"): "null for a prompt's first token, as OpenAI's own",
}
FORMS = {"completion chunk": "completion", "completion with echo": "completion"}


@pytest.fixture(params=["the package's types", "the document"])
def specification(request: pytest.FixtureRequest) -> Specification:
    if request.param == "the package's types":
        return PackagedTypes()
    path = os.environ.get(DOCUMENT_VARIABLE)
    if path is None:
        pytest.skip(f"{DOCUMENT_VARIABLE} names no file of it")
    return PublishedDocument(Path(path))


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def check(specification: Specification, form: str, value: object) -> None:
    allowed = {where for deviating, where in DEVIATIONS if deviating == form}
    assert specification.problems(FORMS.get(form, form), value) <= allowed, json.dumps(value)


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


ANSWERED: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "chat", {"n": 2}),
    ("chat", "chat", {"logprobs": True, "top_logprobs": 2}),
    ("chat chunk", "chat", {"stream": True, "n": 2}),
    ("chat chunk", "chat", {"stream": True, "logprobs": True, "stream_options": {"include_usage": True}}),
    ("completion", "completion", {"n": 2, "prompt": ["x", "y"]}),
    ("completion", "completion", {"logprobs": 2}),
    ("completion with echo", "completion", {"echo": True, "logprobs": 1}),
    ("completion chunk", "completion", {"stream": True, "logprobs": 1}),
    ("response", "response", {"instructions": "be short", "metadata": {"a": "b"}}),
    ("response", "response", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("response event", "response", {"stream": True}),
    ("response event", "response", {"stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
]


@pytest.mark.parametrize(("form", "route", "fields"), ANSWERED)
async def test_an_answer_is_as_the_specification_says(
    http: httpx.AsyncClient, specification: Specification, form: str, route: str, fields: dict[str, Any]
) -> None:
    answer = await http.post(PATHS[route], json=BASES[route] | fields)
    assert answer.status_code == 200, answer.text
    values = events_of(answer.text) if "stream" in fields else [answer.json()]
    assert values
    for value in values:
        check(specification, form, value)


async def test_a_response_that_is_cut_short_and_one_that_is_kept_are_as_the_specification_says(
    http: httpx.AsyncClient, specification: Specification
) -> None:
    made = (await http.post("/v1/responses", json=RESPONSE | {"max_output_tokens": 2})).json()
    assert made["status"] == "incomplete"
    check(specification, "response", made)
    check(specification, "response", (await http.get(f"/v1/responses/{made['id']}")).json())


async def test_models_are_as_the_specification_says(http: httpx.AsyncClient, specification: Specification) -> None:
    models = (await http.get("/v1/models")).json()
    check(specification, "models", models)
    check(specification, "model", models["data"][0])
    check(specification, "model", (await http.get("/v1/models/bytes")).json())


async def test_errors_are_as_the_specification_says(
    world: World, http: httpx.AsyncClient, specification: Specification
) -> None:
    for path, body in ((PATHS["chat"], {}), (PATHS["completion"], COMPLETION | {"model": "x"}), ("/v1/nowhere", {})):
        answer = await http.post(path, json=body)
        assert answer.status_code in (400, 404)
        check(specification, "error", answer.json())
    world.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUOTA, "over it", 2400)
    for route, path in PATHS.items():
        answer = await http.post(path, json=BASES[route])
        assert answer.status_code == 429
        check(specification, "error", answer.json())


@pytest.mark.parametrize("route", PATHS)
async def test_each_field_that_is_served_takes_what_the_specification_allows(
    http: httpx.AsyncClient, specification: Specification, route: str
) -> None:
    for field, values in FIELDS[route].items():
        for value in values:
            body = BASES[route] | {field: value}
            problems = specification.problems(f"{route} request", body)
            assert problems == set(), f"the example itself: {field} = {value}"
            answer = await http.post(PATHS[route], json=body)
            assert answer.status_code == 200, f"{field} = {value}: {answer.text}"
            assert field not in answer.headers.get("X-Weir-Ignored-Fields", ""), f"{field} is ignored"


async def test_every_deviation_that_is_listed_is_one(http: httpx.AsyncClient) -> None:
    """By the package's types where these are as strict, so that the list does not outlive its reasons."""
    found = set()
    for form, route, fields in ANSWERED:
        answer = await http.post(PATHS[route], json=BASES[route] | fields)
        values = events_of(answer.text) if "stream" in fields else [answer.json()]
        if form == "completion chunk":  # on a busy machine a stream may be one chunk, its last
            values += [value | {"choices": [value["choices"][0] | {"finish_reason": None}]} for value in values[:1]]
        found |= {(form, where) for value in values for where in PackagedTypes().problems(FORMS.get(form, form), value)}
    assert ("completion chunk", "choices[].finish_reason") in found
