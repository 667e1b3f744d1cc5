"""Which form a model writes its calls in, from the template that it was taught with."""

from typing import get_args

import pytest

from weir.model.tokens.chat_template import read_template
from weir.runtime.stack.models import ToolFormatName
from weir_gateway.answers.formats import TOOL_FORMATS
from weir_gateway.tools.detection import choose_tool_format


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        (read_template("hermes"), (), "hermes"),
        ("{{ '<tool_call>\\n<function=' }}", (), "qwen3_coder"),
        ("{{ '<tool_call>' + name + '<arg_key>' }}", (), None),
        ("{{ '[TOOL_CALLS][' }}", (), "mistral_list"),
        ("{{ '[TOOL_CALLS]' }}", ("[ARGS]",), "mistral_named"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", (), "mistral_named"),
        ("{{ '<|tool_call|>' }}", (), "phi4_mini"),
        ("{{ '\"parameters\": ' }}<|eom_id|>", (), "llama3_json"),
        ("{{ tools }}", (), None),
        ("", (), None),
    ],
)
def test_the_form_is_found_in_the_template(template: str, tokens: tuple[str, ...], name: str | None) -> None:
    found = choose_tool_format("auto", template, tokens.__contains__)
    assert (None if found is None else found.name) == name


def test_an_operator_can_name_any_form_there_is() -> None:
    assert set(get_args(ToolFormatName)) == {"auto", *TOOL_FORMATS}
    assert choose_tool_format("phi4_mini", "<tool_call>", lambda _: False) is TOOL_FORMATS["phi4_mini"]
