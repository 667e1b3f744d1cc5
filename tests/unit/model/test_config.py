"""Configurations are read from either form, and what Weir cannot serve is refused by name."""

import contextlib
import json
import random
import time
from pathlib import Path

import gguf
import pytest
from tests.unit.model.gguf_copy import write_gguf
from tests.unit.model.tiny import TinyLlama

from weir.model.errors import ModelError, ModelNotFound
from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.gguf import GgufFile, read_gguf
from weir.model.files.source import ModelKind, resolve_model


def hf_config_of(tiny: TinyLlama) -> dict[str, object]:
    config: dict[str, object] = json.loads((tiny.folder / "config.json").read_text())
    return config


def write_hf(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_both_forms_of_one_model_say_the_same(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32, {"tokenizer.ggml.bos_token_id": 1})
    from_gguf = load_model_config(resolve_model(str(path)))
    from_folder = load_model_config(tiny.source)
    assert from_gguf.rms_norm_eps == pytest.approx(from_folder.rms_norm_eps)
    assert repr(from_gguf).replace(repr(from_gguf.rms_norm_eps), "1e-05") == repr(from_folder)
    assert from_folder.page_geometry.page_bytes == 2 * 2 * 2 * 16 * 32 * 4


def test_the_built_in_models_configuration() -> None:
    config = load_model_config(resolve_model(SMOLLM2_135M.name))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_context_tokens, config.eos_token_ids) == (49_152, 8192, (2,))


def test_reading_a_header_is_quick() -> None:
    source = resolve_model(SMOLLM2_135M.name)
    start_s = time.process_time()
    read_gguf(source.path, with_texts=False)
    assert time.process_time() - start_s < 1.0, "gguf.GGUFReader takes 2.4 s; this must stay far from that"


def test_a_header_is_read_once_until_the_file_is_another(
    tiny: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def count(path: Path, *, with_texts: bool) -> GgufFile:
        reads.append(path)
        return read_gguf(path, with_texts=with_texts)

    monkeypatch.setattr("weir.model.files.config.read_gguf", count)
    path, other = tmp_path / "tiny.gguf", tmp_path / "other.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32, {"llama.rope.freq_base": 10_000.0})
    write_gguf(tiny, other, gguf.GGMLQuantizationType.F32, {"llama.rope.freq_base": 20_000.0})
    source = resolve_model(str(path))
    assert [load_model_config(source).rope_theta for _ in range(3)] == [10_000.0] * 3
    assert reads == [path]
    other.replace(path)
    assert [load_model_config(source).rope_theta for _ in range(3)] == [20_000.0] * 3
    assert reads == [path, path]


def test_older_rope_settings_are_read(tiny: TinyLlama, tmp_path: Path) -> None:
    config = hf_config_of(tiny)
    config.pop("rope_parameters", None)
    folder = write_hf(tmp_path, config | {"rope_theta": 77_000.0, "rope_scaling": None})
    assert load_model_config(resolve_model(folder)).rope_theta == 77_000.0


def test_the_ends_of_generation_config_win(tiny: TinyLlama, tmp_path: Path) -> None:
    folder = write_hf(tmp_path, hf_config_of(tiny))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_model_config(resolve_model(folder)).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"model_type": "gemma"},
            "model_type 'gemma'; Weir serves 'llama', 'mistral', 'qwen2', 'qwen3', 'gemma2', 'gemma3_text', 'phi3'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias True is not supported, only False"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8' is not supported.*'gptq'.*GGUF files"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported.*'linear' and 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling has no low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "linear rotary scaling: factor is 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported, only 1.0"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected an integer"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 3}, "no multiple of num_kv_heads 3"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    change: dict[str, object], problem: str, tiny: TinyLlama, tmp_path: Path
) -> None:
    folder = write_hf(tmp_path, hf_config_of(tiny) | change)
    with pytest.raises(ModelError, match=problem):
        load_model_config(resolve_model(folder))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"general.architecture": "gemma"},
            "general.architecture 'gemma'; Weir serves 'llama', 'qwen2', 'qwen3', 'gemma2', 'gemma3', 'phi3'",
        ),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count is 16; Weir serves 32"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length is 16; Weir serves 32"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported, only 'none', 'linear'"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.embedding_length": None}, "has no llama.embedding_length"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length is str '64', expected int"),
    ],
)
def test_a_gguf_file_that_cannot_be_served_is_refused(
    change: dict[str, object], problem: str, tiny: TinyLlama, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32, change)
    with pytest.raises(ModelError, match=problem):
        load_model_config(resolve_model(str(path)))


def test_the_reader_agrees_with_the_gguf_package(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.Q8_0, {"general.flag": True, "general.scores": [1.5, -2.5]})
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata == {
        name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
    }
    assert {name: tensor.offset for name, tensor in ours.tensors.items()} == {
        tensor.name: tensor.data_offset for tensor in theirs.tensors
    }
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {
        tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in theirs.tensors
    }


def test_without_texts_a_header_lacks_its_arrays_of_strings_and_nothing_else(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.Q8_0, {"general.tags": ["a", "b"], "general.scores": [1.5]})
    whole, without = read_gguf(path), read_gguf(path, with_texts=False)
    assert whole.metadata["general.tags"] == ["a", "b"]
    assert without.metadata == {
        name: value
        for name, value in whole.metadata.items()
        if not (isinstance(value, list) and isinstance(value[0], str))
    }
    assert without.tensors == whole.tensors


def test_a_header_with_any_byte_changed_is_read_or_refused_and_nothing_else(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    chance = random.Random(5)
    num_read = 0
    for _ in range(1000):
        data = bytearray(whole)
        data[chance.randrange(3000)] = chance.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(ModelError):
            load_model_config(resolve_model(str(path)))
            num_read += 1
    assert 0 < num_read < 1000


def test_names_and_paths_are_told_apart(tiny: TinyLlama, tmp_path: Path) -> None:
    assert resolve_model(str(tiny.folder)).kind is ModelKind.HF_FOLDER
    path = tmp_path / "my-model.gguf"
    path.write_bytes(b"GGUF")
    source = resolve_model(str(path))
    assert (source.name, source.kind) == ("my-model", ModelKind.GGUF)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("smollm2-135m", "not in the model cache .*run `weir pull smollm2-135m`"),
        ("gpt-17", "no model 'gpt-17'.*weir pull smollm2-135m"),
        ("notes.txt", "not a .gguf file"),
        (".", "without config.json"),
    ],
)
def test_a_model_that_is_not_there_says_what_to_do(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelNotFound, match=problem):
        resolve_model(name, cache_dir=tmp_path / "cache")


def test_a_digest_changes_with_every_byte_and_the_precision_but_not_the_place(tiny: TinyLlama, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for path in paths:
        write_gguf(tiny, path, gguf.GGMLQuantizationType.Q8_0)
    data = bytearray(paths[2].read_bytes())
    data[-1] ^= 1
    paths[2].write_bytes(data)
    first, same, other = (model_digest(resolve_model(str(path)), "fp32") for path in paths)
    assert first == same
    assert len({first, other, model_digest(resolve_model(str(paths[0])), "int8")}) == 3
    assert model_digest(tiny.source, "fp32") == model_digest(tiny.source, "fp32")
