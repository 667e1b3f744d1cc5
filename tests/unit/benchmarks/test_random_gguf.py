"""Random GGUF files are of the shape that was asked for, and a model can be made of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.model.tiny import LogitsProbe, chunk

from benchmarks.random_gguf import write_random_gguf
from weir.model.architecture import Llama3Scaling, ModelConfig, rotary_frequencies, tensor_shapes
from weir.model.files.config import load_model_config
from weir.model.files.dummy import SPREAD, shape_named
from weir.model.files.gguf_tensors import GgufTensors
from weir.model.files.source import resolve_model

TINY = shape_named("tiny")
SHAPES = {
    "llama": TINY,
    "untied": replace(TINY, tie_word_embeddings=False),
    "scaled": replace(TINY, rotary_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    "qwen2": replace(TINY, query_key_value_bias=True),
    "qwen3": replace(TINY, query_key_norm=True),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_the_file_has_the_shape_that_was_asked_for(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random_gguf(config, path)
    found = load_model_config(resolve_model(str(path)))
    without_ends = replace(config, eos_token_ids=found.eos_token_ids, rms_norm_eps=found.rms_norm_eps)
    assert replace(without_ends, rotary_scaling=None) == replace(found, rotary_scaling=None)
    assert found.rms_norm_eps == pytest.approx(config.rms_norm_eps)
    np.testing.assert_allclose(rotary_frequencies(found), rotary_frequencies(config), rtol=1e-6)
    assert GgufTensors(path, found).shapes() == tensor_shapes(config)


def test_a_shape_that_the_file_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GGUF file of them is written here"):
        write_random_gguf(shape_named("gemma3-270m"), tmp_path / "random.gguf")


def test_numbers_are_spread_as_a_dummys_and_change_with_the_seed(tmp_path: Path) -> None:
    read = []
    for seed in (0, 0, 1):
        write_random_gguf(TINY, tmp_path / "random.gguf", seed)
        read.append(GgufTensors(tmp_path / "random.gguf", TINY).read("model.layers.0.mlp.up_proj.weight"))
    first, again, other = read
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9
    assert np.abs(first).max() <= SPREAD * 1.001
    assert first.std() == pytest.approx(SPREAD / 3**0.5, rel=0.1)


def test_a_prompt_gives_logits_that_tell_its_tokens_apart(tmp_path: Path) -> None:
    write_random_gguf(TINY, tmp_path / "random.gguf")
    logits = LogitsProbe(resolve_model(str(tmp_path / "random.gguf"))).run_alone(
        chunk(0, list(range(40)), 0, 40, (0, 1, 2))
    )
    assert logits.isfinite().all()
    assert logits.std() > 0
