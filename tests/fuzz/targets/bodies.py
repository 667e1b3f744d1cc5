"""Bodies of HTTP requests of all APIs, and lines of batches: read, or refused by named fields."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.fuzz.choices import Choices, edited, mutated_json
from tests.fuzz.target import Target, simple
from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway import json_sizes
from weir_gateway.batches.lines import BadLine, BatchLine, LineBounds, TooManyLines, read_lines
from weir_gateway.frontends.anthropic.schema import CountTokensBody, MessagesBody, count_request, messages_request
from weir_gateway.frontends.openai.schema import ChatBody, CompletionBody, chat_request, completion_request, parse_body
from weir_gateway.frontends.responses.schema import ResponsesBody, asked_response
from weir_gateway.json_sizes import try_find_size_problem

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_FUNCTION = {"name": "get", "description": "d", "parameters": _SCHEMA, "strict": True}
_CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a": "b"}'}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "get"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    "chat_template_kwargs": {"a": [1]},
    "logit_bias": {"5": 1.5},
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 5,
    "seed": 3,
    "thinking_token_budget": 5,
    "structured_outputs": {"regex": "a+"},
}
COMPLETION: dict[str, Any] = {
    "prompt": ["x", [1, 2]],
    "max_tokens": 3,
    "temperature": 0.5,
    "n": 2,
    "logprobs": 3,
    "stop_token_ids": [1],
    "structured_outputs": {"choice": ["a", "b"]},
    "echo": True,
    "prompt_logprobs": 2,
    "guided_json": _SCHEMA,
}
RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    ],
    "instructions": "i",
    "tools": [{"type": "function", **_FUNCTION}],
    "tool_choice": "required",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "medium"},
    "metadata": {"a": "b"},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 4,
    "store": True,
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 4,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "get", "input": {"a": "b"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [], "is_error": False}]},
    ],
    "tools": [{"name": "get", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "get", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "stop_sequences": ["x"],
}
_LONGEST_BODY_BYTES = 8 << 20
"""Longer ones are refused before anybody counts what they have."""
_READERS: tuple[tuple[Mapping[str, Any], Callable[[bytes], object]], ...] = (
    (CHAT, lambda raw: chat_request(parse_body(ChatBody, raw), "id", "ignore")),
    (COMPLETION, lambda raw: completion_request(parse_body(CompletionBody, raw), "id", "refuse")),
    (RESPONSE, lambda raw: asked_response(parse_body(ResponsesBody, raw), "ignore").client_request((), "id")),
    (MESSAGES, lambda raw: messages_request(parse_body(MessagesBody, raw), "id", "ignore")),
    (MESSAGES, lambda raw: count_request(parse_body(CountTokensBody, raw), "refuse")),
)


def check_body(data: bytes) -> None:
    choices = Choices(data)
    valid, read = choices.pick(_READERS)
    kept = {name: value for name, value in valid.items() if choices.byte() % 3}
    raw = mutated_json(choices, kept) if choices.byte() % 8 else edited(choices, json.dumps(valid).encode())
    for violation in _violations(read, raw):
        assert 0 < len(violation.field) <= 300, "a field that is not named"
        assert len(violation.description) <= 2000, "as long as what was sent"


def _violations(read: Callable[[bytes], object], raw: bytes) -> Sequence[FieldViolation]:
    try:
        read(raw)
    except InvalidRequest as refusal:
        return refusal.violations or [FieldViolation("", "")]
    return ()


def check_sizes(data: bytes) -> None:
    """Whatever JSON has is counted, at least as often as Python finds it."""
    choices = Choices(data)
    raw = edited(choices, json.dumps(choices.value(4)).encode()) if choices.byte() % 2 else choices.rest()
    num = 1 + json_sizes.MAX_VALUES // 64 if choices.byte() == 1 else 3
    repeated = b"[" + b",".join([raw] * min(num, 1 + _LONGEST_BODY_BYTES // (len(raw) + 1))) + b"]"
    try_find_size_problem(repeated)


def check_lines(data: bytes) -> None:
    choices = Choices(data)
    valid = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    lines = [mutated_json(choices, valid) if choices.byte() % 4 else choices.some_bytes(40) for _ in range(4)]
    raw = b"\n".join(lines)
    size = choices.below(64) + 1
    parts = [raw[start : start + size] for start in range(0, len(raw), size)]
    bounds = LineBounds(max_lines=8, max_line_bytes=2000)
    found = list(read_lines(parts, "/v1/completions", bounds))
    assert found == list(read_lines([raw], "/v1/completions", bounds)), "cuts change the lines"
    for line in found:
        assert isinstance(line, BatchLine | BadLine)
        assert isinstance(line, BatchLine) or len(line.message) < 1000
        json.dumps(line.custom_id).encode()


TARGETS = (
    Target("bodies", simple(check_body), (), max_bytes=256, ci_examples=400),
    Target("body_sizes", simple(check_sizes), (), max_bytes=512),
    Target("batch_lines", simple(check_lines), (TooManyLines,), max_bytes=512, ci_examples=100),
)
