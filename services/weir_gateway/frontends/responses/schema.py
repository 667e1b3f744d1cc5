"""The body of `POST /v1/responses`, read strictly, and the request that it makes.

What an answer would depend on and is not served is refused by name; what changes nothing is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.grammar import Grammar
from weir_gateway.frontends.adapter_schema import MAX_VIOLATIONS, AdapterBody, known_fields
from weir_gateway.frontends.bodies.checks import MAX_ENTRIES, is_too_long, shown
from weir_gateway.frontends.bodies.thinking import AS_TRAINED, Thinking, thinking_of_effort
from weir_gateway.frontends.bodies.unknown_fields import UnknownFields, check_undeclared
from weir_gateway.frontends.openai.messages import Turn
from weir_gateway.frontends.openai.schema import HTTP_NAMES
from weir_gateway.frontends.openai.structured import grammar_of_format
from weir_gateway.frontends.openai.tool_fields import RESPONSE_TOOLS
from weir_gateway.frontends.responses.turns import ItemReader
from weir_gateway.requests.client_request import ClientRequest, Conversation, FieldNames, Operation
from weir_gateway.tools.definitions import ToolUse

RESPONSES_NAMES: FieldNames = {
    **HTTP_NAMES,
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "tool_schema": "parameters",
    "logprobs": "top_logprobs",
}
LOGPROBS_INCLUDE = "message.output_text.logprobs"

_MAX_METADATA_PAIRS = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_VALUE_CHARS = 512
_FORMAT_NAMES = ("name", "description", "schema", "strict")
# Nothing is encrypted here: reasoning is there to be read.
_NEUTRAL_INCLUDES = frozenset({"reasoning.encrypted_content"})


class ResponsesBody(AdapterBody):
    """`POST /v1/responses`. `input` is a text, or a list of items."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_ENTRIES)
    include: list[str] | None = Field(default=None, max_length=MAX_ENTRIES)
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)
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
    tools: ToolUse | None
    thinking: Thinking = AS_TRAINED
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
        first: tuple[Turn, ...] = ()
        if body.instructions is not None:
            first = ({"role": "system", "content": body.instructions},)
        turns = (*first, *previous_turns, *self.turns)
        return ClientRequest(
            operation=Operation.CHAT,
            prompt=self.thinking.within(Conversation(turns, tools=self.tools)),
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
    _check_verbosity(body, violations)
    found = grammar_of_format((body.text or {}).get("format"), "text.format", _FORMAT_NAMES, violations)
    grammar, grammar_field = found or (None, "text.format")
    _check_metadata(body.metadata or {}, violations)
    thinking = _thinking_of(body, violations)
    tools = RESPONSE_TOOLS.tool_use_of(body.tools, body.tool_choice, body.parallel_tool_calls, violations)
    has_logprobs = _includes_logprobs(body, violations)
    if violations:
        raise InvalidRequest(violations)
    return AskedResponse(body, turns, has_logprobs, tools, thinking, grammar, grammar_field, ignored)


def _turns_of(body: ResponsesBody, violations: list[FieldViolation]) -> tuple[Turn, ...]:
    if isinstance(body.input, str):
        return ({"role": "user", "content": body.input},)
    if body.input is None and body.previous_response_id is not None:
        return ()
    if not isinstance(body.input, list):
        problem = "is missing; give a text, or a list of items" if body.input is None else "must be a text, or a list"
        violations.append(FieldViolation("input", problem))
        return ()
    reader = ItemReader(violations)
    if is_too_long(body.input, "input", violations):
        return ()
    for index, item in enumerate(body.input):
        if len(violations) >= MAX_VIOLATIONS:
            break
        reader.read(item, f"input[{index}]")
    return tuple(reader.turns)


def _check_verbosity(body: ResponsesBody, violations: list[FieldViolation]) -> None:
    text = body.text or {}
    if text.get("verbosity") not in (None, "medium"):
        violations.append(FieldViolation("text.verbosity", "is not served; leave it out, or say medium"))


def _thinking_of(body: ResponsesBody, violations: list[FieldViolation]) -> Thinking:
    effort = (body.reasoning or {}).get("effort")
    instead = "leave it out, or give thinking_token_budget"
    return thinking_of_effort(effort, body.thinking_token_budget, "reasoning.effort", instead, violations)


def _check_metadata(metadata: Mapping[str, str], violations: list[FieldViolation]) -> None:
    """It is kept, and comes back."""
    is_small = len(metadata) <= _MAX_METADATA_PAIRS and all(
        len(key) <= _MAX_METADATA_KEY_CHARS and len(value) <= _MAX_METADATA_VALUE_CHARS
        for key, value in metadata.items()
    )
    if not is_small:
        limits = f"{_MAX_METADATA_PAIRS} pairs, of {_MAX_METADATA_KEY_CHARS} and {_MAX_METADATA_VALUE_CHARS} characters"
        violations.append(FieldViolation("metadata", f"is too large; at most {limits}"))


def _includes_logprobs(body: ResponsesBody, violations: list[FieldViolation]) -> bool:
    includes = body.include or []
    for index, name in enumerate(includes[:MAX_VIOLATIONS]):
        if name != LOGPROBS_INCLUDE and name not in _NEUTRAL_INCLUDES:
            violations.append(FieldViolation(f"include[{index}]", f"is {shown(name)}, which answers here do not have"))
    if body.top_logprobs and LOGPROBS_INCLUDE not in includes:
        problem = f'is {body.top_logprobs}; give include: ["{LOGPROBS_INCLUDE}"] with it'
        violations.append(FieldViolation("top_logprobs", problem))
    return LOGPROBS_INCLUDE in includes
