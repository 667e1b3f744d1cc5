"""A request as a client sent it, in the form that both frontends share. Nothing in it is checked yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from weir.core.options import GenerateOptions, grpc_names
from weir_gateway.tools.definitions import ToolUse


class Operation(Enum):
    """`gen_ai.operation.name` of a request."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"


FieldNames = Mapping[str, str]
"""What a frontend's clients call each option, and the forms of a prompt, for errors that name it."""

_GRPC_PLAIN_NAMES = ("text", "token_ids", "messages", "priority", "tools", "max_reasoning_tokens")
GRPC_NAMES: FieldNames = grpc_names() | {name: name for name in _GRPC_PLAIN_NAMES} | {"tool_schema": "parameters"}


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
    """Turns of `{"role": …, "content": …}`, oldest first, for the model's template: it ends with what asks for the
    assistant's next message, unless `add_generation_prompt` is False, or where the last message goes on. Of calls of
    tools turns have what OpenAI's have, but `arguments` as an object.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, object] = field(default_factory=dict)
    """Further ones, that some models' templates ask for."""
    tools: ToolUse | None = None
    """None: there are none, or none may be called, and the model is told of none."""
    max_reasoning_tokens: int | None = None
    """At which the model must come to its answer; None: it takes as many as it wants."""


Prompt = Text | TokenIds | Conversation


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """`options.request_id` is the client's own name for the request, to cancel it by; `correlation_id` is only shown,
    in traces and logs.

    With `more_prompts` it is a list: each prompt gets `options.n` answers, choice `i * n` to `(i + 1) * n - 1` for the
    i-th of them, and all are one piece of work, which is let in, fails and is cancelled as a whole.
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
    more_prompts: tuple[Prompt, ...] = ()

    @property
    def tools(self) -> ToolUse | None:
        return self.prompt.tools if isinstance(self.prompt, Conversation) else None

    @property
    def num_prompts(self) -> int:
        return 1 + len(self.more_prompts)

    def by_prompt(self) -> tuple["ClientRequest", ...]:
        """The same of each prompt alone, which errors name by its place in the list."""
        if not self.more_prompts:
            return (self,)
        prompts = (self.prompt, *self.more_prompts)
        return tuple(
            replace(self, prompt=prompt, more_prompts=(), names=_names_in_list(self.names, index))
            for index, prompt in enumerate(prompts)
        )

    @property
    def log_ids(self) -> Mapping[str, str]:
        """What a line of the log about the request has beside its message."""
        return {"correlation_id": self.correlation_id} if self.correlation_id else {}


def _names_in_list(names: FieldNames, index: int) -> FieldNames:
    return {**names, **{name: f"{names[name]}[{index}]" for name in ("text", "token_ids")}}
