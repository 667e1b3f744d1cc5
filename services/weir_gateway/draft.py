"""A request as a client wrote it, in words that both doors share. Nothing in it is checked yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Operation(Enum):
    """`gen_ai.operation.name` of a request."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a door's clients call each field, for errors that name it."""

    text: str = "text"
    token_ids: str = "token_ids"
    messages: str = "messages"
    request_id: str = "options.request_id"
    model: str = "options.model"
    lane: str = "options.lane"
    temperature: str = "options.sampling.temperature"
    top_k: str = "options.sampling.top_k"
    top_p: str = "options.sampling.top_p"
    seed: str = "options.sampling.seed"
    max_tokens: str = "options.stop_conditions.max_tokens"
    stop: str = "options.stop_conditions.stop"
    stop_token_ids: str = "options.stop_conditions.stop_token_ids"
    cache_salt: str = "options.cache_salt"


GRPC_NAMES = FieldNames()


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt to be tokenized."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A ready prompt."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of `{"role": …, "content": …}`, oldest first."""

    messages: tuple[Mapping[str, str], ...]


Prompt = Text | TokenIds | Conversation


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """None and empty: the default.

    `request_id` is the client's own name for the request, to cancel it by; `correlation_id` is only shown in traces.
    """

    operation: Operation
    prompt: Prompt
    names: FieldNames
    request_id: str = ""
    correlation_id: str = ""
    model: str = ""
    lane: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    skips_prefix_cache: bool = False
    is_stream: bool = True
