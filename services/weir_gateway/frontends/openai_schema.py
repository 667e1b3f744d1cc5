"""The bodies of OpenAI's requests that Weir serves, read strictly. What it does not serve is refused by name.

A field that changes the answer and is not served must not be ignored: the client would take the answer for what it
asked for. Such a field is accepted only with the value that changes nothing.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.options import NUMBER_RULES, GenerateOptions, grpc_names
from weir_gateway.requests.client_request import (
    ClientRequest,
    Conversation,
    FieldNames,
    Operation,
    Prompt,
    Text,
    TokenIds,
)

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling each: of two biases of a token one would be lost
_ModelT = TypeVar("_ModelT", bound=BaseModel)

_MAX_SHOWN_CHARS = 200
_MAX_INVALID_SHOWN = 16

# The option's own name, but for these.
HTTP_NAMES: FieldNames = {name: name for name in grpc_names()} | {
    "text": "prompt",
    "token_ids": "prompt",
    "messages": "messages",
    "request_id": "X-Request-Id",
    "include_stop": "include_stop_str_in_output",
    "priority": "priority",
    "idempotency_key": "Idempotency-Key",
    "resume_from": "Last-Event-ID",
}
# Values with which a field that is not served changes nothing.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
# Fields that never change the answer.
_IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"})


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, with the token counts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class CommonBody(BaseModel):
    """What both kinds of request have: OpenAI's fields, vLLM's and llama.cpp's, and Weir's own."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Any = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    lane: str | None = None
    priority: int | None = None
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    expected_output_tokens: int | None = None
    deadline_ms: int | None = None
    partial_at_deadline: bool | None = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None

    @property
    def is_stream(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(CommonBody):
    """`POST /v1/completions`. `prompt` is a text or a list of token ids."""

    prompt: Any
    logprobs: int | None = None


class Message(BaseModel):
    """One turn. `content` is a text, or a list of text parts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Any


class ChatBody(CommonBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def parse_body(body_type: type[_ModelT], raw: bytes) -> _ModelT:
    """Raises InvalidRequest with every field that is not what it must be."""
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidRequest(
            [FieldViolation(_path(entry["loc"]), _cut(entry["msg"])) for entry in found[:_MAX_INVALID_SHOWN]]
        ) from None


def completion_request(body: CompletionBody, correlation_id: str) -> ClientRequest:
    """Raises InvalidRequest for what is not served."""
    violations = unserved(body.model_extra, _HARMLESS)
    prompt = _prompt_of(body.prompt, violations)
    given = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
    return _client_request(body, Operation.TEXT_COMPLETION, prompt, given, HTTP_NAMES, correlation_id, violations)


def chat_request(body: ChatBody, correlation_id: str) -> ClientRequest:
    """Raises InvalidRequest for what is not served."""
    violations = unserved(body.model_extra, _HARMLESS)
    prompt = conversation_of(body.messages, violations)
    if body.top_logprobs and not body.logprobs:
        violations.append(FieldViolation("top_logprobs", f"is {body.top_logprobs}; give logprobs: true with it"))
    names = {**HTTP_NAMES, "logprobs": "top_logprobs"}
    given = {"max_tokens": body.max_tokens, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.max_completion_tokens is not None:
        names["max_tokens"], given["max_tokens"] = "max_completion_tokens", body.max_completion_tokens
    return _client_request(body, Operation.CHAT, prompt, given, names, correlation_id, violations)


def _client_request(
    body: CommonBody,
    operation: Operation,
    prompt: Prompt,
    given: Mapping[str, int | None],
    names: FieldNames,
    correlation_id: str,
    violations: list[FieldViolation],
) -> ClientRequest:
    """`given`: the numbers whose fields are not the same in both kinds of request."""
    stop = _stop_of(body.stop, violations)
    logit_bias = _logit_bias_of(body.logit_bias or {}, violations)
    if body.prompt_logprobs is not None and body.is_stream:
        violations.append(FieldViolation("prompt_logprobs", "comes with whole answers only; leave stream out"))
    if violations:
        raise InvalidRequest(violations)
    shared = [rule.name for rule in NUMBER_RULES if rule.name not in (*given, "resume_from")]
    numbers: dict[str, Any] = {name: getattr(body, name) for name in shared} | dict(given)
    return ClientRequest(
        operation=operation,
        prompt=prompt,
        names=names,
        options=GenerateOptions(
            model=body.model or "",
            lane=body.lane or "",
            logit_bias=logit_bias,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            cache_salt=body.cache_salt or "",
            skips_prefix_cache=body.cache_prompt is False,
            partial_at_deadline=bool(body.partial_at_deadline),
            **numbers,
        ),
        correlation_id=correlation_id,
        is_stream=body.is_stream,
        priority=body.priority,
    )


def unserved(extra: Mapping[str, Any] | None, harmless: Mapping[str, tuple[Any, ...]]) -> list[FieldViolation]:
    """Of fields that a body does not declare. `harmless`: the values with which those that are known change nothing."""
    violations = []
    for name, value in (extra or {}).items():
        if value is None or name in _IGNORED:
            continue
        if name not in harmless:
            violations.append(FieldViolation(_cut(name), "is not a field of this request"))
        elif value not in harmless[name] or isinstance(value, bool) != isinstance(harmless[name][0], bool):
            violations.append(FieldViolation(name, "is not served; leave it out"))
    return violations


def conversation_of(messages: Sequence[Message], violations: list[FieldViolation]) -> Conversation:
    """Adds to `violations` what has content that is no text."""
    turns = tuple(
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": _content_of(message.content, f"messages[{index}].content", violations),
        }
        for index, message in enumerate(messages)
    )
    return Conversation(turns)


def token_ids_of(value: object) -> tuple[int, ...] | None:
    """None: it is no list of whole numbers."""
    # type(), not isinstance: JSON's true is no token id
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return tuple(value)
    return None


def _prompt_of(value: object, violations: list[FieldViolation]) -> Prompt:
    if isinstance(value, str):
        return Text(value)
    token_ids = token_ids_of(value)
    if token_ids is not None:
        return TokenIds(token_ids)
    violations.append(FieldViolation("prompt", "must be one text, or one list of token ids"))
    return Text("")


def _content_of(value: object, field: str, violations: list[FieldViolation]) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(parts):
        violations.append(FieldViolation(field, "must be a text, or a list of parts of type text"))
    return "".join(strings)


def _logit_bias_of(biases: Mapping[str, float], violations: list[FieldViolation]) -> tuple[tuple[int, float], ...]:
    """JSON has texts for keys."""
    wrong = next((key for key in biases if not _TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        violations.append(FieldViolation("logit_bias", f"{_cut(wrong)!r} is no token id"))
        return ()
    return tuple(sorted((int(key), bias) for key, bias in biases.items()))


def _stop_of(value: object, violations: list[FieldViolation]) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    strings = tuple(stop for stop in stops if isinstance(stop, str))
    if len(strings) != len(stops):
        violations.append(FieldViolation("stop", "must be a text, or a list of texts"))
    return strings


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return _cut(path) or "body"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"
