"""A conversation becomes the prompt that the model's makers meant, and a template can do no harm."""

import json
import time
from pathlib import Path

import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from weir.core.errors import InvalidRequest
from weir.model.errors import ModelError
from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.source import ModelKind, ModelSource, resolve_model
from weir.model.tokens.chat_template import ChatTemplate, load_chat_template

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? <|im_end|>"}],
    [
        {"role": "user", "content": "a\n"},
        {"role": "assistant", "content": "{{ b }}"},
        {"role": "user", "content": "日本"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_built_in_models_prompt_is_that_of_transformers(
    messages: list[dict[str, str]], smollm2: transformers.PreTrainedTokenizerBase
) -> None:
    expected = smollm2.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert load_chat_template(resolve_model(SMOLLM2_135M.name)).render(messages) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_what_was_said_alone_is_that_of_transformers(
    messages: list[dict[str, str]], smollm2: transformers.PreTrainedTokenizerBase
) -> None:
    expected = smollm2.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
    rendered = load_chat_template(resolve_model(SMOLLM2_135M.name)).render(messages, add_generation_prompt=False)
    assert rendered == expected


def template(text: str) -> ChatTemplate:
    return ChatTemplate("m", text, {"bos_token": "<s>", "eos_token": "</s>"})


USER = [{"role": "user", "content": "Hi"}]


def test_a_template_sees_the_special_tokens_and_whitespace_is_trimmed_as_transformers_does() -> None:
    loop = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    text = "{{ bos_token }}\n" + loop
    assert template(text).render(USER) == "<s>\nHi\n"


# what the templates of Llama, Mistral and Qwen make use of
FEATURES = [
    "{% if tools is not none %}tools{% endif %}{% if not documents %}-{% endif %}{{ messages | length }}",
    "{% if tools is defined and tools %}x{% else %}{{ bos_token + messages[0]['content'] | trim }}{% endif %}",
    "{%- for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{%- endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{%- if messages[0]['role'] == 'system' %}{%- set loop_messages = messages[1:] %}{{ loop_messages[0].content }}"
    "{%- else %}{{ messages[-1].content.strip() }}{%- endif %}",
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("text", FEATURES)
def test_templates_mean_what_they_mean_to_transformers(text: str, messages: list[dict[str, str]]) -> None:
    expected, _ = render_jinja_template(
        [messages], chat_template=text, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert template(text).render(messages) == expected[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[7].content }}", "undefined|no element"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% include 'x' %}", "loader"),
        ("{% import '/etc/passwd' as x %}", "loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 10**15 }}", "of a size above 33554432"),
        ("{% for m in messages %}{{ [m] * 10**8 }}{% endfor %}", "of a size above 33554432"),
        ("{{ 9 ** (9 ** 9) }}", "of a size above 33554432"),
        ("{{ '%999999999d' % 1 }}", "pads values"),
        ("{{ '%999999999d' | format(1) }}", "pads values"),
        ("{{ '{:>999999999}'.format(1) }}", "pads values"),
        ("{{ 'x' | center(999999999) }}", "of a size above 33554432"),
        ("{{ 'x' | indent(width=999999999) }}", "of a size above 33554432"),
        ("{{ 'x'.zfill(999999999) }}", "of a size above 33554432"),
        ("{{ lipsum(99999) }}", "undefined"),
        ("{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}", "more than 33554432 characters"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_an_error_of_the_messages(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        template(text).render(USER)
    assert caught.value.violations[0].field == "messages"


TURNS = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ '' }}{% endfor %}{% endfor %}{% endfor %}"
)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "text",
    [
        TURNS,
        LOOPS.replace("BODY", "x"),
        LOOPS.replace("BODY", "{{ '' }}"),
        LOOPS.replace("BODY", ""),
        "{% macro f() %}" + LOOPS.replace("BODY", "") + "{% endmacro %}{{ f() }}",
        "{% set x %}" + LOOPS.replace("BODY", "x") + "{% endset %}{{ x }}",
    ],
    ids=["of turns", "writes", "writes nothing", "does nothing", "in a macro", "in a block"],
)
def test_a_template_that_goes_on_for_too_long_is_ended(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.model.tokens.chat_template._MAX_RENDER_S", 0.1)
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.1 s for them; send fewer at once") as caught:
        template(text).render(USER * 1000)
    assert time.thread_time() - began_s < 1.0
    assert caught.value.violations[0].field == "messages"
    assert template("{% for i in range(999) %}x{% endfor %}").render(USER) == "x" * 999, "each has its own time"


def test_a_conversation_as_long_as_may_be_is_far_from_the_bound_of_time() -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": "word " * 200} for index in range(1024)]
    began_s = time.thread_time()
    rendered = load_chat_template(resolve_model(SMOLLM2_135M.name)).render(messages)
    assert len(rendered) > 1 << 20
    assert time.thread_time() - began_s < 0.5


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        template("x").render([])


def test_a_model_without_a_template_refuses_conversations() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate("base", None, {}).render(USER)


def test_a_template_too_deep_to_be_compiled_is_found_on_load() -> None:
    with pytest.raises(ModelError, match="cannot be compiled"):
        template("{{ " + "(" * 3000 + " }}")


def test_a_broken_template_is_found_on_load() -> None:
    with pytest.raises(ModelError, match="line 2"):
        template("ok\n{% for %}")


def test_rendering_leaves_the_messages_as_they_were() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequest):
        template("{{ messages[0].update({'content': 'x'}) }}").render(messages)
    assert messages == USER


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": "{{ eos_token }}", "eos_token": {"content": "</e>"}}},
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "tools", "template": "wrong"},
                    {"name": "default", "template": "{{ eos_token }}"},
                ],
                "eos_token": "</e>",
            }
        },
        {
            "tokenizer_config.json": {"chat_template": "wrong", "eos_token": "</e>"},
            "chat_template.jinja": "{{ eos_token }}",
        },
    ],
    ids=["one", "several by name", "a file of its own"],
)
def test_a_folders_template_is_found_wherever_it_is_kept(files: dict[str, object], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    source = ModelSource("folder", tmp_path, ModelKind.HF_FOLDER)
    assert load_chat_template(source).render(USER) == "</e>"


def test_a_last_message_goes_on_where_its_content_ends() -> None:
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    text += "{% if add_generation_prompt %}<a>{% endif %}"
    messages = [*USER, {"role": "assistant", "content": " Sure: "}]
    assert template(text).render(messages, continue_final_message=True) == "<user>Hi</s><assistant>Sure:"
    with pytest.raises(InvalidRequest, match="it cannot go on"):
        template("x").render(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="it cannot go on"):
        template(text).render([*USER, {"role": "assistant", "content": " "}], continue_final_message=True)


def test_a_template_has_the_clients_variables_but_not_in_place_of_its_own() -> None:
    text = "{{ enable_thinking | default('unset') }}{{ messages | length }}"
    assert template(text).render(USER) == "unset1"
    assert template(text).render(USER, variables={"enable_thinking": False}) == "False1"
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs: '{name}' is the template's own"):
            template(text).render(USER, variables={name: "x"})
