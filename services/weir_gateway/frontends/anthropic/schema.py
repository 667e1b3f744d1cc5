"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, read strictly, and the requests that they make.

What an answer would depend on and is not served is refused by name; what changes nothing is taken.
"""

from typing import Any

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.frontends.adapter_schema import MAX_VIOLATIONS, AdapterBody, UndeclaredFields, shown, text_of
from weir_gateway.frontends.openai_schema import HTTP_NAMES
from weir_gateway.requests.client_request import ClientRequest, Conversation, FieldNames, Operation
from weir_gateway.tokenization import TokenizeRequest

MESSAGES_NAMES: FieldNames = {**HTTP_NAMES, "messages": "messages", "stop": "stop_sequences"}

_ROLES = ("user", "assistant")
_TEXT_BLOCKS = frozenset({"text"})
_DROPPED_BLOCKS = frozenset({"thinking", "redacted_thinking"})
"""Of earlier answers, which a model is not shown again."""
_NO_TOOLS = "is not served yet: nothing here makes an answer a valid call"
_FIELDS = UndeclaredFields(
    neutral={
        "container": (),
        "context_management": ({}, {"edits": []}),
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": (),
        "speed": ("standard",),
    },
    reasons={
        "output_config": "is not served yet: nothing here holds an answer to a form, or to an effort",
        "output_format": "is not served yet: nothing here holds an answer to a form",
    },
    ignored=frozenset(
        {
            "betas",
            "cache_control",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "user_profile_id",
            "workspace_id",
        }
    ),
)


class CountTokensBody(AdapterBody):
    """`POST /v1/messages/count_tokens`. `content` of a message is a text, or a list of text blocks; so is `system`."""

    messages: list[dict[str, Any]]
    system: Any = None
    thinking: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None


def messages_request(body: MessagesBody, correlation_id: str) -> ClientRequest:
    """Raises InvalidRequest for what is not served."""
    return ClientRequest(
        operation=Operation.CHAT,
        prompt=_conversation_of(body, is_to_be_answered=True),
        names=MESSAGES_NAMES,
        options=body.options(max_tokens=body.max_tokens, stop=tuple(body.stop_sequences or ())),
        correlation_id=correlation_id,
        is_stream=bool(body.stream),
        priority=body.priority,
    )


def count_request(body: CountTokensBody) -> TokenizeRequest:
    """Raises InvalidRequest as the request of the same messages would."""
    return TokenizeRequest(
        model=body.model or "",
        prompt=_conversation_of(body, is_to_be_answered=False),
        names=MESSAGES_NAMES,
        add_special_tokens=False,
    )


def _conversation_of(body: CountTokensBody, *, is_to_be_answered: bool) -> Conversation:
    violations: list[FieldViolation] = []
    _FIELDS.check(body.model_extra, violations)
    _check_tools(body, violations)
    _check_thinking(body.thinking, violations)
    turns = []
    if body.system is not None:
        system = text_of(body.system, "system", _TEXT_BLOCKS, frozenset(), violations)
        turns.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        if len(violations) >= MAX_VIOLATIONS:
            break
        turns.append(_turn_of(message, f"messages[{index}]", violations))
    if is_to_be_answered and body.messages and turns[-1]["role"] == "assistant":
        problem = "ends with the assistant's turn, which is not gone on with here; end with the user's"
        violations.append(FieldViolation("messages", problem))
    if violations:
        raise InvalidRequest(violations)
    return Conversation(tuple(turns))


def _turn_of(message: dict[str, Any], field: str, violations: list[FieldViolation]) -> dict[str, str]:
    role = message.get("role")
    if role not in _ROLES:
        problem = f"is {shown(role)}; must be one of {', '.join(_ROLES)}"
        violations.append(FieldViolation(f"{field}.role", problem))
    text = text_of(message.get("content"), f"{field}.content", _TEXT_BLOCKS, _DROPPED_BLOCKS, violations)
    return {"role": str(role), "content": text}


def _check_tools(body: CountTokensBody, violations: list[FieldViolation]) -> None:
    """Tools that may not be called change nothing, whatever they are."""
    choice = "auto" if body.tool_choice is None else body.tool_choice.get("type")
    if choice not in ("auto", "none"):
        problem = f'{_NO_TOOLS}; leave it out, or give {{"type": "none"}}'
        violations.append(FieldViolation("tool_choice", problem))
    elif body.tools and choice != "none":
        problem = f'{_NO_TOOLS}; leave it out, or give tool_choice: {{"type": "none"}} with it'
        violations.append(FieldViolation("tools", problem))


def _check_thinking(thinking: dict[str, Any] | None, violations: list[FieldViolation]) -> None:
    kind = (thinking or {}).get("type", "disabled")
    if kind != "disabled":
        problem = f"is {shown(kind)}: no model here is told to think; leave it out, or say disabled"
        violations.append(FieldViolation("thinking.type", problem))
