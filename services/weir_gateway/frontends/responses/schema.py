"""The body of `POST /v1/responses`, read strictly, and the request that it makes.

What an answer would depend on and is not served is refused by name; what changes nothing is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.grammar import Grammar
from weir_gateway.frontends.adapter_schema import MAX_VIOLATIONS, AdapterBody, known_fields, shown, text_of
from weir_gateway.frontends.openai.schema import HTTP_NAMES, is_too_long
from weir_gateway.frontends.openai.structured import grammar_of_format
from weir_gateway.frontends.unknown_fields import UnknownFields, check_undeclared
from weir_gateway.requests.client_request import ClientRequest, Conversation, FieldNames, Operation

Turn = tuple[str, str]
"""(role, text)."""

RESPONSES_NAMES: FieldNames = {
    **HTTP_NAMES,
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
LOGPROBS_INCLUDE = "message.output_text.logprobs"

_MAX_METADATA_PAIRS = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_VALUE_CHARS = 512
_ROLES = ("system", "developer", "user", "assistant")
_FORMAT_NAMES = ("name", "description", "schema", "strict")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_CALLS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
# Reasoning is never shown to a model again, and there is none in answers from here.
_NEUTRAL_INCLUDES = frozenset({"reasoning.encrypted_content"})
_NO_TOOLS = "is not served yet: nothing here makes an answer a valid call"


class ResponsesBody(AdapterBody):
    """`POST /v1/responses`. `input` is a text, or a list of items."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None


_FIELDS = known_fields(
    ResponsesBody,
    neutral={
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
    },
    reasons={
        "background": "is not served: an answer is computed while its client waits for it",
        "conversation": "is not served: give previous_response_id, or the turns themselves in input",
        "prompt": "names a template that is kept elsewhere: give its text in instructions or input",
        "max_completion_tokens": "is max_output_tokens here",
        "max_tokens": "is max_output_tokens here",
        "messages": "is input here",
        "reasoning_effort": "is reasoning here",
        "response_format": "is text.format here",
        "truncation": "is not served: an input is answered as it was sent, or refused",
    },
    ignored=frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "user",
        }
    ),
)


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """What a body asks for. `turns` are those of `input` alone."""

    body: ResponsesBody
    turns: tuple[Turn, ...]
    has_logprobs: bool
    tool_choice: str
    grammar: Grammar | None = None
    grammar_field: str = "text.format"
    ignored_fields: tuple[str, ...] = ()
    """Of the body, which nobody here knows."""

    @property
    def is_to_be_kept(self) -> bool:
        return self.body.store is not False

    def client_request(self, previous_turns: tuple[Turn, ...], correlation_id: str) -> ClientRequest:
        """`previous_turns`: of the answer that this one goes on from, whose instructions are not taken over."""
        body = self.body
        first = () if body.instructions is None else (("system", body.instructions),)
        turns = (*first, *previous_turns, *self.turns)
        return ClientRequest(
            operation=Operation.CHAT,
            prompt=Conversation(tuple({"role": role, "content": text} for role, text in turns)),
            names={**RESPONSES_NAMES, "grammar": self.grammar_field},
            options=body.options(
                max_tokens=body.max_output_tokens,
                logprobs=(body.top_logprobs or 0) if self.has_logprobs else None,
                grammar=self.grammar,
            ),
            correlation_id=correlation_id,
            is_stream=bool(body.stream),
            priority=body.priority,
        )


def asked_response(body: ResponsesBody, unknown_fields: UnknownFields = "ignore") -> AskedResponse:
    """Raises InvalidRequest for what is not served."""
    violations: list[FieldViolation] = []
    ignored = check_undeclared(body.model_extra, _FIELDS, unknown_fields, violations)
    turns = _turns_of(body, violations)
    _check_form(body, violations)
    found = grammar_of_format((body.text or {}).get("format"), "text.format", _FORMAT_NAMES, violations)
    grammar, grammar_field = found or (None, "text.format")
    _check_metadata(body.metadata or {}, violations)
    tool_choice = _tool_choice_of(body, violations)
    has_logprobs = _includes_logprobs(body, violations)
    if violations:
        raise InvalidRequest(violations)
    return AskedResponse(body, turns, has_logprobs, tool_choice, grammar, grammar_field, ignored)


def _turns_of(body: ResponsesBody, violations: list[FieldViolation]) -> tuple[Turn, ...]:
    if isinstance(body.input, str):
        return (("user", body.input),)
    if body.input is None and body.previous_response_id is not None:
        return ()
    if not isinstance(body.input, list):
        problem = "is missing; give a text, or a list of items" if body.input is None else "must be a text, or a list"
        violations.append(FieldViolation("input", problem))
        return ()
    turns: list[Turn] = []
    if is_too_long(body.input, "input", violations):
        return ()
    for index, item in enumerate(body.input):
        if len(violations) >= MAX_VIOLATIONS:
            break
        turn = _try_read_item(item, f"input[{index}]", violations)
        if turn is not None:
            turns.append(turn)
    return tuple(turns)


def _try_read_item(item: object, field: str, violations: list[FieldViolation]) -> Turn | None:
    """None: it changes nothing, or it is in `violations`."""
    if not isinstance(item, dict):
        violations.append(FieldViolation(field, "must be an item, an object"))
        return None
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return None
    if kind != "message":
        violations.append(FieldViolation(field, _item_problem(kind)))
        return None
    role = item.get("role")
    if role not in _ROLES:
        violations.append(FieldViolation(f"{field}.role", f"is {shown(role)}; must be one of {', '.join(_ROLES)}"))
        return None
    text = text_of(item.get("content"), f"{field}.content", _TEXT_PARTS, frozenset(), violations)
    return ("system" if role == "developer" else role), text


def _item_problem(kind: object) -> str:
    if kind in _CALLS:
        return f"is a {kind}: tools are not served yet; leave it out, or tell the model of it in a message"
    if kind == "item_reference":
        return "is an item_reference: items are not kept alone; give the message itself, or previous_response_id"
    return f"is of type {shown(kind)}, which is not served; a message is"


def _check_form(body: ResponsesBody, violations: list[FieldViolation]) -> None:
    """Of the answer: nothing comes before it."""
    text, reasoning = body.text or {}, body.reasoning or {}
    if text.get("verbosity") not in (None, "medium"):
        violations.append(FieldViolation("text.verbosity", "is not served; leave it out, or say medium"))
    if reasoning.get("effort") not in (None, "none"):
        problem = f"is {shown(reasoning['effort'])}: no model here is told how long to reason; leave it out"
        violations.append(FieldViolation("reasoning.effort", problem))


def _check_metadata(metadata: Mapping[str, str], violations: list[FieldViolation]) -> None:
    """It is kept, and comes back."""
    is_small = len(metadata) <= _MAX_METADATA_PAIRS and all(
        len(key) <= _MAX_METADATA_KEY_CHARS and len(value) <= _MAX_METADATA_VALUE_CHARS
        for key, value in metadata.items()
    )
    if not is_small:
        limits = f"{_MAX_METADATA_PAIRS} pairs, of {_MAX_METADATA_KEY_CHARS} and {_MAX_METADATA_VALUE_CHARS} characters"
        violations.append(FieldViolation("metadata", f"is too large; at most {limits}"))


def _tool_choice_of(body: ResponsesBody, violations: list[FieldViolation]) -> str:
    """Tools that may not be called change nothing, whatever they are."""
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if choice not in ("none", "auto"):
        violations.append(FieldViolation("tool_choice", f"{_NO_TOOLS}; leave it out, or say none"))
    elif body.tools and choice != "none":
        violations.append(FieldViolation("tools", f'{_NO_TOOLS}; leave it out, or give tool_choice: "none" with it'))
    return str(choice)


def _includes_logprobs(body: ResponsesBody, violations: list[FieldViolation]) -> bool:
    includes = body.include or []
    for index, name in enumerate(includes[:MAX_VIOLATIONS]):
        if name != LOGPROBS_INCLUDE and name not in _NEUTRAL_INCLUDES:
            violations.append(FieldViolation(f"include[{index}]", f"is {shown(name)}, which answers here do not have"))
    if body.top_logprobs and LOGPROBS_INCLUDE not in includes:
        problem = f'is {body.top_logprobs}; give include: ["{LOGPROBS_INCLUDE}"] with it'
        violations.append(FieldViolation("top_logprobs", problem))
    return LOGPROBS_INCLUDE in includes
