"""From a conversation to a prompt: the model's own Jinja template, in a sandbox."""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from weir.core.errors import FieldViolation, InvalidRequest
from weir.model.errors import ModelError
from weir.model.files.gguf import read_gguf
from weir.model.files.source import ModelKind, ModelSource

SHIPPED_TEMPLATES = ("hermes",)
"""Templates of the package, by name: `hermes` is ChatML with tools, for models that were taught neither otherwise."""

_SHIPPED = Path(__file__).parent / "templates"
_MAX_TEMPLATE_BYTES = 1 << 20
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
_PROBE = "weir_probes_for_tools"
"""The name of a tool: no template has it but one that shows the tools it is given."""
_MAX_RENDERED_CHARS = 1 << 25
"""Far above what any context holds: it only ends a template that makes much of little."""
_MAX_RENDER_S = 2.0
"""Of a core, likewise: a thousand turns take hundredths."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{6})|\{[^{}]*[0-9]{6}")
_CHECK_EVERY = 64
"""Steps of a template between two looks at the time."""


class ChatTemplate:
    """`template` None: a model without one, which refuses every conversation. `tool_template`: the one for
    conversations with tools, where a model has two."""

    def __init__(
        self,
        model_name: str,
        template: str | None,
        special_tokens: Mapping[str, str],
        tool_template: str | None = None,
    ) -> None:
        self._model_name = model_name
        self._special_tokens = dict(special_tokens)
        self._template = None if template is None else _compile(model_name, template)
        self._tool_template = self._template if tool_template is None else _compile(model_name, tool_template)
        self.tool_source = (template if tool_template is None else tool_template) or ""
        """Of the template for conversations with tools: it tells in which form the model was taught to call them."""

    @cached_property
    def has_tools(self) -> bool:
        """Whether it shows a model the tools that there are. One that raises at the question is asked again when there
        is a conversation."""
        if self._tool_template is None:
            return False
        probe = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        asked = {"messages": [{"role": "user", "content": "-"}], "tools": [probe], "documents": None}
        try:
            text = _bounded_text(self._tool_template, {**asked, "add_generation_prompt": True})
        except (*_TEMPLATE_FAILURES, InvalidRequest):
            return True
        return _PROBE in text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt that asks for the assistant's next message; without `add_generation_prompt` only what was said.
        With `continue_final_message` it ends where the last message does, for the model to go on with it.
        `messages`: `{"role": …, "content": …}` each, with `tool_calls` whose `arguments` are objects, `tool_call_id`
        and `name` as OpenAI has them. `tools`: in OpenAI's form. `variables`: further ones of the template.

        Raises:
            InvalidRequest: no messages, the template refuses them or leaves the last one or the tools out, a variable
                has a name that is the template's own, or the model has no template.
        """
        if self._template is None:
            _refuse(f"model {self._model_name!r} has no chat template; send it a prompt instead")
        if not messages:
            _refuse("empty; at least one message is needed")
        template = self._template
        if tools or any(_is_of_tools(message) for message in messages):
            template = self._tool_template or template
            self._need_tools(messages, tools)
        # None, and not undefined: templates ask `tools is not none`
        own: dict[str, object] = {"tools": [dict(tool) for tool in tools] or None, "documents": None}
        own["messages"] = [dict(message) for message in messages]
        own["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        own |= self._special_tokens
        taken = sorted(own.keys() & variables.keys())
        if taken:
            raise InvalidRequest([FieldViolation("chat_template_kwargs", f"{taken[0]!r} is the template's own")])
        try:
            rendered = _bounded_text(template, own | dict(variables))
        except _TEMPLATE_FAILURES as error:
            problem = str(error) or type(error).__name__
            raise InvalidRequest([_violation(f"the model's chat template refuses them: {problem}")]) from error
        return _until_last_message(rendered, messages[-1]) if continue_final_message else rendered

    def _need_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises InvalidRequest where they would be left out without a word."""
        if self.has_tools:
            return
        problem = (
            f"the chat template of model {self._model_name!r} has no tools, so it would not hear of any; its operator "
            "can give it one that has (--chat-template)"
        )
        if tools:
            raise InvalidRequest([FieldViolation("tools", problem)])
        index = next(index for index, message in enumerate(messages) if _is_of_tools(message))
        raise InvalidRequest([FieldViolation(f"messages[{index}]", f"is of tools: {problem}")])


class _BoundedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Ends a template that goes on for too long, also where it writes nothing meanwhile: no loop without a call in it
    (`range` is one) is longer than a conversation."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMarks])
        self._of_thread = threading.local()

    def begin(self) -> None:
        """A rendering, in this thread."""
        self._of_thread.num_steps, self._of_thread.ends_at_s = 0, time.thread_time() + _MAX_RENDER_S

    def step(self) -> None:
        """Raises InvalidRequest."""
        mine = self._of_thread
        num_steps = mine.num_steps = getattr(mine, "num_steps", 0) + 1
        if num_steps % _CHECK_EVERY == 0 and time.thread_time() > getattr(mine, "ends_at_s", math.inf):
            _refuse(f"the model's chat template takes more than {_MAX_RENDER_S:g} s for them; send fewer at once")

    intercepted_binops = frozenset({"*", "**", "%"})

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step()
        for number in (*args, *kwargs.values()):
            _check_width(number)
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raises InvalidRequest before one operation makes what no prompt is, or takes for ever."""
        if operator == "*":
            sizes = [value if isinstance(value, int) else len(value) for value in (left, right) if _has_size(value)]
            _check_width(math.prod(sizes))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_width(left.bit_length() * right)
        elif operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        _check_format(getattr(value, "__self__", None))
        return super().wrap_str_format(value)


def _has_size(value: object) -> bool:
    return isinstance(value, int | str | list | tuple)


def _check_width(number: object) -> None:
    if isinstance(number, int) and abs(number) > _MAX_RENDERED_CHARS:
        _refuse(f"the model's chat template makes something of a size above {_MAX_RENDERED_CHARS}")


def _check_format(text: object) -> None:
    """Of a text with places for values, whose widths it says."""
    if isinstance(text, str) and _WIDE.search(text):
        _refuse("the model's chat template pads values to more than 99,999 characters")


def _bounded_filter(given: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(given)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_format(args[0])
        for number in (*args, *kwargs.values()):
            _check_width(number)
        return given(*args, **kwargs)

    return bounded


def _bounded_text(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    """Raises InvalidRequest."""
    sandbox = template.environment
    assert isinstance(sandbox, _BoundedSandbox)
    sandbox.begin()
    found, num_chars = [], 0
    for part in template.generate(variables):
        sandbox.step()
        num_chars += len(part)
        if num_chars > _MAX_RENDERED_CHARS:
            _refuse(f"the model's chat template makes more than {_MAX_RENDERED_CHARS} characters of them")
        found.append(part)
    return "".join(found)


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _until_last_message(rendered: str, message: Mapping[str, Any]) -> str:
    """As transformers' `continue_final_message` finds it: templates may strip what they are given."""
    content = message["content"].strip()
    start = rendered.rfind(content)
    if start < 0 or not content:
        _refuse("the model's chat template shows nothing of the last one: it cannot go on")
    return rendered[: start + len(content)]


def load_chat_template(source: ModelSource, named: str = "") -> ChatTemplate:
    """From `tokenizer.chat_template` of the GGUF file, or chat_template.jinja or tokenizer_config.json of the folder;
    `named`: another one in place of it, a file's path or one of `SHIPPED_TEMPLATES`.

    Raises:
        ModelError: the template is not valid Jinja, or cannot be read.
    """
    found = _templates_of(source)
    if not named:
        return ChatTemplate(source.name, found.default, found.special_tokens, found.of_tools)
    return ChatTemplate(source.name, read_template(named), found.special_tokens)


def checked_template(named: str) -> str:
    """The same, or of a relative path the absolute one, once it is sure that it can be used. Raises ModelError."""
    if not named:
        return named
    ChatTemplate(named, read_template(named), {})
    return named if named in SHIPPED_TEMPLATES else str(Path(named).absolute())


def read_template(named: str) -> str:
    """The text of a template. Raises ModelError."""
    path = _SHIPPED / f"{named}.jinja" if named in SHIPPED_TEMPLATES else Path(named)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEMPLATE_BYTES + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        shipped = f"must be a file of Jinja, or {' or '.join(SHIPPED_TEMPLATES)}"
        raise ModelError(f"chat_template {named!r}: {shipped} ({error})") from error
    if len(data) > _MAX_TEMPLATE_BYTES:
        raise ModelError(f"chat_template {named!r}: has over {_MAX_TEMPLATE_BYTES} bytes")
    return text


@dataclass(frozen=True, slots=True)
class _Templates:
    """What a model's files have. `of_tools`: where they have one of its own for conversations with tools."""

    default: str | None
    special_tokens: Mapping[str, str]
    of_tools: str | None = None


def _templates_of(source: ModelSource) -> _Templates:
    if source.kind is ModelKind.HF_FOLDER:
        return _from_folder(source)
    if source.kind is ModelKind.DUMMY:
        return _Templates(_DUMMY_TEMPLATE, {})
    gguf = read_gguf(source.path)
    tokens = gguf.find("tokenizer.ggml.tokens", list, []) or []
    special_tokens = {}
    for name in ("bos", "eos"):
        token_id = gguf.find(f"tokenizer.ggml.{name}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens):
            special_tokens[f"{name}_token"] = str(tokens[token_id])
    return _Templates(
        gguf.find("tokenizer.chat_template", str), special_tokens, gguf.find("tokenizer.chat_template.tool_use", str)
    )


def _from_folder(source: ModelSource) -> _Templates:
    config_path = source.path / "tokenizer_config.json"
    config = _read_json_object(config_path) if config_path.is_file() else {}
    jinja_path = source.path / "chat_template.jinja"
    named = _named_templates(config.get("chat_template"))
    template = jinja_path.read_text("utf-8") if jinja_path.is_file() else named.get("default")
    special_tokens = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special_tokens[name] = text
    tool_path = source.path / "additional_chat_templates" / "tool_use.jinja"
    of_tools = tool_path.read_text("utf-8") if tool_path.is_file() else named.get("tool_use")
    return _Templates(template, special_tokens, of_tools)


def _named_templates(value: object) -> Mapping[str, str]:
    """A folder may carry one template, or several by name."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _compile(model_name: str, template: str) -> jinja2.Template:
    environment = _BoundedSandbox()
    environment.filters |= {name: _bounded_filter(environment.filters[name]) for name in ("center", "indent", "format")}
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # one call of it takes as long as somebody wants
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"model {model_name!r}: chat template, line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:  # of the parser, of Python's compiler
        raise ModelError(f"model {model_name!r}: chat template cannot be compiled ({error!r:.200})") from error


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
