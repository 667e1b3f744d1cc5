"""Every field of every body takes values of each kind that JSON has, and those that the gateway's own document does not
allow are refused by name. What is tried is made of the document, so that a new field is tried too."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.world import World

import weir
from weir_gateway.frontends.openapi.document import OPERATIONS, ApiOperation, openapi_document

CHAT = [{"role": "user", "content": "x"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": ids_of("x")},
}
# One of each kind, and of those that hold others.
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    10**30,
    "",
    "x",
    [],
    [None],
    ["x", 5],
    [{}],
    [[]],
    {},
    {"5": "x"},
    {"type": {}},
)
MESSAGES: tuple[Any, ...] = (
    *({"role": value, "content": "x"} for value in VALUES),
    *({"role": "user", "content": value} for value in VALUES),
    *({"role": "user", "content": [{"type": "text", "text": value}]} for value in VALUES),
    *({"role": "user", "content": [{"type": value, "text": "x"}]} for value in VALUES),
    *VALUES,
)
LISTS_OF_MESSAGES = {"messages", "input"}
DOCUMENT = openapi_document(weir.__version__)
MAKES_SOMETHING = {"/v1/batches"}
"""By what is right a batch is made: its fields are tried in test_batches_api.py."""
WITH_BODY = [one for one in OPERATIONS if one.body is not None and one.path not in MAKES_SOMETHING]


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


def bodies(operation: ApiOperation) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, body): all else in a body is right."""
    assert operation.body is not None
    properties = DOCUMENT["components"]["schemas"][operation.body.__name__]["properties"]
    for field in properties:
        for value in VALUES:
            yield field, _with(operation, field, value)
        for message in MESSAGES if field in LISTS_OF_MESSAGES else ():
            yield field, _with(operation, field, [message])


def _with(operation: ApiOperation, field: str, value: object) -> dict[str, Any]:
    """What cannot come with it is left out."""
    is_other_form = (operation.path, field) == ("/tokenize", "messages") and value is not None
    others = {} if is_other_form else BASES[operation.path]
    return {**others, field: value}


def allows(operation: ApiOperation, body: dict[str, Any]) -> bool:
    assert operation.body is not None
    schema = {"$ref": f"#/components/schemas/{operation.body.__name__}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(body)


def names(answer: httpx.Response, field: str) -> bool:
    """Anthropic's errors have a message alone, which begins with the field; so do all others."""
    error = answer.json()["error"]
    wrong = error["message"] if "param" not in error else error["param"] or ""
    return bool(wrong.startswith(field)) and error["message"].startswith(field)


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.path)
async def test_a_value_of_another_kind_is_refused_by_the_fields_name(
    http: httpx.AsyncClient, operation: ApiOperation
) -> None:
    refused, wrong = set(), []
    for field, body in bodies(operation):
        answer = await http.post(operation.path, json=body)
        if answer.status_code in (400, 404) and names(answer, field):
            refused.add(field)
        elif answer.status_code != 200 or not allows(operation, body):
            wrong.append(f"{field}: {body[field]!r}: {answer.status_code} {answer.text[:200]}")
    assert wrong == []
    assert refused == {field for field, _ in bodies(operation)}, "each refuses something"
