"""Random weights of a known shape serve requests as a model does."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.model.tiny import LogitsProbe, chunk

from weir.model.architecture import tensor_shapes
from weir.model.errors import ModelError, ModelNotFound
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.dummy import MODEL_SHAPES, DummyTensors
from weir.model.files.source import ModelKind, resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import Tokenizer, load_tokenizer
from weir.model.torch.weights import available_bytes, dummy_tensor_on, load_weights

TINY = resolve_model("dummy:tiny")

# parameters in millions, as the model cards on Hugging Face print them
PUBLISHED_MILLIONS = {
    "smollm2-135m": 134.5,
    "smollm2-360m": 361.8,
    "smollm2-1.7b": 1711.4,
    "llama-2-7b": 6738.4,
    "llama-3.2-1b": 1235.8,
    "llama-3.2-3b": 3212.7,
    "llama-3.1-8b": 8030.3,
    "llama-3.1-70b": 70_553.7,
    "mistral-7b-v0.1": 7241.7,
    "mistral-7b-v0.3": 7248.0,
    "qwen2.5-0.5b": 494.0,
    "qwen2.5-1.5b": 1543.7,
    "qwen2.5-7b": 7615.6,
    "qwen2.5-14b": 14_770.0,
    "qwen3-0.6b": 596.0,
    "qwen3-1.7b": 1720.6,
    "qwen3-4b": 4022.5,
    "qwen3-8b": 8190.7,
    "gemma2-2b": 2614.3,
    "gemma3-270m": 268.1,
    "gemma3-1b": 999.9,
    "phi-4-mini": 3836.0,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY)


def test_every_shape_but_our_own_has_a_published_size() -> None:
    assert MODEL_SHAPES.keys() - PUBLISHED_MILLIONS.keys() == {"tiny"}


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_a_shape_has_as_many_parameters_as_the_model(name: str) -> None:
    num_parameters = sum(int(np.prod(shape)) for shape in tensor_shapes(MODEL_SHAPES[name]).values())
    assert num_parameters / 1e6 == pytest.approx(PUBLISHED_MILLIONS[name], abs=0.1)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match=r"model_shape 'llama-9' is not known; one of tiny, .*llama-3\.1-8b"):
        resolve_model("dummy:llama-9")


def test_a_dummy_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (TINY.kind, TINY.name) == (ModelKind.DUMMY, "dummy:tiny")
    config = load_model_config(TINY)
    assert config == MODEL_SHAPES["tiny"]
    assert load_weights(TINY, config).output.shape == (1024, 128)


def test_weights_are_the_same_in_every_process_and_different_in_every_tensor() -> None:
    config = MODEL_SHAPES["tiny"]
    first, again, other = DummyTensors(config), DummyTensors(config), DummyTensors(config, seed=1)
    names = [name for name in first.shapes() if not name.endswith("norm.weight")]
    for name in reversed(names):
        assert np.array_equal(first.read(name), again.read(name))
        assert not np.array_equal(first.read(name), other.read(name))
    assert len({first.read(name).ravel()[0] for name in names}) == len(names)
    # written down once: a change of the numbers would change every dummy's answers from one version to the next
    found = first.read("model.embed_tokens.weight")[0, :3].tolist()
    assert found == pytest.approx([0.02852175, -0.01962902, -0.02536552], abs=1e-7)


def test_weights_have_the_spread_of_a_freshly_made_model() -> None:
    tensors = DummyTensors(MODEL_SHAPES["tiny"])
    values = tensors.read("model.embed_tokens.weight")
    assert values.dtype == np.float32
    assert values.std() == pytest.approx(0.02, rel=0.01)
    assert abs(values.mean()) < 1e-3
    assert (tensors.read("model.norm.weight") == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_made_on_a_device_one_by_one(dtype: torch.dtype) -> None:
    config = MODEL_SHAPES["tiny"]
    device = torch.device("cpu")
    shapes = tensor_shapes(config)
    made = {name: dummy_tensor_on(device, dtype, name, shape) for name, shape in shapes.items()}
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == shapes
    assert {tensor.dtype for tensor in made.values()} == {dtype}
    again = {name: dummy_tensor_on(device, dtype, name, shape) for name, shape in reversed(shapes.items())}
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.items())
    assert not torch.equal(made["model.layers.0.mlp.up_proj.weight"], made["model.layers.1.mlp.up_proj.weight"])
    embedding = made["model.embed_tokens.weight"].float()
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.01)
    assert (made["model.norm.weight"] == 1).all()


def test_a_step_gives_finite_logits_that_depend_on_the_prompt() -> None:
    probe = LogitsProbe(TINY)
    ids = list(range(40))
    first = probe.run(chunk(0, ids, 0, 40, (1, 2, 3)))[0]
    other = probe.run(chunk(0, ids[::-1], 0, 40, (1, 2, 3)))[0]
    assert torch.isfinite(first).all()
    assert not torch.allclose(first, other, atol=1e-3)


@given(text=st.text())
def test_text_is_its_bytes(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_every_id_stands_for_bytes_of_its_own(tokenizer: Tokenizer) -> None:
    found = [tokenizer.decode_bytes([token_id], skip_special=False) for token_id in range(1024)]
    assert all(found)
    assert len(set(found)) == 1024
    assert all(re.fullmatch(rb" [a-z]+", word) for word in found[256:])


def test_a_conversation_becomes_a_prompt() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    template = load_chat_template(TINY)
    assert template.render(messages) == "system: Be brief.\nuser: Hi\nassistant:"
    assert template.render(messages, add_generation_prompt=False) == "system: Be brief.\nuser: Hi\n"


def test_digests_tell_dummies_apart_from_each_other() -> None:
    digests = {model_digest(resolve_model(f"dummy:{name}"), "fp32") for name in MODEL_SHAPES}
    assert len(digests) == len(MODEL_SHAPES)
    assert model_digest(TINY, "fp32") == model_digest(resolve_model("dummy:tiny"), "fp32")
    assert model_digest(TINY, "int8") not in digests


def test_weights_that_no_machine_has_the_memory_for_are_refused_at_once() -> None:
    source = resolve_model("dummy:llama-3.1-70b")
    with pytest.raises(ModelError, match=r"llama-3\.1-70b' needs 262\.8 GiB for its weights at 4 bytes each, but only"):
        load_weights(source, load_model_config(source))


def test_the_memory_there_is_is_bounded_by_the_control_group(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    assert available_bytes(meminfo, limit) == float("inf")
    meminfo.write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   6 kB\n")
    assert available_bytes(meminfo, limit) == 6144
    limit.write_text("max\n")
    assert available_bytes(meminfo, limit) == 6144
    limit.write_text("4000\n")
    assert available_bytes(meminfo, limit) == 4000
