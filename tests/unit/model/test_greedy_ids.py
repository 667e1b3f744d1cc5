"""Every architecture goes on with the 64 tokens of transformers' `generate`, in fp32. No head is tied: tied ones of
random weights say the last token again and again."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.unit.model.architectures import VARIANTS, save_variant
from tests.unit.model.tiny import LogitsProbe, TinyLlama, chunk, prompt_ids

NUM_NEW = 64
BY_NAME = {variant.name: variant for variant in VARIANTS}
ARCHITECTURES = ("llama", "mistral-sliding-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "phi3-longrope")
TABLE = (9, 2, 31, 4, 17, 40, 8, 33, 50)
PROMPT = prompt_ids(70, seed=3)
"""Longer than the windows (60), and than the original context of longrope (64)."""


def ids_of_transformers(tiny: TinyLlama) -> list[int]:
    config = tiny.model.generation_config
    assert config is not None
    config.eos_token_id, config.pad_token_id = None, 0  # a model of random weights has no end
    asked: Any = {"max_new_tokens": NUM_NEW, "do_sample": False}
    prompt, generate = torch.tensor([PROMPT]), cast("Any", tiny.model).generate
    with torch.inference_mode():
        # without a mask it takes the token 0 for padding
        found = generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
    return [int(token_id) for token_id in found[0, len(PROMPT) :]]


def ids_of_weir(tiny: TinyLlama) -> list[int]:
    """The prompt in two chunks, then token by token."""
    probe, ids = LogitsProbe(tiny.source), list(PROMPT)
    probe.run_alone(chunk(0, ids, 0, 33, TABLE))
    start = 33
    while len(ids) < len(PROMPT) + NUM_NEW:
        logits = probe.run_alone(chunk(0, ids, start, len(ids), TABLE))
        start = len(ids)
        ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = save_variant(tmp_path, BY_NAME[name], tie_word_embeddings=False)
    expected = ids_of_transformers(tiny)
    assert ids_of_weir(tiny) == expected
    assert len(set(expected)) > 8, "a model that repeats itself shows little"
