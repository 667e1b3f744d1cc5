"""The gateway's part of the models that it serves: limits, tokenizer, chat template. No weights, no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from weir.core.device import Device, Precision
from weir.core.errors import NotFound
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir_gateway.answers.formats import AnswerFormat
from weir_gateway.answers.reasoning import choose_reasoning_format
from weir_gateway.config import GatewayConfig
from weir_gateway.tools.detection import choose_tool_format

_FINGERPRINT_CHARS = 16


class Detokenizer(Protocol):
    """Turns a growing sequence of ids into text, never half a character (`weir.model.tokens.tokenizer`)."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TextTokenizer(Protocol):
    """The part of `weir.model.tokens.tokenizer.Tokenizer` that the gateway uses. Called from several threads."""

    @property
    def added_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_bos: bool = True, field: str = "prompt") -> list[int]: ...

    def detokenizer(self, *, shown: frozenset[int] = ...) -> Detokenizer: ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_spelling(self, token_id: int) -> str: ...


class ChatRenderer(Protocol):
    """Turns a conversation into a prompt; raises InvalidRequest for one that the model does not take."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = ...,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = ...,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. `max_context_tokens` bounds prompt and output together."""

    name: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TextTokenizer
    chat_template: ChatRenderer
    digest: str = ""
    """Of the weights as the workers compute with them; empty: not known."""
    aliases: tuple[str, ...] = ()
    """Further names for it."""
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    """What its answers can hold beside content."""

    def token_of(self, marker: str) -> int | None:
        """The token of its own that a marker is. None: it is written in others."""
        token_ids = self.tokenizer.encode(marker, add_bos=False)
        is_own = len(token_ids) == 1 and token_ids[0] in self.tokenizer.added_token_ids
        return token_ids[0] if is_own else None

    @property
    def marker_token_ids(self) -> frozenset[int]:
        """Of the format's markers, those that are tokens of their own."""
        found = (self.token_of(marker) for marker in self.answer_format.markers)
        return frozenset(token_id for token_id in found if token_id is not None)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: the same as long as the weights and how they are computed with are."""
        return f"fp_{self.digest[:_FINGERPRINT_CHARS]}" if self.digest else ""


class ModelDirectory:
    """Finds the models that are served. `context_of`: the longest sequence that a worker of a model takes; None: no
    worker of it is known, and the context is the model's."""

    def __init__(
        self, models: Sequence[ServedModel], context_of: Callable[[str], int | None] = lambda name: None
    ) -> None:
        self._models: dict[str, ServedModel] = {}
        self._names: dict[str, str] = {}
        """alias -> the model's name."""
        self._context_of = context_of
        self.replace_all(models)

    def replace_all(self, models: Sequence[ServedModel]) -> None:
        """Requests that run keep the model that they found."""
        self._models = {model.name: model for model in models}
        self._names = {alias: model.name for model in models for alias in model.aliases}

    def list_models(self) -> list[ServedModel]:
        return [self._within_workers(model) for model in self._models.values()]

    def find(self, name: str, field: str) -> ServedModel:
        """Empty: the only model served. Raises NotFound, naming `field`."""
        if not name and len(self._models) == 1:
            return self._within_workers(next(iter(self._models.values())))
        model = self._models.get(self._names.get(name, name))
        if model is None:
            shown = repr(name[:100]) if name else "no name"
            raise NotFound(field, f"{field}: {shown} is not served here; {self._served()}")
        return self._within_workers(model)

    def _served(self) -> str:
        names = [*self._models, *self._names]
        return f"one of {', '.join(names)} is" if names else "no model is"

    def _within_workers(self, model: ServedModel) -> ServedModel:
        longest = self._context_of(model.name)
        if longest is None or longest >= model.max_context_tokens:
            return model
        return replace(model, max_context_tokens=longest)


def load_served_model(
    name_or_path: str,
    max_context_tokens: int = 0,
    digest_precision: Precision | None = None,
    digest_device: Device = "cpu",
    *,
    is_exact: bool = False,
    served_name: str = "",
    aliases: tuple[str, ...] = (),
    chat_template: str = "",
    tool_format: str = "auto",
    reasoning_format: str = "auto",
) -> ServedModel:
    """Reads headers, tokenizer and chat template from the model's files; and all of its weights, once, for the digest
    in the workers' precision on their device, exact or not (None: no digest). `served_name`: what requests call it;
    empty: what its files are called. `chat_template`: in place of its own (`load_chat_template`); `tool_format`: a name
    of `answers.formats.TOOL_FORMATS`, or "auto"; `reasoning_format`: one of
    `answers.reasoning.REASONING_FORMATS`. Blocks.

    Raises:
        ModelError: no such model, files that cannot be served, or `max_context_tokens` above the model's (0: its own).
    """
    source = resolve_model(name_or_path)
    config = load_model_config(source)
    tokenizer, template = load_tokenizer(source), load_chat_template(source, chat_template)
    made = ServedModel(
        name=served_name or source.name,
        max_context_tokens=config.context_within(max_context_tokens),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        tokenizer=tokenizer,
        chat_template=template,
        aliases=aliases,
        digest=""
        if digest_precision is None
        else model_digest(source, digest_precision, digest_device, exact=is_exact),
    )
    tools = choose_tool_format(tool_format, template.tool_source, lambda marker: made.token_of(marker) is not None)
    reasoning = choose_reasoning_format(reasoning_format, template.tool_source)
    return replace(made, answer_format=AnswerFormat(reasoning, tools))


def load_model_of(config: GatewayConfig) -> ServedModel:
    """The model that a gateway serves, with the digest of its workers; without one, where it sends no prefix hints."""
    digest_precision = config.precision if config.prefix_hints else None
    return load_served_model(
        config.model_reference,
        config.max_context_tokens,
        digest_precision,
        config.device,
        is_exact=config.exact,
        served_name=config.served_model_name,
        chat_template=config.chat_template,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
    )
