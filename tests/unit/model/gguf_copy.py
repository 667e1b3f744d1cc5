"""Writes a tiny model of transformers as a GGUF file, the way llama.cpp's converter does."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tests.unit.model.tiny import VOCAB_SIZE, TinyLlama

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
GEMMAS = ("gemma2", "gemma3")

Array = npt.NDArray[np.float32]


def gguf_name(name: str, architecture: str = "llama") -> str:
    names = NAMES | GEMMA_NAMES if architecture in GEMMAS else NAMES
    name, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is not None:
        return f"blk.{match.group(1)}.{names[match.group(2)]}.{kind}"
    return f"{TOP_NAMES[name]}.{kind}"


def permuted(rows: Array, num_heads: int) -> Array:
    """llama.cpp's convert_hf_to_gguf.py: LlamaModel.permute, of weights and of biases."""
    heads = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: Array, num_heads: int) -> Array:
    pairs = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    tiny: TinyLlama, path: Path, kind: gguf.GGMLQuantizationType, overrides: Mapping[str, object] | None = None
) -> dict[str, Array]:
    """Returns what the file says after dequantizing, by transformers' names, un-permuted. Norms and biases stay F32.

    `overrides`: metadata to change; None leaves a key out. `rope_freqs.weight` in it is a tensor.
    """
    config = tiny.model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, arch=architecture)
    overrides = dict(overrides or {})
    if config.model_type == "phi3" and config.rope_parameters["rope_type"] == "longrope":
        overrides |= longrope_overrides(config)
    for name in ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"):
        divisors = overrides.pop(name, None)
        if divisors is not None:
            writer.add_tensor(name, np.array(divisors, dtype=np.float32))
    for key, value in (metadata_of(config, architecture) | overrides).items():
        add_metadata(writer, key, value)
    meant: dict[str, Array] = {}
    for name, parameter in tiny.model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            meant[name] = add_tensor(writer, name, parameter.numpy(), kind, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def metadata_of(config: Any, architecture: str) -> dict[str, object]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if architecture == "gemma2":
        numbers |= {
            "attention.sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    if architecture == "phi3":
        numbers["attention.sliding_window"] = config.sliding_window or 0
    numbers |= (
        gemma3_numbers(config)
        if architecture == "gemma3"
        else {"rope.freq_base": config.rope_parameters["rope_theta"], "rope.dimension_count": head_dim}
    )
    return {f"{architecture}.{name}": number for name, number in numbers.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*(chr(0x100 + number) for number in range(VOCAB_SIZE - 1)), "\u0100\u0101"],
        "tokenizer.ggml.merges": ["\u0100 \u0101"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def longrope_overrides(config: Any) -> dict[str, object]:
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    growth = config.max_position_embeddings / original
    return {
        "rope_factors_short.weight": rope["short_factor"],
        "rope_factors_long.weight": rope["long_factor"],
        "phi3.rope.scaling.original_context_length": original,
        "phi3.rope.scaling.attn_factor": math.sqrt(1 + math.log(growth) / math.log(original)),
        "phi3.rope.dimension_count": 2 * len(rope["short_factor"]),
    }


def gemma3_numbers(config: Any) -> dict[str, object]:
    """The files say nothing of the scale of scores, and nothing of dimensions that rotate."""
    rope = config.rope_parameters
    numbers = {
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": config.layer_types.index("full_attention") + 1,
    }
    if rope["full_attention"]["rope_type"] == "linear":
        numbers |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["full_attention"]["factor"]}
    return numbers


def add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def add_tensor(
    writer: gguf.GGUFWriter, name: str, values: Array, kind: gguf.GGMLQuantizationType, config: Any
) -> Array:
    num_heads = num_permuted_heads(name, config)
    architecture = ARCHITECTURES[config.model_type]
    stored = permuted(values, num_heads) if num_heads else values
    if architecture in GEMMAS and name.endswith("norm.weight"):
        stored = stored + np.float32(1.0)
    if values.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    raw = gguf.quantize(stored, kind)
    writer.add_tensor(gguf_name(name, architecture), raw, raw_dtype=kind)
    read_back: Array = gguf.dequantize(raw, kind).reshape(values.shape).astype(np.float32)
    return unpermuted(read_back, num_heads) if num_heads else read_back


def num_permuted_heads(name: str, config: Any) -> int:
    """0: the converter leaves the rows where they are."""
    if ARCHITECTURES[config.model_type] != "llama":
        return 0
    heads: int = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2], 0
    )
    return heads
