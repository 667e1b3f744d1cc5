"""The bodies of OpenAI's requests that Weir serves, read strictly. What it does not serve is refused by name.

A field that changes the answer and is not served must not be ignored: the client would take the answer for what it
asked for. Such a field is accepted only with the value that changes nothing.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.draft import Conversation, FieldNames, Operation, Prompt, RequestDraft, Text, TokenIds

_ModelT = TypeVar("_ModelT", bound="CommonBody")

_MAX_SHOWN_CHARS = 200
_MAX_INVALID_SHOWN = 16

# Values with which a field that is not served changes nothing.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
# Fields that never change the answer.
_IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"})


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, with the token counts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class CommonBody(BaseModel):
    """What both kinds of request have. `lane`, `ignore_eos`, `top_k`, `stop_token_ids`, `cache_salt` and `cache_prompt`
    are extensions (vLLM's and llama.cpp's names)."""

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
    top_k: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    lane: str | None = None
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


class Message(BaseModel):
    """One turn. `content` is a text, or a list of text parts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Any


class ChatBody(CommonBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None


def parse_body(body_type: type[_ModelT], raw: bytes) -> _ModelT:
    """Raises InvalidRequest with every field that is not what it must be."""
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidRequest(
            [FieldViolation(_path(entry["loc"]), _cut(entry["msg"])) for entry in found[:_MAX_INVALID_SHOWN]]
        ) from None


def completion_draft(body: CompletionBody, correlation_id: str) -> RequestDraft:
    """Raises InvalidRequest for what is not served."""
    violations = _unserved(body)
    prompt = _prompt_of(body.prompt, violations)
    return _draft(body, Operation.TEXT_COMPLETION, prompt, body.max_tokens, "max_tokens", correlation_id, violations)


def chat_draft(body: ChatBody, correlation_id: str) -> RequestDraft:
    """Raises InvalidRequest for what is not served."""
    violations = _unserved(body)
    turns = tuple(
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": _content_of(message.content, f"messages[{index}].content", violations),
        }
        for index, message in enumerate(body.messages)
    )
    is_new_name = body.max_completion_tokens is not None
    max_tokens, name = (
        (body.max_completion_tokens, "max_completion_tokens") if is_new_name else (body.max_tokens, "max_tokens")
    )
    return _draft(body, Operation.CHAT, Conversation(turns), max_tokens, name, correlation_id, violations)


def _draft(
    body: CommonBody,
    operation: Operation,
    prompt: Prompt,
    max_tokens: int | None,
    max_tokens_name: str,
    correlation_id: str,
    violations: list[FieldViolation],
) -> RequestDraft:
    stop = _stop_of(body.stop, violations)
    if violations:
        raise InvalidRequest(violations)
    return RequestDraft(
        operation=operation,
        prompt=prompt,
        names=_http_names(max_tokens_name),
        correlation_id=correlation_id,
        model=body.model or "",
        lane=body.lane or "",
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=body.seed,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        cache_salt=body.cache_salt or "",
        skips_prefix_cache=body.cache_prompt is False,
        is_stream=body.is_stream,
    )


def _http_names(max_tokens: str) -> FieldNames:
    return FieldNames(
        text="prompt",
        token_ids="prompt",
        request_id="X-Request-Id",
        model="model",
        lane="lane",
        temperature="temperature",
        top_k="top_k",
        top_p="top_p",
        seed="seed",
        max_tokens=max_tokens,
        stop="stop",
        stop_token_ids="stop_token_ids",
        cache_salt="cache_salt",
    )


def _unserved(body: CommonBody) -> list[FieldViolation]:
    violations = []
    if body.n not in (None, 1):
        violations.append(FieldViolation("n", f"is {body.n}; only 1 is served"))
    for name, value in (body.model_extra or {}).items():
        if value is None or name in _IGNORED:
            continue
        if name not in _HARMLESS:
            violations.append(FieldViolation(_cut(name), "is not a field of this request"))
        elif value not in _HARMLESS[name] or isinstance(value, bool) != isinstance(_HARMLESS[name][0], bool):
            violations.append(FieldViolation(name, "is not served; leave it out"))
    return violations


def _prompt_of(value: object, violations: list[FieldViolation]) -> Prompt:
    if isinstance(value, str):
        return Text(value)
    # type(), not isinstance: JSON's true is no token id
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return TokenIds(tuple(value))
    violations.append(FieldViolation("prompt", "must be one text, or one list of token ids"))
    return Text("")


def _content_of(value: object, field: str, violations: list[FieldViolation]) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(parts):
        violations.append(FieldViolation(field, "must be a text, or a list of parts of type text"))
    return "".join(strings)


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
