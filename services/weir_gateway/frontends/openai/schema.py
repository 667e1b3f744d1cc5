"""The bodies of OpenAI's requests that Weir serves, read strictly. What it does not serve is refused by name
(`unknown_fields`, with the tables of `fields`)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.options import NUMBER_RULES, GenerateOptions, grpc_names
from weir_gateway.frontends.bodies.checks import MAX_ENTRIES, is_too_long, too_long
from weir_gateway.frontends.bodies.thinking import thinking_of_effort
from weir_gateway.frontends.bodies.unknown_fields import KnownFields, UnknownFields, check_undeclared
from weir_gateway.frontends.openai.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, IGNORED, REASONS
from weir_gateway.frontends.openai.messages import Message, conversation_of
from weir_gateway.frontends.openai.render import Rendering
from weir_gateway.frontends.openai.structured import grammar_of
from weir_gateway.frontends.openai.tool_fields import CHAT_TOOLS
from weir_gateway.json_sizes import try_find_size_problem
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
    "tools": "tools",
    "tool_schema": "function.parameters",
    "max_reasoning_tokens": "thinking_token_budget",
    "request_id": "X-Request-Id",
    "include_stop": "include_stop_str_in_output",
    "priority": "priority",
    "idempotency_key": "Idempotency-Key",
    "resume_from": "Last-Event-ID",
}
_MAX_TEMPLATE_VARIABLES_CHARS = 16_384
LEAST_SEED = -(2**63)
"""OpenAI's seeds have a sign; here they are the same 64 bits without one."""


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, with the token counts; `continuous_usage_stats`: in each chunk."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_ENTRIES)
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_ENTRIES)
    lane: str | None = None
    priority: int | None = None
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    expected_output_tokens: int | None = None
    deadline_ms: int | None = None
    partial_at_deadline: bool | None = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    parallel_tool_calls: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    @property
    def is_stream(self) -> bool:
        return bool(self.stream)


class CompletionBody(CommonBody):
    """`POST /v1/completions`. `prompt` is a text or a list of token ids, or a list of these."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(CommonBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(max_length=MAX_ENTRIES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """A body, understood. `ignored_fields`: their names, which the answer tells."""

    client_request: ClientRequest
    rendering: Rendering
    ignored_fields: tuple[str, ...] = ()


def parse_body(body_type: type[_ModelT], raw: bytes) -> _ModelT:
    """Raises InvalidRequest with every field that is not what it must be."""
    problem = try_find_size_problem(raw)
    if problem is not None:
        raise InvalidRequest([FieldViolation("body", problem)])
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise InvalidRequest(
            [FieldViolation(_path(entry["loc"]), _problem_of(entry)) for entry in found[:_MAX_INVALID_SHOWN]]
        ) from None


COMPLETION_FIELDS = KnownFields(frozenset(CompletionBody.model_fields), COMPLETION_NEUTRAL, REASONS, IGNORED)
CHAT_FIELDS = KnownFields(frozenset(ChatBody.model_fields), CHAT_NEUTRAL, REASONS, IGNORED)


def completion_request(body: CompletionBody, correlation_id: str, unknown_fields: UnknownFields) -> AskedAnswer:
    """Raises InvalidRequest for what is not served."""
    violations: list[FieldViolation] = []
    ignored = check_undeclared(body.model_extra, COMPLETION_FIELDS, unknown_fields, violations)
    prompts = _prompts_of(body.prompt, violations)
    _check_no_tools(body, violations)
    given = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
    rendering = _rendering_of(body, echoes=bool(body.echo), drops_output=bool(body.echo) and body.max_tokens == 0)
    if rendering.drops_output:
        given["max_tokens"] = 1  # which nobody sees: a step has at least one
    if rendering.echoes and body.logprobs is not None:
        given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        if body.is_stream:
            violations.append(FieldViolation("echo", "comes with logprobs in whole answers only; leave stream out"))
    asked = _client_request(body, Operation.TEXT_COMPLETION, prompts, given, HTTP_NAMES, correlation_id, violations)
    return AskedAnswer(asked, rendering, ignored)


def chat_request(body: ChatBody, correlation_id: str, unknown_fields: UnknownFields) -> AskedAnswer:
    """Raises InvalidRequest for what is not served."""
    violations: list[FieldViolation] = []
    ignored = check_undeclared(body.model_extra, CHAT_FIELDS, unknown_fields, violations)
    prompt = _conversation_of_chat(body, violations)
    if body.top_logprobs and not body.logprobs:
        violations.append(FieldViolation("top_logprobs", f"is {body.top_logprobs}; give logprobs: true with it"))
    names = {**HTTP_NAMES, "logprobs": "top_logprobs"}
    given = {"max_tokens": body.max_tokens, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.max_completion_tokens is not None:
        names["max_tokens"], given["max_tokens"] = "max_completion_tokens", body.max_completion_tokens
    asked = _client_request(body, Operation.CHAT, [prompt], given, names, correlation_id, violations)
    rendering = replace(_rendering_of(body), shows_reasoning=body.include_reasoning is not False)
    return AskedAnswer(asked, rendering, ignored)


def _rendering_of(body: CommonBody, *, echoes: bool = False, drops_output: bool = False) -> Rendering:
    stream = body.stream_options or StreamOptions()
    return Rendering(
        includes_usage=bool(stream.include_usage),
        has_continuous_usage=bool(stream.include_usage and stream.continuous_usage_stats),
        returns_token_ids=bool(body.return_token_ids),
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        echoes=echoes,
        drops_output=drops_output,
    )


def _client_request(
    body: CommonBody,
    operation: Operation,
    prompts: Sequence[Prompt],
    given: Mapping[str, int | None],
    names: FieldNames,
    correlation_id: str,
    violations: list[FieldViolation],
) -> ClientRequest:
    """`given`: the numbers that are not taken as they stand in the body; there is at least one prompt."""
    stop = _stop_of(body.stop, violations)
    logit_bias = _logit_bias_of(body.logit_bias or {}, violations)
    grammar, grammar_field = grammar_of(body.response_format, body.structured_outputs, violations)
    if body.prompt_logprobs is not None and body.is_stream:
        violations.append(FieldViolation("prompt_logprobs", "comes with whole answers only; leave stream out"))
    if violations:
        raise InvalidRequest(violations)
    shared = [rule.name for rule in NUMBER_RULES if rule.name not in (*given, "resume_from")]
    numbers: dict[str, Any] = {name: getattr(body, name) for name in shared} | dict(given)
    if body.seed is not None and LEAST_SEED <= body.seed < 0:
        numbers["seed"] = body.seed + 2**64
    return ClientRequest(
        operation=operation,
        prompt=prompts[0],
        more_prompts=tuple(prompts[1:]),
        names={**names, "grammar": grammar_field},
        options=GenerateOptions(
            model=body.model or "",
            lane=body.lane or "",
            logit_bias=logit_bias,
            grammar=grammar,
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


def _is_longer(value: object, max_chars: int) -> bool:
    """Than so many characters of JSON, of which no more are made."""
    num_chars = 0
    for part in json.JSONEncoder().iterencode(value):
        num_chars += len(part)
        if num_chars > max_chars:
            return True
    return False


def token_ids_of(value: object) -> tuple[int, ...] | None:
    """None: it is no list of whole numbers."""
    # type(), not isinstance: JSON's true is no token id
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return tuple(value)
    return None


def _prompts_of(value: object, violations: list[FieldViolation]) -> Sequence[Prompt]:
    """At least one."""
    single = _try_prompt_of(value)
    if single is not None:
        return [single]
    entries = value if isinstance(value, list) else []
    if is_too_long(entries, "prompt", violations):
        return [Text("")]
    prompts = [_try_prompt_of(entry) for entry in entries]
    found = [prompt for prompt in prompts if prompt is not None]
    if entries and len(found) == len(entries):
        return found
    if any(isinstance(entry, str | list) for entry in entries):
        problem = "must be a text, or a list of token ids"
        violations.append(FieldViolation(f"prompt[{prompts.index(None)}]", problem))
    else:
        problem = "must be a text, a list of token ids, or a list of texts or of such lists"
        violations.append(FieldViolation("prompt", problem))
    return [Text("")]


def _try_prompt_of(value: object) -> Text | TokenIds | None:
    """Of an empty list the checks say that it is no prompt."""
    if isinstance(value, str):
        return Text(value)
    token_ids = token_ids_of(value)
    return None if token_ids is None else TokenIds(token_ids)


def _conversation_of_chat(body: ChatBody, violations: list[FieldViolation]) -> Conversation:
    variables = body.chat_template_kwargs or {}
    if _is_longer(variables, _MAX_TEMPLATE_VARIABLES_CHARS):
        limit = f"is larger than {_MAX_TEMPLATE_VARIABLES_CHARS} characters of JSON"
        violations.append(FieldViolation("chat_template_kwargs", limit))
    if body.continue_final_message and body.add_generation_prompt:
        problem = "comes with add_generation_prompt: the last message goes on, or a new one begins; give one of them"
        violations.append(FieldViolation("continue_final_message", problem))
    instead = "leave it out, or give thinking_token_budget"
    thinking = thinking_of_effort(
        body.reasoning_effort, body.thinking_token_budget, "reasoning_effort", instead, violations
    )
    conversation = replace(
        conversation_of(body.messages, violations),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        template_variables=variables,
        tools=CHAT_TOOLS.tool_use_of(body.tools, body.tool_choice, body.parallel_tool_calls, violations),
    )
    return thinking.within(conversation)


def _check_no_tools(body: CompletionBody, violations: list[FieldViolation]) -> None:
    """With `none` a model is not to call any, which no completion does."""
    for name, changes_nothing in (
        ("tools", not body.tools or body.tool_choice == "none"),
        ("tool_choice", body.tool_choice in (None, "none", "auto")),
    ):
        if not changes_nothing:
            violations.append(FieldViolation(name, "is of chats: a completion has no tools; leave it out"))


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


def _problem_of(entry: ErrorDetails) -> str:
    if entry["type"] == "too_long":
        return too_long(entry["ctx"]["actual_length"])
    return _cut(entry["msg"])


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return _cut(path) or "body"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"
