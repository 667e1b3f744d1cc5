"""A GGUF file of every architecture gives the logits of the model that it was converted from."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.unit.model.architectures import LINEAR_SCALING, LLAMA3_SCALING, VARIANTS, save_variant
from tests.unit.model.gguf_copy import add_metadata, gguf_name, metadata_of, unpermuted, write_gguf
from tests.unit.model.k_quants import BLOCK, random_blocks, values_of
from tests.unit.model.tiny import LogitsProbe, TinyLlama, chunk, prompt_ids

from weir.model.architecture import GivenScaling, LinearScaling, LongRopeScaling, ModelConfig, SlidingWindow
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.embedding_scale import FloatType, embedding_scale
from weir.model.files.gguf_tensors import GgufTensors
from weir.model.files.source import ModelSource, resolve_model

TABLE = (9, 2, 31, 4, 17, 40, 8, 33, 50, 21, 5, 60, 12)
LENGTH = 200
F32 = gguf.GGMLQuantizationType.F32
BY_NAME = {variant.name: variant for variant in VARIANTS}
# Sliding windows are not written into GGUF files; scaling is written in another way there (below).
CONVERTIBLE = [v for v in VARIANTS if "sliding-window" not in v.name and "scaling" not in v.name and v.name != "gemma3"]


def assert_same_logits(source: ModelSource, tiny: TinyLlama) -> None:
    ids = prompt_ids(LENGTH, seed=1)
    probe = LogitsProbe(source)
    pieces = [probe.run_alone(chunk(0, ids, 0, 65, TABLE)), probe.run_alone(chunk(0, ids, 65, LENGTH, TABLE))]
    torch.testing.assert_close(torch.cat(pieces), tiny.logits(ids), atol=1e-4, rtol=0)


def converted(tmp_path: Path, name: str, **overrides: object) -> tuple[ModelSource, TinyLlama]:
    tiny = save_variant(tmp_path / "hf", BY_NAME[name])
    write_gguf(tiny, tmp_path / "tiny.gguf", F32, overrides)
    return resolve_model(str(tmp_path / "tiny.gguf")), tiny


def without_place(config: ModelConfig) -> dict[str, object]:
    """What both forms say alike; fp32 metadata have rounded epsilon."""
    fields: dict[str, object] = {name: getattr(config, name) for name in ModelConfig.__slots__}
    if isinstance(config.rotary_scaling, LongRopeScaling):  # rounded too
        fields["rotary_scaling"] = config.rotary_scaling.is_long
    return fields | {"bos_token_id": None, "rms_norm_eps": pytest.approx(config.rms_norm_eps)}


@pytest.mark.parametrize("variant", CONVERTIBLE, ids=lambda variant: variant.name)
def test_every_position_has_the_logits_of_transformers(variant: Any, tmp_path: Path) -> None:
    source, tiny = converted(tmp_path, variant.name)
    assert without_place(load_model_config(source)) == without_place(load_model_config(tiny.source))
    assert_same_logits(source, tiny)


@pytest.mark.parametrize("name", ["llama-linear-scaling", "qwen2-linear-scaling"])
@pytest.mark.parametrize("is_old_key", [False, True], ids=["type-and-factor", "scale-linear"])
def test_linear_scaling_is_read_from_metadata(name: str, is_old_key: bool, tmp_path: Path) -> None:
    prefix = name.split("-", maxsplit=1)[0]
    factor = LINEAR_SCALING["factor"]
    keys = {f"{prefix}.rope.scaling.type": "linear", f"{prefix}.rope.scaling.factor": factor}
    source, tiny = converted(tmp_path, name, **({f"{prefix}.rope.scale_linear": factor} if is_old_key else keys))
    assert load_model_config(source).rotary_scaling == LinearScaling(2.5)
    assert_same_logits(source, tiny)


def test_a_factor_counts_for_nothing_where_the_type_is_none(tmp_path: Path) -> None:
    source, tiny = converted(tmp_path, "llama", **{"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0})
    assert_same_logits(source, tiny)


def llama3_divisors(tiny: TinyLlama) -> list[float]:
    """What llama.cpp's converter writes: by how much transformers' frequencies are divided."""
    unscaled = 1.0 / 5000.0 ** (np.arange(0, 16, 2) / 16)
    scaled: np.ndarray[Any, Any] = tiny.model.model.rotary_emb.inv_freq.double().numpy()
    return (unscaled / scaled).tolist()  # type: ignore[no-any-return]


def test_llama3_scaling_is_read_from_its_tensor_of_divisors(tmp_path: Path) -> None:
    tiny = save_variant(tmp_path / "hf", BY_NAME["llama-llama3-scaling"])
    divisors = llama3_divisors(tiny)
    assert (min(divisors), max(divisors)) == pytest.approx((1.0, LLAMA3_SCALING["factor"]), rel=1e-6)
    write_gguf(tiny, tmp_path / "tiny.gguf", F32, {"rope_freqs.weight": divisors})
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    scaling = load_model_config(source).rotary_scaling
    assert isinstance(scaling, GivenScaling)
    assert scaling.divisors == pytest.approx(divisors)
    assert_same_logits(source, tiny)


def test_a_linear_factor_counts_on_top_of_divisors(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    tiny = save_variant(tmp_path / "hf", BY_NAME["llama"])
    write_gguf(tiny, tmp_path / "tiny.gguf", F32, keys | {"rope_freqs.weight": [1.0] * 4 + [3.0] * 4})
    scaling = load_model_config(resolve_model(str(tmp_path / "tiny.gguf"))).rotary_scaling
    assert scaling == GivenScaling((2.0,) * 4 + (6.0,) * 4)


@pytest.mark.parametrize("divisors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")]])
def test_divisors_that_cannot_be_are_refused(divisors: list[float], tmp_path: Path) -> None:
    tiny = save_variant(tmp_path / "hf", BY_NAME["llama"])
    write_gguf(tiny, tmp_path / "tiny.gguf", F32, {"rope_freqs.weight": divisors})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight has type 0 and shape \[7\]|divisor is (0.0|nan)"):
        load_model_config(resolve_model(str(tmp_path / "tiny.gguf")))


@pytest.mark.parametrize("offset", [2**64 - 1, 2**63, 2**62, 1 << 20])
def test_divisors_that_lie_outside_of_the_file_are_refused(offset: int, tmp_path: Path) -> None:
    tiny = save_variant(tmp_path / "hf", BY_NAME["llama"])
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, F32, {"rope_freqs.weight": [1.0] * 8})
    data = bytearray(path.read_bytes())
    # after the name: number of dimensions, one dimension, type
    start = data.index(b"rope_freqs.weight") + len(b"rope_freqs.weight") + 4 + 8 + 4
    data[start : start + 8] = offset.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"cut off inside tensor rope_freqs\.weight"):
        load_model_config(resolve_model(str(path)))


def test_a_window_in_the_metadata_bounds_the_context(tmp_path: Path) -> None:
    source, _ = converted(tmp_path, "mistral", **{"llama.attention.sliding_window": 100})
    assert load_model_config(source).max_context_tokens == 100


def test_what_a_file_of_gemma_3_does_not_say_is_known(tmp_path: Path) -> None:
    keys = {"gemma3.attention.sliding_window_pattern": None, "gemma3.rope.freq_base_swa": None}
    tiny = save_variant(tmp_path / "hf", BY_NAME["gemma3"], num_hidden_layers=7, layer_types=None)
    write_gguf(tiny, tmp_path / "tiny.gguf", F32, keys)
    window = load_model_config(resolve_model(str(tmp_path / "tiny.gguf"))).window
    assert window == SlidingWindow(60, (*(True,) * 5, False, True), 10_000.0)


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_their_width(name: str, num_layers: int, tmp_path: Path) -> None:
    tiny = save_variant(tmp_path / "hf", BY_NAME[name], num_hidden_layers=num_layers, layer_types=None)
    write_gguf(tiny, tmp_path / "tiny.gguf", F32)
    assert load_model_config(resolve_model(str(tmp_path / "tiny.gguf"))).query_pre_attn_scalar == 64 / 4


@pytest.mark.parametrize(
    ("hidden_size", "kept_as", "scale"),
    [(1152, "bfloat16", 34.0), (3584, "bfloat16", 59.75), (1152, "float16", 33.9375), (1152, None, 33.941125)],
)
def test_embeddings_are_scaled_as_their_type_rounds_it(
    hidden_size: int, kept_as: FloatType | None, scale: float
) -> None:
    assert embedding_scale(hidden_size, kept_as) == pytest.approx(scale, abs=1e-5)


def test_the_ends_of_a_turn_are_all_taken(tmp_path: Path) -> None:
    source, _ = converted(tmp_path, "llama", **{"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2})
    assert load_model_config(source).eos_token_ids == (2, 5)


@pytest.mark.parametrize("name", ["llama", "llama-attention-bias", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_integers_of_a_matrix_come_in_the_order_of_its_values(kind: str, name: str, tmp_path: Path) -> None:
    tiny = save_variant(tmp_path / "hf", BY_NAME[name])
    meant = write_gguf(tiny, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    tensors = GgufTensors(source.path, load_model_config(source))
    for matrix in ("q_proj", "k_proj", "v_proj"):
        blocks = tensors.try_read_blocks(f"model.layers.1.self_attn.{matrix}.weight")
        assert blocks is not None
        values = np.repeat(blocks.scales, 32, axis=1) * blocks.quants
        if blocks.minima is not None:
            values += np.repeat(blocks.minima, 32, axis=1)
        assert np.array_equal(values, meant[f"model.layers.1.self_attn.{matrix}.weight"])
    assert tensors.try_read_blocks("model.norm.weight") is None


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_k_quantized_files_give_the_logits_of_transformers_on_what_they_hold(
    kind: str, name: str, tmp_path: Path
) -> None:
    tiny = save_variant(tmp_path / "hf", BY_NAME[name], hidden_size=BLOCK, intermediate_size=BLOCK)
    config = tiny.model.config
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", arch=name)
    for key, value in metadata_of(config, name).items():
        add_metadata(writer, key, value)
    state = tiny.model.state_dict()
    for number, (tensor_name, parameter) in enumerate(state.items()):
        if parameter.ndim == 1:
            writer.add_tensor(gguf_name(tensor_name), parameter.numpy())
            continue
        blocks = random_blocks(kind, len(parameter), seed=number)
        writer.add_tensor(gguf_name(tensor_name), blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        values = values_of(kind, blocks)
        heads = {"q_proj": 4, "k_proj": 2}.get(tensor_name.split(".")[-2], 0) if name == "llama" else 0
        parameter.copy_(torch.from_numpy(unpermuted(values, heads) if heads else values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tiny.model.load_state_dict(state)
    assert_same_logits(resolve_model(str(tmp_path / "tiny.gguf")), tiny)
