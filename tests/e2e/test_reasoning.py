"""A model whose markers of reasoning are tokens of its own, through a whole stack: its weights are random, so that what
its answers keep to is the work of the stack alone."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tests.unit.model.architectures import VARIANTS, save_variant
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from weir.testing.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif opens %}<think>\n{% endif %}{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BUDGET = 12


def save_model(folder: Path) -> None:
    """Each byte is a token, and each marker is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    variant = next(variant for variant in VARIANTS if variant.name == "qwen3")
    save_variant(folder, variant, vocab_size=264, eos_token_id=ids["<|im_end|>"], bos_token_id=ids["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model") / "thinker"
    save_model(folder)
    flags = ("--model", str(folder), "--precision", "fp32", "--arena-bytes", str(64 << 20))
    with Stack(tmp_path_factory.mktemp("run"), flags=flags) as stack:
        yield stack


def ask(client: openai.OpenAI, seed: int, **fields: Any) -> Any:
    extra: dict[str, Any] = {"thinking_token_budget": BUDGET, **fields}
    return client.chat.completions.create(
        model="thinker",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=1.5,
        seed=seed,
        max_tokens=120,
        response_format=FORM,
        extra_body=extra,
    )


def parts_of(answer: Any) -> tuple[str, str, int]:
    message = answer.choices[0].message.model_dump()
    num_reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    return message.get("reasoning_content") or "", message["content"], num_reasoning


def test_a_model_reasons_within_its_budget_and_then_keeps_to_the_form(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=100)
    opened = {"chat_template_kwargs": {"opens": True}}
    alone = {seed: parts_of(ask(client, seed, **opened)) for seed in range(6)}
    for thoughts, content, num_reasoning in alone.values():
        jsonschema.validate(json.loads(content), SCHEMA)
        assert "think" not in thoughts
        assert num_reasoning <= BUDGET + 1
    assert max(num_reasoning for *_, num_reasoning in alone.values()) == BUDGET + 1
    assert len({content for _, content, _ in alone.values()}) > 1
    with ThreadPoolExecutor(len(alone)) as pool:
        together = dict(zip(alone, pool.map(lambda seed: parts_of(ask(client, seed, **opened)), alone), strict=True))
    assert together == alone
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking_token_budget": 0, **opened}):
        thoughts, content, num_reasoning = parts_of(ask(client, 1, **fields))
        jsonschema.validate(json.loads(content), SCHEMA)
        assert thoughts == ""
        assert num_reasoning <= 1  # the closing marker, where the prompt has the opening one
