"""OpenAI's published specification: the types of its Python package, which OpenAI makes of it, and the document itself.

The document (openapi.json of https://github.com/openai/openai-openapi, MIT) has 3.4 MB and is not kept here: tests take
it from the file that `WEIR_OPENAI_SPECIFICATION` names.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import jsonschema
from openai.types import Completion, Model, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter

DOCUMENT_VARIABLE = "WEIR_OPENAI_SPECIFICATION"

# our name for it -> the package's type, the document's schema
_NAMES: Mapping[str, tuple[Any, str]] = {
    "chat": (ChatCompletion, "CreateChatCompletionResponse"),
    "chat chunk": (ChatCompletionChunk, "CreateChatCompletionStreamResponse"),
    "completion": (Completion, "CreateCompletionResponse"),
    "response": (Response, "Response"),
    "response event": (ResponseStreamEvent, "ResponseStreamEvent"),
    "model": (Model, "Model"),
    "chat request": (chat_create_params.CompletionCreateParams, "CreateChatCompletionRequest"),
    "completion request": (completion_create_params.CompletionCreateParams, "CreateCompletionRequest"),
    "response request": (response_create_params.ResponseCreateParams, "CreateResponse"),
}
# The package has a type of neither.
_BY_HAND: Mapping[str, tuple[dict[str, Any], str]] = {
    "models": (
        {
            "type": "object",
            "required": ["object", "data"],
            "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object"}}},
        },
        "ListModelsResponse",
    ),
    "error": (
        {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["type", "message", "param", "code"],
                    "properties": {
                        "type": {"type": "string"},
                        "message": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                }
            },
        },
        "ErrorResponse",
    ),
}


class Specification(Protocol):
    def problems(self, name: str, value: object) -> set[str]:
        """What is wrong with `value` as a `name`: paths in it, without indices."""
        ...


class PackagedTypes:
    """Those of the `openai` package that is installed."""

    def problems(self, name: str, value: object) -> set[str]:
        return _problems(_packaged_schema(name), value)


class PublishedDocument:
    def __init__(self, path: Path) -> None:
        self._components = _in_json_schema(json.loads(path.read_text())["components"])

    def problems(self, name: str, value: object) -> set[str]:
        component = (_NAMES.get(name) or _BY_HAND[name])[1]
        return _problems({**self._components["schemas"][component], "components": self._components}, value)


def _in_json_schema(value: Any) -> Any:
    """`nullable`, which the document still has from OpenAPI 3.0, as JSON Schema says it. And `oneOf` as `anyOf`: a
    plain message is of two of its forms of input."""
    if isinstance(value, list):
        return [_in_json_schema(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    plain = {"anyOf" if key == "oneOf" else key: _in_json_schema(entry) for key, entry in value.items()}
    return {"anyOf": [plain, {"type": "null"}]} if value.get("nullable") is True else plain


@cache
def _packaged_schema(name: str) -> dict[str, Any]:
    return _BY_HAND[name][0] if name in _BY_HAND else TypeAdapter(_NAMES[name][0]).json_schema()


def _problems(schema: Mapping[str, Any], value: object) -> set[str]:
    validator = jsonschema.Draft202012Validator(_member(schema, value))
    return {_path(found) for error in validator.iter_errors(value) for found in _leaves(error)}


def _leaves(error: jsonschema.ValidationError) -> list[jsonschema.ValidationError]:
    """Where none of several forms fits, what is wrong with the one that fits best."""
    best = jsonschema.exceptions.best_match([error])
    return [error if best is None else best]


def _path(error: jsonschema.ValidationError) -> str:
    parts = ["[]" if isinstance(part, int) else f".{part}" for part in error.absolute_path]
    missing = re.match(r"'(\w+)' is a required property", error.message)
    return "".join([*parts, f".{missing.group(1)}" if missing else ""]).removeprefix(".")


def _member(schema: Mapping[str, Any], value: object) -> Mapping[str, Any]:
    """Of a union of events the one of this type: an error is then of a field, and not of all of them."""
    kind = value.get("type") if isinstance(value, dict) else None
    roots = {key: schema[key] for key in ("$defs", "components") if key in schema}
    members = schema.get("anyOf", schema.get("oneOf", ()))
    for member in members if kind else ():
        found: Any = roots
        for part in member.get("$ref", "#").lstrip("#/").split("/"):
            found = found.get(part, {})
        allowed = found.get("properties", {}).get("type", {})
        if kind in (allowed.get("const"), *allowed.get("enum", ())):
            return {**found, **roots}
    return schema
