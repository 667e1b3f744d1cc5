"""The document of the HTTP port: it names every route and no other, and what is answered is as it says."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.world import World, open_world, with_batches

import weir
from weir.core.options import NUMBER_RULES
from weir_gateway.frontends.http_frontend import HttpFrontend
from weir_gateway.frontends.http_server import HttpSettings
from weir_gateway.frontends.openai.schema import LEAST_SEED
from weir_gateway.frontends.openapi import handlers
from weir_gateway.frontends.openapi.document import OPERATIONS, openapi_document
from weir_gateway.frontends.openapi.page import openapi_page

CHAT = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": ["ab", "c"], "logprobs": 1, "echo": True, "max_tokens": 0},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "x", "return_token_strs": True},
    "/detokenize": {"tokens": ids_of("x")},
}
NEED_A_FILE = {("POST", "/v1/files"), ("POST", "/v1/batches")}
NOT_DESCRIBED = {"/openapi.json", "/docs"}


@pytest.fixture
def document() -> dict[str, Any]:
    return openapi_document(weir.__version__)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(with_batches(tmp_path)) as world:
        yield world


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def check(document: dict[str, Any], name: str, value: object) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_every_route_is_described_and_nothing_else(world: World) -> None:
    app = HttpFrontend(world.gateway.processor, HttpSettings(), lambda: True, world.bodies).make_app(
        console=world.gateway.console
    )
    routes = {
        (method, re.sub(r"\{[^}]*\}", "{}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
        if route.path not in NOT_DESCRIBED and not route.path.startswith("/console")
    }
    assert {(one.method, re.sub(r"\{[^}]*\}", "{}", one.path)) for one in OPERATIONS} == routes


async def test_it_is_served_without_a_key_and_has_no_reference_to_nowhere(http: httpx.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    references = set(re.findall(r'"#/components/schemas/(\w+)"', answer.text))
    assert references <= answer.json()["components"]["schemas"].keys()
    assert len({json.dumps(one) for one in answer.json()["paths"]}) == len(answer.json()["paths"])


async def test_it_is_rendered_once_however_many_ask_at_once(
    http: httpx.AsyncClient, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[str] = []

    def counted(version: str) -> dict[str, Any]:
        versions.append(version)
        return document

    monkeypatch.setattr(handlers, "openapi_document", counted)
    answers = await asyncio.gather(*(http.get("/openapi.json") for _ in range(3)), http.get("/docs"))
    answers.append(await http.get("/openapi.json"))
    assert versions == [weir.__version__]
    described = [answer for answer in answers if answer.headers["content-type"] == "application/json"]
    assert [answer.json() for answer in described] == [document] * 4


def test_numbers_have_the_ranges_that_are_checked(document: dict[str, Any]) -> None:
    properties = document["components"]["schemas"]["ChatBody"]["properties"]
    for rule in NUMBER_RULES:
        lowest = LEAST_SEED if rule.name == "seed" else rule.lowest  # OpenAI's seeds have a sign
        kinds = [one for one in properties.get(rule.name, {}).get("anyOf", []) if one["type"] in ("integer", "number")]
        for kind in kinds:
            assert (kind["minimum"], kind.get("maximum")) == (lowest, rule.highest), rule.name


@pytest.mark.parametrize(
    "operation",
    [one for one in OPERATIONS if one.answer and not one.parameters and (one.method, one.path) not in NEED_A_FILE],
    ids=str,
)
async def test_what_is_answered_is_as_described(
    http: httpx.AsyncClient, document: dict[str, Any], operation: Any
) -> None:
    body = BODIES.get(operation.path)
    if body is not None:
        check(document, operation.body.__name__, body)
    answer = await http.request(operation.method, operation.path, json=body)
    assert answer.status_code == 200, answer.text
    check(document, operation.answer, answer.json())


async def test_a_file_and_a_batch_of_it_are_as_described(http: httpx.AsyncClient, document: dict[str, Any]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
    form: Any = {"files": {"file": ("in.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    kept = await http.post("/v1/files", **form)
    assert kept.status_code == 200, kept.text
    check(document, "File", kept.json())
    body = {"input_file_id": kept.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    check(document, "BatchBody", body)
    made = await http.post("/v1/batches", json=body)
    assert made.status_code == 200, made.text
    check(document, "Batch", made.json())


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.body], ids=str)
async def test_an_error_is_as_described(http: httpx.AsyncClient, document: dict[str, Any], operation: Any) -> None:
    answer = await http.post(operation.path, content=b"{")
    schema = operation_schema(document, operation, answer.status_code)
    check(document, schema, answer.json())
    assert schema == ("AnthropicError" if operation.is_anthropic else "Error")


def operation_schema(document: dict[str, Any], operation: Any, status: int) -> str:
    described = document["paths"][operation.path][operation.method.lower()]["responses"][str(status)]
    return str(described["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1])


async def test_people_get_a_page_that_loads_nothing(http: httpx.AsyncClient, document: dict[str, Any]) -> None:
    answer = await http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<script|src=|https?://", answer.text)
    for operation in OPERATIONS:
        assert f"{operation.method} {operation.path}" in answer.text
    assert "<td><code>temperature</code></td><td>number, from 0 to 2</td>" in answer.text


def test_what_the_page_shows_is_escaped(document: dict[str, Any]) -> None:
    document["info"]["summary"] = "<script>"
    assert "<script>" not in openapi_page(document)
