"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, read strictly, and the requests that they make.

What an answer would depend on and is not served is refused by name; what changes nothing is taken.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.grammar import Grammar
from weir_gateway.frontends.adapter_schema import MAX_VIOLATIONS, AdapterBody, known_fields, text_of
from weir_gateway.frontends.anthropic.tool_fields import SCHEMA, message_tools_of
from weir_gateway.frontends.anthropic.turns import TEXT_BLOCKS, MessageReader
from weir_gateway.frontends.bodies.checks import MAX_ENTRIES, is_too_long, shown
from weir_gateway.frontends.bodies.thinking import AS_TRAINED, NO_THINKING, Thinking
from weir_gateway.frontends.bodies.unknown_fields import KnownFields, UnknownFields, check_undeclared
from weir_gateway.frontends.openai.schema import HTTP_NAMES
from weir_gateway.frontends.openai.structured import grammar_of_format
from weir_gateway.requests.client_request import ClientRequest, Conversation, FieldNames, Operation
from weir_gateway.tokenization import TokenizeRequest

MESSAGES_NAMES: FieldNames = {
    **HTTP_NAMES,
    "messages": "messages",
    "stop": "stop_sequences",
    "tool_schema": SCHEMA,
    "max_reasoning_tokens": "thinking.budget_tokens",
}


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
    stop_sequences: list[str] | None = Field(default=None, max_length=MAX_ENTRIES)
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """What `output_config.format` was called at first."""


_ENABLED: Mapping[str, object] = {"enable_thinking": True}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_REASONS: Mapping[str, str] = {
    "max_completion_tokens": "is max_tokens here",
    "reasoning_effort": "is thinking here",
    "thinking_token_budget": "is thinking.budget_tokens here",
    "response_format": "is output_config.format here",
    "stop": "is stop_sequences here",
}
_IGNORED = frozenset(
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
)
_MESSAGE_FIELDS = known_fields(MessagesBody, _NEUTRAL, _REASONS, _IGNORED)
# A prompt has the same number of tokens whatever its answer may have.
_COUNT_FIELDS = known_fields(
    CountTokensBody, _NEUTRAL, _REASONS, _IGNORED | {"max_tokens", "output_config", "output_format", "stop_sequences"}
)


class AskedMessage(NamedTuple):
    """What a body asks for. `ignored_fields`: of it, which nobody here knows."""

    client_request: ClientRequest
    ignored_fields: tuple[str, ...]


class AskedCount(NamedTuple):
    """The same of a prompt whose tokens are counted."""

    request: TokenizeRequest
    ignored_fields: tuple[str, ...]


def messages_request(body: MessagesBody, correlation_id: str, unknown_fields: UnknownFields = "ignore") -> AskedMessage:
    """Raises InvalidRequest for what is not served."""
    conversation, ignored = _read(body, _MESSAGE_FIELDS, unknown_fields)
    grammar, grammar_field = _grammar_of(body)
    client_request = ClientRequest(
        operation=Operation.CHAT,
        prompt=conversation,
        names={**MESSAGES_NAMES, "grammar": grammar_field},
        options=body.options(max_tokens=body.max_tokens, stop=tuple(body.stop_sequences or ()), grammar=grammar),
        correlation_id=correlation_id,
        is_stream=bool(body.stream),
        priority=body.priority,
    )
    return AskedMessage(client_request, ignored)


def _grammar_of(body: MessagesBody) -> tuple[Grammar | None, str]:
    """And the field that it came from. Raises InvalidRequest."""
    violations: list[FieldViolation] = []
    config = body.output_config or {}
    unknown = next((name for name in config if name != "format"), None)
    if unknown is not None:
        problem = "is not served: no answer here has another effort. Of this field format is"
        violations.append(FieldViolation(f"output_config.{unknown[:64]}", problem))
    forms = {"output_config.format": config.get("format"), "output_format": body.output_format}
    given = [
        found
        for field, form in forms.items()
        if (found := grammar_of_format(form, field, ("schema",), violations)) is not None
    ]
    if len(given) > 1:
        violations.append(FieldViolation("output_format", "comes with output_config.format; give one of them"))
    if violations:
        raise InvalidRequest(violations)
    return given[0] if given else (None, "output_config.format")


def count_request(body: CountTokensBody, unknown_fields: UnknownFields = "ignore") -> AskedCount:
    """Raises InvalidRequest as the request of the same messages would."""
    conversation, ignored = _read(body, _COUNT_FIELDS, unknown_fields)
    request = TokenizeRequest(
        model=body.model or "",
        prompt=conversation,
        names=MESSAGES_NAMES,
        add_special_tokens=False,
    )
    return AskedCount(request, ignored)


def _read(
    body: CountTokensBody, known: KnownFields, unknown_fields: UnknownFields
) -> tuple[Conversation, tuple[str, ...]]:
    """And the names of fields that are ignored. An answer goes on with the assistant's turn that the messages end
    with."""
    violations: list[FieldViolation] = []
    ignored = check_undeclared(body.model_extra, known, unknown_fields, violations)
    tools = message_tools_of(body.tools, body.tool_choice, violations)
    thinking = _thinking_of(body.thinking, violations)
    is_too_long(body.messages, "messages", violations)
    reader = MessageReader(violations)
    if body.system is not None:
        system = text_of(body.system, "system", TEXT_BLOCKS, frozenset(), violations)
        reader.turns.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages[:MAX_ENTRIES]):
        if len(violations) >= MAX_VIOLATIONS:
            break
        reader.read(message, f"messages[{index}]")
    if violations:
        raise InvalidRequest(violations)
    goes_on = bool(body.messages) and reader.turns[-1]["role"] == "assistant"
    conversation = Conversation(
        tuple(reader.turns), add_generation_prompt=not goes_on, continue_final_message=goes_on, tools=tools
    )
    return thinking.within(conversation), ignored


def _thinking_of(thinking: dict[str, Any] | None, violations: list[FieldViolation]) -> Thinking:
    """Not said: as the model was trained."""
    if thinking is None:
        return AS_TRAINED
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind == "disabled":
        return NO_THINKING
    if kind == "adaptive":
        return Thinking(None, _ENABLED)
    if kind != "enabled":
        problem = f"is {shown(kind)}; must be one of enabled, disabled, adaptive"
        violations.append(FieldViolation("thinking.type", problem))
    elif type(budget) is not int or budget < 1:  # JSON's true is no number
        violations.append(FieldViolation("thinking.budget_tokens", "must be a whole number of tokens, at least 1"))
    else:
        return Thinking(budget, _ENABLED)
    return AS_TRAINED
