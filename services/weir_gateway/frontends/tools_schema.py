"""The bodies of vLLM's `/tokenize` and `/detokenize`, read as strictly as those of requests, and their answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.frontends.bodies.checks import MAX_ENTRIES
from weir_gateway.frontends.bodies.unknown_fields import KnownFields, check_undeclared
from weir_gateway.frontends.json_parts import dump, dump_array
from weir_gateway.frontends.openai.fields import IGNORED
from weir_gateway.frontends.openai.messages import Message, conversation_of
from weir_gateway.frontends.openai.schema import HTTP_NAMES, token_ids_of
from weir_gateway.frontends.openai.tool_fields import CHAT_TOOLS
from weir_gateway.requests.client_request import Conversation, FieldNames, Text, TokenIds
from weir_gateway.requests.models import ServedModel
from weir_gateway.tokenization import DetokenizeRequest, TokenizeRequest

DETOKENIZE_NAMES: FieldNames = {**HTTP_NAMES, "token_ids": "tokens"}


class TokenizeBody(BaseModel):
    """`POST /tokenize`, of a text (`prompt`) or a conversation (`messages`)."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: Any = None
    messages: list[Message] | None = Field(default=None, max_length=MAX_ENTRIES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Any = None


_TOKENIZE_FIELDS = KnownFields(
    frozenset(TokenizeBody.model_fields),
    neutral={
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "mm_processor_kwargs": ({},),
    },
    ignored=IGNORED,
)
_DETOKENIZE_FIELDS = KnownFields(frozenset(DetokenizeBody.model_fields), ignored=IGNORED)


def tokenize_request(body: TokenizeBody) -> TokenizeRequest:
    """Raises InvalidRequest for what is not served, and for a text beside a conversation, or neither."""
    violations: list[FieldViolation] = []
    check_undeclared(body.model_extra, _TOKENIZE_FIELDS, "refuse", violations)
    prompt = _prompt_of(body, violations)
    if violations:
        raise InvalidRequest(violations)
    is_chat = isinstance(prompt, Conversation)
    return TokenizeRequest(
        model=body.model or "",
        prompt=prompt,
        names=HTTP_NAMES,
        add_special_tokens=not is_chat if body.add_special_tokens is None else body.add_special_tokens,
    )


def detokenize_request(body: DetokenizeBody) -> DetokenizeRequest:
    """Raises InvalidRequest for what is not served, or is no list of token ids."""
    violations: list[FieldViolation] = []
    check_undeclared(body.model_extra, _DETOKENIZE_FIELDS, "refuse", violations)
    token_ids = token_ids_of(body.tokens)
    if token_ids is None:
        violations.append(FieldViolation("tokens", "must be one list of token ids"))
    if token_ids is None or violations:
        raise InvalidRequest(violations)
    return DetokenizeRequest(body.model or "", TokenIds(token_ids), DETOKENIZE_NAMES)


def tokenize_answer(model: ServedModel, token_ids: Sequence[int], *, with_strings: bool) -> bytes:
    """JSON. To be called in a thread where there are many: it lets others run between parts."""
    strings = "null"
    if with_strings:
        strings = dump_array([model.tokenizer.token_spelling(token_id) for token_id in token_ids])
    head = f'{{"count":{len(token_ids)},"max_model_len":{model.max_context_tokens}'
    return f'{head},"tokens":{dump_array(token_ids)},"token_strs":{strings}}}'.encode()


def detokenize_answer(text: str) -> bytes:
    """JSON."""
    return dump({"prompt": text}).encode()


def _prompt_of(body: TokenizeBody, violations: list[FieldViolation]) -> Text | Conversation:
    if body.messages is not None:
        if body.prompt is not None:
            violations.append(FieldViolation("prompt", "comes with messages; give one of them"))
        conversation = conversation_of(body.messages, violations)
        tools = CHAT_TOOLS.tool_use_of(body.tools, None, None, violations)
        return replace(conversation, add_generation_prompt=body.add_generation_prompt is not False, tools=tools)
    if body.add_generation_prompt is not None:
        violations.append(FieldViolation("add_generation_prompt", "is for messages; leave it out"))
    if body.tools:
        violations.append(FieldViolation("tools", "is for messages; leave it out"))
    if isinstance(body.prompt, str):
        return Text(body.prompt)
    problem = "is missing; give it, or messages" if body.prompt is None else "must be one text"
    violations.append(FieldViolation("prompt", problem))
    return Text("")
