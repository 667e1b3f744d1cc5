"""Every file form gives the weights that it holds, and says by name what it lacks."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from tests.unit.model.gguf_copy import write_gguf
from tests.unit.model.tiny import LogitsProbe, TinyLlama, chunk, prompt_ids, save_tiny_llama

from weir.model.architecture import tensor_shapes
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.dummy import shape_named
from weir.model.files.quant_blocks import try_split_blocks
from weir.model.files.source import resolve_model
from weir.model.torch.weights import (
    WeightFormat,
    fill_weights,
    filled_weights,
    load_weights,
    weights_bytes,
    weights_over,
)

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def assert_logits_equal(path: Path, tiny: TinyLlama) -> None:
    ids = prompt_ids(40, seed=3)
    found = LogitsProbe(resolve_model(str(path))).run(chunk(0, ids, 0, 40, (4, 2, 9)))[0]
    torch.testing.assert_close(found, tiny.logits(ids)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_gives_the_logits_of_transformers_on_what_it_holds(kind: str, tied: bool, tmp_path: Path) -> None:
    tiny = save_tiny_llama(tmp_path / "hf", tied=tied)
    meant = write_gguf(tiny, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    state = {name: torch.from_numpy(values.copy()) for name, values in meant.items()}
    tiny.model.load_state_dict(state, strict=not tied)
    assert_logits_equal(tmp_path / "tiny.gguf", tiny)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_folder_gives_the_logits_of_transformers(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    assert_logits_equal(tmp_path, save_tiny_llama(tmp_path, tied=tied, dtype=dtype))


def test_a_folder_of_several_files_is_one_model(tmp_path: Path) -> None:
    tiny = save_tiny_llama(tmp_path)
    rewrite(tmp_path, lambda tensors: None, num_files=3)
    assert_logits_equal(tmp_path, tiny)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_tensor_has_a_place_of_its_own_in_one_memory(tied: bool) -> None:
    config = replace(
        shape_named("tiny"),
        query_key_value_bias=True,
        attention_output_bias=True,
        query_key_norm=True,
        tie_word_embeddings=tied,
    )
    shapes = tensor_shapes(config)
    numbers = {name: float(number) for number, name in enumerate(shapes, 1)}
    kept = WeightFormat(torch.float32)
    memory = torch.zeros(weights_bytes(config, kept), dtype=torch.uint8)
    weights = weights_over(memory, kept, config)
    fill_weights(weights, config, lambda name: torch.full(shapes[name], numbers[name]))
    found = weights_over(memory, kept, config)
    assert torch.unique(found.output).tolist() == [numbers["model.embed_tokens.weight" if tied else "lm_head.weight"]]
    layer, prefix = found.layers[1], "model.layers.1.self_attn"
    query = config.num_heads * config.head_dim
    assert torch.unique(layer.query_key_value[:query]).tolist() == [numbers[f"{prefix}.q_proj.weight"]]
    assert torch.unique(layer.query_key_value[query]).tolist() == [numbers[f"{prefix}.k_proj.weight"]]
    assert torch.unique(layer.query_key_value[-1]).tolist() == [numbers[f"{prefix}.v_proj.weight"]]
    assert layer.query_key_value_bias is not None
    assert layer.query_key_value_bias[-1].item() == numbers[f"{prefix}.v_proj.bias"]
    values = torch.cat([torch.full((math.prod(shapes[name]),), number) for name, number in numbers.items()])
    filled = memory.view(torch.float32)
    assert torch.equal(filled[filled != 0].sort().values, values.sort().values), "nothing is overwritten"


def test_matrices_of_layers_are_quantized_a_row_at_a_time_and_all_else_stays() -> None:
    config = replace(shape_named("tiny"), query_key_value_bias=True, tie_word_embeddings=False)
    shapes, generator = tensor_shapes(config), torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    kept = WeightFormat(torch.float32, is_fp8=True)
    weights = filled_weights(torch.device("cpu"), kept, config, tensors.__getitem__)
    assert torch.equal(weights.output, tensors["lm_head.weight"])
    layer, prefix = weights.layers[1], "model.layers.1"
    assert layer.query_key_value_bias is not None
    assert torch.equal(layer.query_key_value_bias[-32:], tensors[f"{prefix}.self_attn.v_proj.bias"][-32:])
    stacked = torch.cat([tensors[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([tensors[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    for found, scales, meant in (
        (layer.query_key_value, layer.scales.query_key_value, stacked),
        (layer.attention_output, layer.scales.attention_output, tensors[f"{prefix}.self_attn.o_proj.weight"]),
        (layer.gate_up, layer.scales.gate_up, gate_up),
        (layer.down, layer.scales.down, tensors[f"{prefix}.mlp.down_proj.weight"]),
    ):
        assert found.dtype is torch.float8_e4m3fn
        assert scales is not None
        assert torch.equal(scales, meant.abs().amax(1) * (1 / 448))
        torch.testing.assert_close(found.float() * scales[:, None], meant, rtol=2**-4, atol=1e-4)


def test_bfloat16_is_not_widened_on_its_way_to_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is installed on Linux only")
    from weir.model.triton.load import load_on_device  # noqa: PLC0415

    tiny = save_tiny_llama(tmp_path, dtype=torch.bfloat16)

    def widen(*_: object) -> None:
        raise AssertionError("a copy in fp32")

    monkeypatch.setattr("weir.model.files.safetensors.SafetensorsFolder.read", widen)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    loaded = load_on_device(resolve_model(str(tmp_path)), "fp32", "interpreter", num_threads=1)
    meant = tiny.model.get_input_embeddings().weight
    assert torch.equal(loaded.weights.embedding, meant.float())


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], num_files: int = 1) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    path.unlink()
    change(tensors)
    names = sorted(tensors)
    for number in range(num_files):
        part = {name: tensors[name] for name in names[number::num_files]}
        safetensors.torch.save_file(part, folder / f"model-{number}.safetensors")


def load_changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    save_tiny_llama(folder)
    rewrite(folder, change)
    source = resolve_model(str(folder))
    load_weights(source, load_model_config(source))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_changed(tmp_path, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias is not part of a model of its architecture"
    ):
        load_changed(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}))


def test_a_misshaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[63\], expected \[64\]"):
        load_changed(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))


def test_a_tensor_of_another_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I32; Weir reads F32, F16, BF16"):
        load_changed(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"is in copy\.safetensors too"):
        load_weights(source, load_model_config(source))


def test_buffers_that_old_checkpoints_saved_are_passed_over(tmp_path: Path) -> None:
    load_changed(
        tmp_path,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}),
    )


@pytest.mark.parametrize(("type_id", "name"), [(10, "type Q2_K"), (199, "unknown type 199")])
def test_a_gguf_type_that_weir_does_not_read_is_named(type_id: int, name: str, tiny: TinyLlama, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32)
    data = bytearray(path.read_bytes())
    entry = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    data[entry : entry + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(data)
    source = resolve_model(str(path))
    with pytest.raises(ModelError, match=rf"tensor token_embd\.weight has {name}; Weir reads F32, F16"):
        load_weights(source, load_model_config(source))


@pytest.mark.parametrize("offset", [2**64 - 1, 2**63, 2**62, 1 << 30])
@pytest.mark.parametrize("dimensions", [None, (2**64 - 1, 2**64 - 1), (0, 2**63)])
def test_a_tensor_that_lies_outside_of_its_gguf_file_or_cannot_be_so_large_is_refused(
    dimensions: tuple[int, int] | None, offset: int, tiny: TinyLlama, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32)
    data = bytearray(path.read_bytes())
    entry = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4
    data[entry + 2 * 8 + 4 : entry + 3 * 8 + 4] = offset.to_bytes(8, "little")
    if dimensions is not None:
        data[entry : entry + 2 * 8] = b"".join(number.to_bytes(8, "little") for number in dimensions)
    path.write_bytes(data)
    source = resolve_model(str(path))
    with pytest.raises(ModelError, match=r"cut off inside tensor blk\.0\.attn_q\.weight|has shape .*, expected"):
        load_weights(source, load_model_config(source))


def test_a_cut_off_gguf_file_is_refused_wherever_it_ends(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    for num_bytes in [0, 3, 4, 7, 20, 24, 100, 1000, 4000, len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:num_bytes])
        source = resolve_model(str(path))
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            load_weights(source, load_model_config(source))


def test_a_broken_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="broken safetensors"):
        load_weights(source, load_model_config(source))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load_weights(source, load_model_config(source))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_integers_of_a_file_give_the_values_of_the_gguf_library_to_the_bit(kind: str) -> None:
    values = np.random.default_rng(5).standard_normal((7, 96), dtype=np.float32)
    type_id = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(values, type_id)
    blocks = try_split_blocks(kind, raw)
    assert blocks is not None
    scales = np.repeat(blocks.scales, 32, axis=1)
    found = scales * blocks.quants.astype(np.float32)
    if blocks.minima is not None:
        found = found + np.repeat(blocks.minima, 32, axis=1)
    # (q - 8) * scale is computed by the library, q * scale - 8 * scale here: equal, since the scale has 11 bits
    assert np.array_equal(found, gguf.dequantize(raw, type_id))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q6_K"])
def test_other_types_have_no_integers_to_take_over(kind: str) -> None:
    assert try_split_blocks(kind, np.zeros((2, 256), np.uint8)) is None
