"""Writes a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tests.unit.model.tiny import VOCAB_SIZE, TinyLlama

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Array = npt.NDArray[np.float32]


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is not None:
        return f"blk.{match.group(1)}.{NAMES[match.group(2)]}.weight"
    return f"{TOP_NAMES[name]}.weight"


def permuted(matrix: Array, num_heads: int) -> Array:
    """llama.cpp's convert_hf_to_gguf.py: LlamaModel.permute."""
    heads = matrix.reshape(num_heads, 2, matrix.shape[0] // num_heads // 2, *matrix.shape[1:])
    return heads.swapaxes(1, 2).reshape(matrix.shape)


def write_gguf(
    tiny: TinyLlama, path: Path, kind: gguf.GGMLQuantizationType, overrides: Mapping[str, object] | None = None
) -> dict[str, Array]:
    """Returns what the file says after dequantizing, by transformers' names, un-permuted. Norms stay F32.

    `overrides`: metadata to change; None leaves a key out.
    """
    config = tiny.model.config
    writer = gguf.GGUFWriter(path, arch="llama")
    metadata: dict[str, object] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": 32,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": 32,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [chr(0x100 + number) for number in range(VOCAB_SIZE)],
        "tokenizer.ggml.merges": ["\u0100 \u0101"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    for key, value in (metadata | dict(overrides or {})).items():
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
    writer: gguf.GGUFWriter, name: str, values: Array, kind: gguf.GGMLQuantizationType, config: object
) -> Array:
    num_heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    stored = permuted(values, num_heads) if num_heads else values
    if values.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    raw = gguf.quantize(stored, kind)
    writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    read_back: Array = gguf.dequantize(raw, kind).reshape(values.shape).astype(np.float32)
    if num_heads:
        pairs = values.shape[0] // num_heads // 2
        read_back = read_back.reshape(num_heads, pairs, 2, -1).swapaxes(1, 2).reshape(values.shape)
    return read_back
