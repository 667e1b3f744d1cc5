"""Tools reach templates as transformers hands them over, and one that would drop them is no template for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from weir.core.errors import InvalidRequest
from weir.model.errors import ModelError
from weir.model.files.source import ModelKind, ModelSource
from weir.model.tokens.chat_template import ChatTemplate, checked_template, load_chat_template, read_template

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Das Wetter, <heute> & morgen.",
        "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": ["c", "f"]}}},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": text}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "no call": [{"role": "system", "content": "Be brief."}, USER],
    "one call": [USER, {"role": "assistant", "content": "", "tool_calls": [call(1, "get_weather", z="Köln", a="c")]}],
    "two calls with results": [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call(1, "get_weather", z='"{x}"'), call(2, "now")]},
        result(1, "Sun.\n"),
        result(2, "Noon."),
        {"role": "assistant", "content": "Sun at noon."},
        {"role": "user", "content": "Thanks"},
    ],
}
# what templates of the families do with tools, in words of our own
TEMPLATES = {
    "hermes": read_template("hermes"),
    "qwen": (
        "{%- if tools %}\n{{- '<tools>' }}\n{%- for tool in tools %}\n{{- '\\n' }}\n"
        "{{- tool | tojson }}\n{%- endfor %}\n{{- '\\n</tools>\\n' }}\n{%- endif %}\n"
        "{%- for m in messages %}\n{%- if m.tool_calls %}\n{%- for tool_call in m.tool_calls %}\n"
        "{%- if tool_call.function is defined %}\n"
        "{%- set tool_call = tool_call.function %}\n{%- endif %}\n"
        '{{- \'<tool_call>{"name": "\' + tool_call.name + \'", "arguments": \' }}\n'
        "{{- tool_call.arguments | tojson }}\n{{- '}</tool_call>' }}\n{%- endfor %}\n"
        "{%- elif m.role == 'tool' %}\n{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}\n"
        "{{- '[user]' }}\n{%- endif %}\n{{- m.content }}\n{%- else %}\n{{- m.role + ':' + m.content }}\n"
        "{%- endif %}\n{%- endfor %}"
    ),
    "llama": (
        "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{% endif %}"
        "{% for message in messages %}{% if 'tool_calls' in message %}{% for c in message.tool_calls %}"
        '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}{{ c.function.arguments | tojson }}{{ "}" }}'
        "{% endfor %}<|eom_id|>{% elif message.role == 'tool' or message.role == 'ipython' %}"
        "{% if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}"
        "{% else %}{{ message.content }}{% endif %}{% else %}{{ message['content'] | trim }}{% endif %}{% endfor %}"
    ),
    "mistral": (
        "{{ '[AVAILABLE_TOOLS][' }}{% for tool in tools or [] %}{% set tool = tool.function %}{{ '{\"function\": {' }}"
        "{% for key, val in tool.items() if key != 'return' %}{% if val is string %}"
        "{{ '\"' + key + '\": \"' + val + '\"' }}{% else %}{{ '\"' + key + '\": ' + val | tojson }}{% endif %}"
        "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ '}}' }}"
        "{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS][' }}"
        "{% for c in m.tool_calls %}{% set out = c.function | tojson %}{{ out[:-1] }}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
        "{{ ', \"id\": \"' + c.id + '\"}' }}{% endfor %}]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}"
        "{{ m.content | string }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def template(text: str, of_tools: str | None = None) -> ChatTemplate:
    return ChatTemplate("m", text, {"bos_token": "<s>", "eos_token": "</s>"}, of_tools)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[WEATHER], [WEATHER, NOW]], ids=["one", "two"])
def test_a_prompt_with_tools_is_that_of_transformers(
    family: str, conversation: str, tools: list[dict[str, Any]]
) -> None:
    messages = CONVERSATIONS[conversation]
    [expected], _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=TEMPLATES[family], add_generation_prompt=True
    )
    found = template(TEMPLATES[family])
    assert found.has_tools
    assert found.render(messages, tools=tools) == expected


def test_a_template_without_tools_is_refused_them_and_turns_of_them() -> None:
    plain = template(PLAIN)
    assert plain.render([USER]) == "user: Hi\n"
    for messages, tools, field in (
        ([USER], [NOW], "tools"),
        (CONVERSATIONS["one call"], [], r"messages\[1\]"),
        ([USER, result(1, "x")], [], r"messages\[1\]"),
    ):
        with pytest.raises(InvalidRequest, match=rf"^{field}: .*has no tools"):
            plain.render(messages, tools=tools)


def test_a_template_that_speaks_of_tools_and_shows_none_has_none() -> None:
    assert not template(PLAIN + "{% if tools %}There are tools.{% endif %}").has_tools


def test_a_template_that_refuses_the_question_is_asked_again_with_the_conversation() -> None:
    strict = template("{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}{{ tools | length }}")
    assert strict.render([USER, USER], tools=[NOW]) == "1"
    with pytest.raises(InvalidRequest, match="refuses them: two"):
        strict.render([USER], tools=[NOW])


def test_a_model_with_two_templates_has_one_for_tools(tmp_path: Path) -> None:
    of_tools = "{{ tools | tojson }}"
    entries = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": of_tools}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    found = load_chat_template(ModelSource("folder", tmp_path, ModelKind.HF_FOLDER))
    assert found.render([USER]) == "user: Hi\n"
    assert found.render([USER], tools=[NOW]) == json.dumps([NOW])
    assert found.tool_source == of_tools


def test_another_template_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ bos_token }}{{ tools | tojson }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN, "bos_token": "<b>"}))
    found = load_chat_template(ModelSource("folder", tmp_path, ModelKind.HF_FOLDER), str(path))
    assert found.render([USER], tools=[NOW]) == "<b>" + json.dumps([NOW])
    assert (checked_template(""), checked_template("hermes"), checked_template(str(path))) == ("", "hermes", str(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "must be a file of Jinja, or hermes"),
        (b"\xff", "must be a file"),
        (b"{% if %}", "line 1"),
        (b"x" * 2**21, "over"),
    ],
    ids=["missing", "no text", "no Jinja", "large"],
)
def test_a_template_that_cannot_be_used_is_named(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=said) as refused:
        checked_template(str(path))
    assert str(path) in str(refused.value)
