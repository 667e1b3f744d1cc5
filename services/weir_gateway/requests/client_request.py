"""A request as a client sent it, in the form that both frontends share. Nothing in it is checked yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from weir.core.options import GenerateOptions, grpc_names


class Operation(Enum):
    """`gen_ai.operation.name` of a request."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"


FieldNames = Mapping[str, str]
"""What a frontend's clients call each option, and the forms of a prompt, for errors that name it."""

GRPC_NAMES: FieldNames = grpc_names() | {name: name for name in ("text", "token_ids", "messages", "priority")}


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
class ClientRequest:
    """`options.request_id` is the client's own name for the request, to cancel it by; `correlation_id` is only shown,
    in traces and logs.
    """

    operation: Operation
    prompt: Prompt
    names: FieldNames
    options: GenerateOptions = field(default_factory=GenerateOptions)
    correlation_id: str = ""
    is_stream: bool = True
    priority: int | None = None
    """Another way to name the lane (`AccessControl.scope_of`)."""
    had_end: bool = False
    """With `options.resume_from`: the client has the end of the answer too."""

    @property
    def log_ids(self) -> Mapping[str, str]:
        """What a line of the log about the request has beside its message."""
        return {"correlation_id": self.correlation_id} if self.correlation_id else {}
