"""The OpenAPI 3.1 document of the HTTP port."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from weir.core.options import NUMBER_RULES, NumberRule
from weir.rpc.access import Callers
from weir.telemetry.request_record import RequestList, RequestRecord
from weir.telemetry.stack_snapshot import StackSnapshot
from weir_gateway.frontends.anthropic.schema import CountTokensBody, MessagesBody
from weir_gateway.frontends.batches.handlers import BatchBody
from weir_gateway.frontends.console.api import StackPages, StackSteps
from weir_gateway.frontends.http_access import http_callers_of
from weir_gateway.frontends.openai.schema import LEAST_SEED, ChatBody, CompletionBody
from weir_gateway.frontends.openapi.answers import ANSWERS, Schema
from weir_gateway.frontends.responses.schema import ResponsesBody
from weir_gateway.frontends.tools_schema import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{model}"
_NO_ANSWER = ""
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]}
_TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16}
_PARTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_SIGNED_SEED: Schema = {"anyOf": [{"type": "integer", "minimum": LEAST_SEED, "maximum": 2**64 - 1}, {"type": "null"}]}
# Of fields that are read by more than their type.
_SHAPES: Mapping[tuple[str, str], Schema] = {
    ("CompletionBody", "prompt"): {"anyOf": [*_PROMPT["anyOf"], {"type": "array", "items": _PROMPT, "minItems": 1}]},
    ("CompletionBody", "max_tokens"): {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
    ("CompletionBody", "stop"): {"anyOf": [_TEXTS["items"], _TEXTS, {"type": "null"}]},
    ("CompletionBody", "seed"): _SIGNED_SEED,
    ("ChatBody", "seed"): _SIGNED_SEED,
    ("ChatBody", "stop"): {"anyOf": [_TEXTS["items"], _TEXTS, {"type": "null"}]},
    ("Message", "content"): {"anyOf": [{"type": "string"}, _PARTS]},
    ("TokenizeBody", "prompt"): {"type": ["string", "null"]},
    ("DetokenizeBody", "tokens"): {**_TOKEN_IDS, "minItems": 0},
}
_ERRORS = (400, 401, 403, 404, 409, 413, 429, 499, 500, 503, 504)
_ANTHROPIC_ERRORS = (400, 401, 403, 404, 409, 413, 429, 499, 500, 503, 504, 529)


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One method of one path. `answer`: the schema of what comes with 200."""

    method: str
    path: str
    summary: str
    answer: str = _NO_ANSWER
    body: type[BaseModel] | None = None
    streams: bool = False
    parameters: tuple[str, ...] = ()

    @property
    def callers(self) -> Callers | None:
        """Who may call it."""
        return http_callers_of(self.method, self.path)

    @property
    def is_open(self) -> bool:
        """Without a key."""
        return self.callers is Callers.OPEN

    @property
    def is_anthropic(self) -> bool:
        return self.path.startswith("/v1/messages")


_RECORDS = (RequestList, RequestRecord, StackSnapshot, StackSteps, StackPages)

OPERATIONS = (
    ApiOperation("POST", "/v1/chat/completions", "Answers a conversation", "ChatCompletion", ChatBody, streams=True),
    ApiOperation("POST", "/v1/completions", "Goes on with one prompt, or several", "Completion", CompletionBody, True),
    ApiOperation("POST", "/v1/responses", "Answers, in OpenAI's newer form", "Response", ResponsesBody, streams=True),
    ApiOperation("GET", "/v1/responses/{id}", "An answer that was stored", "Response", parameters=("id",)),
    ApiOperation("DELETE", "/v1/responses/{id}", "Forgets it", "ResponseDeleted", parameters=("id",)),
    ApiOperation("POST", "/v1/messages", "Answers, in Anthropic's form", "AnthropicMessage", MessagesBody, True),
    ApiOperation("POST", "/v1/messages/count_tokens", "Tokens of such a prompt", "InputTokens", CountTokensBody),
    ApiOperation("POST", "/v1/files", "Keeps a file of JSON lines, sent as a form", "File"),
    ApiOperation("GET", "/v1/files", "The caller's files", "FileList"),
    ApiOperation("GET", "/v1/files/{id}", "One of them", "File", parameters=("id",)),
    ApiOperation("GET", "/v1/files/{id}/content", "Its bytes", parameters=("id",)),
    ApiOperation("DELETE", "/v1/files/{id}", "Forgets it", "ResponseDeleted", parameters=("id",)),
    ApiOperation("POST", "/v1/batches", "Answers every line of a file, in time", "Batch", BatchBody),
    ApiOperation("GET", "/v1/batches", "The caller's batches", "BatchList"),
    ApiOperation("GET", "/v1/batches/{id}", "One of them: how far it is", "Batch", parameters=("id",)),
    ApiOperation("POST", "/v1/batches/{id}/cancel", "Ends it with what is answered", "Batch", parameters=("id",)),
    ApiOperation("GET", "/v1/models", "The models served now", "ModelList"),
    ApiOperation("GET", "/v1/models/{model}", "One of them", "Model", parameters=("model",)),
    ApiOperation("POST", "/tokenize", "Tokens of a text or a conversation", "Tokens", TokenizeBody),
    ApiOperation("POST", "/detokenize", "The text of tokens", "TokenText", DetokenizeBody),
    ApiOperation("GET", "/version", "Weir's version", "Version"),
    ApiOperation("GET", "/load", "Requests served now", "Load"),
    ApiOperation("GET", "/debug/requests", "Requests that it remembers; for operators", "RequestList"),
    ApiOperation("GET", "/debug/requests/{id}", "One of them, its phases", "RequestRecord", parameters=("id",)),
    ApiOperation("GET", "/debug/stack", "The whole stack now; for operators", "StackSnapshot"),
    ApiOperation("GET", "/debug/stack/events", "The same every second", streams=True),
    ApiOperation("GET", "/debug/steps", "The last steps of each worker; for operators", "StackSteps"),
    ApiOperation("GET", "/debug/pages", "The page map of each arena; for operators", "StackPages"),
    ApiOperation("GET", "/health", "Whether it serves", "Health"),
    ApiOperation("GET", "/ping", "The same, without a body"),
    ApiOperation("POST", "/ping", "The same, without a body"),
)


def openapi_document(version: str) -> dict[str, Any]:
    """For programs: what can be asked, with ranges, and what comes back."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, made = models_json_schema([(body, "validation") for body in dict.fromkeys(bodies)], ref_template=_REF)
    _, records = TypeAdapter.json_schemas(
        [(model, "serialization", TypeAdapter(model)) for model in _RECORDS], ref_template=_REF
    )
    schemas: dict[str, Schema] = {**made["$defs"], **records["$defs"], **ANSWERS}
    for body in bodies:
        if body is not CountTokensBody:  # of an answer's options the count of its prompt reads the types alone
            _add_ranges(schemas[body.__name__])
    for (name, field), shape in _SHAPES.items():
        schemas[name]["properties"][field] = shape
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation_of(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weir", "version": version, "summary": "Serves large language models"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _operation_of(operation: ApiOperation) -> dict[str, Any]:
    words = operation.path.strip("/").replace("{", "").replace("}", "").replace("/", "_")
    found: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}_{words}",
        "summary": operation.summary,
        "responses": _responses_of(operation),
        # where no keys are in force none is needed
        "security": [] if operation.is_open else [{}, {"bearer": []}, {"key": []}],
    }
    if operation.parameters:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in operation.parameters
        ]
    if operation.body is not None:
        content = {"application/json": {"schema": _ref(operation.body.__name__)}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _responses_of(operation: ApiOperation) -> dict[str, Any]:
    answered: dict[str, Any] = {"description": operation.summary}
    if operation.answer:
        answered["content"] = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.streams:
        answered.setdefault("content", {})["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {"200": answered}
    if operation.is_open:
        unready = {"description": "It does not serve yet, or no more"}
        return {**responses, "503": unready | ({"content": answered["content"]} if operation.answer else {})}
    error, statuses = ("AnthropicError", _ANTHROPIC_ERRORS) if operation.is_anthropic else ("Error", _ERRORS)
    content = {"application/json": {"schema": _ref(error)}}
    return responses | {str(status): {"description": "An error", "content": content} for status in statuses}


def _add_ranges(schema: Schema) -> None:
    """Those of `core.options`, which the models leave to the checks that know the model."""
    properties: Mapping[str, Schema] = schema["properties"]
    for rule in NUMBER_RULES:
        entry = properties.get(rule.name)
        numbers = [entry, *entry.get("anyOf", ())] if entry else []
        for number in numbers:
            if number.get("type") in ("integer", "number"):
                number.update(_range_of(rule))


def _range_of(rule: NumberRule) -> Schema:
    return {"minimum": rule.lowest} | ({} if rule.highest is None else {"maximum": rule.highest})


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(model=name)}
