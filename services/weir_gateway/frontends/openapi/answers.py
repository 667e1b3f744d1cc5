"""JSON schemas of what the HTTP surface answers. Clients may rely on what is `required`; more may come beside it."""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}


def _object(properties: Mapping[str, Schema], optional: Sequence[str] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _constant(value: str) -> Schema:
    return {"type": "string", "const": value}


def _of(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    },
    optional=["completion_tokens_details"],
)
_FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls", None]}
_TOOL_CALL = _object(
    {"id": _TEXT, "type": _constant("function"), "function": _object({"name": _TEXT, "arguments": _TEXT})}
)
_CHAT_LOGPROB = _object(
    {
        "token": _TEXT,
        "logprob": {"type": "number"},
        "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255}),
        "top_logprobs": _list({"type": "object"}),
    }
)
_CHAT_CHOICE = _object(
    {
        "index": _COUNT,
        "message": _object(
            {
                "role": _constant("assistant"),
                "content": _TEXT_OR_NULL,
                "reasoning_content": _TEXT,
                "tool_calls": _list(_TOOL_CALL),
                "refusal": {"type": "null"},
            },
            optional=["reasoning_content", "tool_calls"],
        ),
        "logprobs": {"anyOf": [_object({"content": _list(_CHAT_LOGPROB)}), {"type": "null"}]},
        "finish_reason": _FINISH_REASON,
    }
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list({"type": ["number", "null"]}),
        "top_logprobs": _list({"type": ["object", "null"]}),
        "text_offset": _list(_COUNT),
    }
)
_COMPLETION_CHOICE = _object(
    {
        "index": _COUNT,
        "text": _TEXT,
        "logprobs": {"anyOf": [_COMPLETION_LOGPROBS, {"type": "null"}]},
        "finish_reason": _FINISH_REASON,
    }
)


def _answer(kind: str, choice: Schema) -> Schema:
    head = {"id": _TEXT, "object": _constant(kind), "created": _COUNT, "model": _TEXT}
    answer = {**head, "system_fingerprint": _TEXT, "choices": {**_list(choice), "minItems": 1}, "usage": _of("Usage")}
    return _object(answer, optional=["system_fingerprint"])


_MESSAGE_ITEM = _object({"id": _TEXT, "type": _constant("message"), "content": _list({"type": "object"})})
_CALL_ITEM = _object(
    {"id": _TEXT, "type": _constant("function_call"), "call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}
)
_REASONING_ITEM = _object({"id": _TEXT, "type": _constant("reasoning"), "content": _list({"type": "object"})})
_THINKING_BLOCK = _object({"type": _constant("thinking"), "thinking": _TEXT, "signature": _TEXT})
_TEXT_BLOCK = _object({"type": _constant("text"), "text": _TEXT})
_CALL_BLOCK = _object({"type": _constant("tool_use"), "id": _TEXT, "name": _TEXT, "input": {"type": "object"}})


ANSWERS: Mapping[str, Schema] = {
    "Usage": _USAGE,
    "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE),
    "Completion": _answer("text_completion", _COMPLETION_CHOICE),
    "Response": _object(
        {
            "id": _TEXT,
            "object": _constant("response"),
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _TEXT,
            "output": _list({"anyOf": [_MESSAGE_ITEM, _CALL_ITEM, _REASONING_ITEM]}),
            "parallel_tool_calls": {"type": "boolean"},
            "tool_choice": {},
            "tools": _list({"type": "object"}),
            "usage": {"type": "object"},
        }
    ),
    "ResponseDeleted": _object({"id": _TEXT, "object": _TEXT, "deleted": {"type": "boolean"}}),
    "File": _object(
        {
            "id": _TEXT,
            "object": _constant("file"),
            "bytes": _COUNT,
            "created_at": _COUNT,
            "expires_at": {"type": ["integer", "null"]},
            "filename": _TEXT,
            "purpose": _TEXT,
            "status": _TEXT,
        }
    ),
    "FileList": _object({"object": _constant("list"), "data": _list(_of("File")), "has_more": {"type": "boolean"}}),
    "Batch": _object(
        {
            "id": _TEXT,
            "object": _constant("batch"),
            "endpoint": _TEXT,
            "input_file_id": _TEXT,
            "completion_window": _TEXT,
            "status": {"enum": ["in_progress", "cancelling", "completed", "expired", "cancelled", "failed"]},
            "output_file_id": _TEXT_OR_NULL,
            "error_file_id": _TEXT_OR_NULL,
            "created_at": _COUNT,
            "expires_at": _COUNT,
            "request_counts": _object({"total": _COUNT, "completed": _COUNT, "failed": _COUNT}),
        }
    ),
    "BatchList": _object({"object": _constant("list"), "data": _list(_of("Batch")), "has_more": {"type": "boolean"}}),
    "AnthropicMessage": _object(
        {
            "id": _TEXT,
            "type": _constant("message"),
            "role": _constant("assistant"),
            "model": _TEXT,
            "content": _list({"anyOf": [_TEXT_BLOCK, _CALL_BLOCK, _THINKING_BLOCK]}),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _TEXT_OR_NULL,
            "usage": {"type": "object"},
        }
    ),
    "InputTokens": _object({"input_tokens": _COUNT}),
    "Model": _object(
        {
            "id": _TEXT,
            "object": _constant("model"),
            "created": _COUNT,
            "owned_by": _TEXT,
            "root": _TEXT,
            "parent": {"type": "null"},
            "permission": _list({"type": "object"}),
            "max_model_len": _COUNT,
        }
    ),
    "ModelList": _object({"object": _constant("list"), "data": _list(_of("Model"))}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": {"anyOf": [_list(_TEXT), {"type": "null"}]},
        }
    ),
    "TokenText": _object({"prompt": _TEXT}),
    "Version": _object({"version": _TEXT}),
    "Load": _object({"server_load": _COUNT}),
    "Health": _object({"status": {"enum": ["ok", "not ready"]}}),
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
    ),
    "AnthropicError": _object(
        {"type": _constant("error"), "error": _object({"type": _TEXT, "message": _TEXT}), "request_id": _TEXT}
    ),
}
