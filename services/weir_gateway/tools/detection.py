"""In which form a model writes its calls: read off the template it was taught with, or said by its operator."""

from collections.abc import Callable

from weir_gateway.answers.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    PHI4_MINI,
    QWEN3_CODER,
    TOOL_FORMATS,
    ToolFormat,
)

_LLAMA_SIGNS = ("<|python_tag|>", "<|eom_id|>", "ipython")


def choose_tool_format(named: str, template: str, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """`named`: a name of `TOOL_FORMATS`, or "auto". None: the template shows none that is known here."""
    return TOOL_FORMATS[named] if named != "auto" else _find_tool_format(template, has_token)


def _find_tool_format(template: str, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """`has_token`: whether the vocabulary has this marker as a token of its own."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template or has_token("[ARGS]") else MISTRAL_LIST
    if "<tool_call>" in template:
        if "<function=" in template:
            return QWEN3_CODER
        return None if "<arg_key>" in template else HERMES  # GLM's, which is not known here
    if "<|tool_call|>" in template:
        return PHI4_MINI
    if '"parameters"' in template and any(sign in template for sign in _LLAMA_SIGNS):
        return LLAMA3_JSON
    return None
