"""How the families of models mark reasoning and tool calls in their text, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class RegionMarkers:
    """What a region of an answer begins and ends with."""

    opens: str
    closes: str

    def __post_init__(self) -> None:
        if not (self.opens and self.closes):
            raise ValueError(f"both markers of a region must be a text, not {self.opens!r} and {self.closes!r}")


class CallSyntax(Enum):
    """What a call looks like."""

    JSON = "json"
    """`{"name": …, "arguments": {…}}`, or a list of these."""
    PARAMETERS = "parameters"
    """`<function=NAME>`, then `<parameter=KEY>…</parameter>` each, then `</function>`."""
    NAMED = "named"
    """`NAME[ARGS]{…}`, as Mistral's models since the eleventh version of their tokenizer."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes its calls.

    `opens`: each begins a call, or a list of them; the first one is what the model was trained on. `closes`: each may
    follow, and belongs to it. `is_bare`: an answer that begins with the call's `{` is one as well, without a marker.
    `arguments_key`: what the family calls the arguments; both words are read.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    syntax: CallSyntax = CallSyntax.JSON
    is_bare: bool = False
    arguments_key: str = "arguments"

    def __post_init__(self) -> None:
        if not self.opens or not all((*self.opens, *self.closes)):
            raise ValueError(f"the tool format {self.name!r} needs an opening marker, and no marker may be empty")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What a model's answers can hold beside content."""

    reasoning: RegionMarkers | None = None
    tools: ToolFormat | None = None

    @property
    def markers(self) -> frozenset[str]:
        """All that must be in the text that is parsed, even where the tokenizer takes them for special tokens."""
        of_reasoning = () if self.reasoning is None else (self.reasoning.opens, self.reasoning.closes)
        of_tools = () if self.tools is None else (*self.tools.opens, *self.tools.closes)
        header = ("[ARGS]", "[CALL_ID]") if self.tools and self.tools.syntax is CallSyntax.NAMED else ()
        return frozenset((*of_reasoning, *of_tools, *header))


THINK = RegionMarkers("<think>", "</think>")
"""Of Qwen3, DeepSeek R1, SmolLM3 and most others that reason."""

HERMES = ToolFormat("hermes", ("<tool_call>",), ("</tool_call>",))
"""Hermes 2 and 3, Qwen2.5, Qwen3, SmolLM3; SmolLM2 with a list."""

LLAMA3_JSON = ToolFormat("llama3_json", ("<|python_tag|>",), (";",), is_bare=True, arguments_key="parameters")
"""Llama 3.1 and 3.2: the whole answer is the call. Small ones separate several with a semicolon."""

MISTRAL_LIST = ToolFormat("mistral_list", ("[TOOL_CALLS]",))
"""Mistral's models up to the seventh version of their tokenizer."""

MISTRAL_NAMED = ToolFormat("mistral_named", ("[TOOL_CALLS]",), syntax=CallSyntax.NAMED)

QWEN3_CODER = ToolFormat("qwen3_coder", ("<tool_call>",), ("</tool_call>",), syntax=CallSyntax.PARAMETERS)
"""Qwen3-Coder, Qwen3.5."""

PHI4_MINI = ToolFormat("phi4_mini", ("<|tool_call|>", "functools"), ("<|/tool_call|>",))

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {row.name: row for row in (HERMES, LLAMA3_JSON, MISTRAL_LIST, MISTRAL_NAMED, QWEN3_CODER, PHI4_MINI)}
)
"""By name."""
