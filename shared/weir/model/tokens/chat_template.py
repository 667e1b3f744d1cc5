"""From a conversation to a prompt: the model's own Jinja template, in a sandbox."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from weir.core.errors import FieldViolation, InvalidRequest
from weir.model.errors import ModelError
from weir.model.files.gguf import read_gguf
from weir.model.files.source import ModelKind, ModelSource

_DUMMY_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# what a template can raise by what it does with the messages it is given
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
_MAX_RENDERED_CHARS = 1 << 25
"""Far above what any context holds: it only ends a template that makes much of little."""


class ChatTemplate:
    """`template` None: a model without one, which refuses every conversation."""

    def __init__(self, model_name: str, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._model_name = model_name
        self._special_tokens = dict(special_tokens)
        self._template = None if template is None else _compile(model_name, template)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt that asks for the assistant's next message; without `add_generation_prompt` only what was said.
        With `continue_final_message` it ends where the last message does, for the model to go on with it.
        `messages`: `{"role": …, "content": …}` each. `variables`: further ones of the template.

        Raises:
            InvalidRequest: no messages, the template refuses them or leaves the last one out, a variable has a name
                that is the template's own, or the model has no template.
        """
        if self._template is None:
            _refuse(f"model {self._model_name!r} has no chat template; send it a prompt instead")
        if not messages:
            _refuse("empty; at least one message is needed")
        # None, and not undefined: templates ask `tools is not none`
        own: dict[str, object] = {"messages": [dict(message) for message in messages], "tools": None, "documents": None}
        own["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        own |= self._special_tokens
        taken = sorted(own.keys() & variables.keys())
        if taken:
            raise InvalidRequest([FieldViolation("chat_template_kwargs", f"{taken[0]!r} is the template's own")])
        try:
            rendered = _bounded_text(self._template.generate(own | dict(variables)))
        except _TEMPLATE_FAILURES as error:
            problem = str(error) or type(error).__name__
            raise InvalidRequest([_violation(f"the model's chat template refuses them: {problem}")]) from error
        return _until_last_message(rendered, messages[-1]) if continue_final_message else rendered


def _bounded_text(parts: Iterator[str]) -> str:
    """Raises InvalidRequest."""
    found, num_chars = [], 0
    for part in parts:
        num_chars += len(part)
        if num_chars > _MAX_RENDERED_CHARS:
            _refuse(f"the model's chat template makes more than {_MAX_RENDERED_CHARS} characters of them")
        found.append(part)
    return "".join(found)


def _until_last_message(rendered: str, message: Mapping[str, str]) -> str:
    """As transformers' `continue_final_message` finds it: templates may strip what they are given."""
    content = message["content"].strip()
    start = rendered.rfind(content)
    if start < 0 or not content:
        _refuse("the model's chat template shows nothing of the last one: it cannot go on")
    return rendered[: start + len(content)]


def load_chat_template(source: ModelSource) -> ChatTemplate:
    """From `tokenizer.chat_template` of the GGUF file, or chat_template.jinja or tokenizer_config.json of the folder.

    Raises:
        ModelError: the template is not valid Jinja.
    """
    if source.kind is ModelKind.HF_FOLDER:
        return _from_folder(source)
    if source.kind is ModelKind.DUMMY:
        return ChatTemplate(source.name, _DUMMY_TEMPLATE, {})
    gguf = read_gguf(source.path)
    tokens = gguf.find("tokenizer.ggml.tokens", list, []) or []
    special_tokens = {}
    for name in ("bos", "eos"):
        token_id = gguf.find(f"tokenizer.ggml.{name}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens):
            special_tokens[f"{name}_token"] = str(tokens[token_id])
    return ChatTemplate(source.name, gguf.find("tokenizer.chat_template", str), special_tokens)


def _from_folder(source: ModelSource) -> ChatTemplate:
    config_path = source.path / "tokenizer_config.json"
    config = _read_json_object(config_path) if config_path.is_file() else {}
    jinja_path = source.path / "chat_template.jinja"
    template = jinja_path.read_text("utf-8") if jinja_path.is_file() else _default_template(config.get("chat_template"))
    special_tokens = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special_tokens[name] = text
    return ChatTemplate(source.name, template, special_tokens)


def _default_template(value: object) -> str | None:
    """A folder may carry one template, or several by name."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _compile(model_name: str, template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMarks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"model {model_name!r}: chat template, line {error.lineno}: {error.message}") from error


class _GenerationMarks(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training: here, what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _violation(description: str) -> FieldViolation:
    return FieldViolation("messages", description)


def _refuse(description: str) -> NoReturn:
    raise InvalidRequest([_violation(description)])
