"""Models as small as they can be, to be spoilt: a GGUF file, and folders of every kind of weights."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save

from weir.model.architecture import tensor_shapes
from weir.model.files.config_hf import config_from_hf
from weir.model.files.quant_layouts import wanted_tensors
from weir.model.files.quantization import quant_scheme
from weir.model.tokens.decoders import byte_of_character

HIDDEN, HEADS, INTERMEDIATE = 64, 2, 64
LETTERS = list(byte_of_character())
TOKENS = [*LETTERS, "ab", "<|im_end|>"]
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "float16", "I32": "int32", "I64": "int64", "I8": "int8"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def gguf_bytes(kind: str = "gpt2", architecture: str = "llama") -> bytes:
    """`kind` of its vocabulary. One layer, with a token in three of F32, F16 and Q8_0."""
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "x", arch=architecture)
        _write_numbers(writer, architecture)
        _write_vocabulary(writer, kind)
        rows = {"attn_q": HIDDEN, "attn_k": HIDDEN, "attn_v": HIDDEN, "attn_output": HIDDEN, "ffn_gate": INTERMEDIATE}
        matrices = {f"blk.0.{name}.weight": num for name, num in {**rows, "ffn_up": HIDDEN, "ffn_down": HIDDEN}.items()}
        norms = ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
        for name in norms:
            writer.add_tensor(name, np.ones(HIDDEN, np.float32))
        kinds = (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32)
        for index, (name, num_rows) in enumerate({**matrices, "token_embd.weight": len(TOKENS)}.items()):
            raw = gguf.quantize(np.ones((num_rows, HIDDEN), np.float32), kinds[index % 3])
            writer.add_tensor(name, raw, raw_dtype=kinds[index % 3])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "x").read_bytes()


def _write_numbers(writer: gguf.GGUFWriter, architecture: str) -> None:
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if architecture != "llama":
        writer.add_sliding_window(16)


def _write_vocabulary(writer: gguf.GGUFWriter, kind: str) -> None:
    writer.add_tokenizer_model(kind)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    if kind == "gpt2":
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([-float(index) for index in range(len(TOKENS))])


def hf_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": [0, 1],
        "bos_token_id": 0,
        **changes,
    }


def _compressed(layout: str, bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"g": group},
        "ignore": ["lm_head"],
    }


CONFIGS: Mapping[str, dict[str, Any]] = {
    "plain": hf_config(),
    "llama3": hf_config(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "qwen3": hf_config(model_type="qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=0),
    "gemma2": hf_config(
        model_type="gemma2", hidden_activation="gelu_pytorch_tanh", sliding_window=16, query_pre_attn_scalar=32,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, torch_dtype="bfloat16",
    ),
    "gemma3": hf_config(
        model_type="gemma3_text",
        layer_types=["full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        sliding_window=16,
    ),
    "phi3": hf_config(
        model_type="phi3",
        partial_rotary_factor=0.5,
        original_max_position_embeddings=32,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ),
    "gptq": hf_config(
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    ),
    "awq": hf_config(
        quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    ),
    "packed": hf_config(quantization_config=_compressed("pack-quantized", 4, symmetric=False)),
    "integers": hf_config(quantization_config=_compressed("int-quantized", 8, symmetric=True)),
}  # fmt: skip


def weights_of(config: Mapping[str, Any]) -> bytes:
    """A safetensors file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        shapes = tensor_shapes(config_from_hf(Path(folder)))
        scheme = quant_scheme(path, config)
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        if scheme is None or not name.endswith("_proj.weight"):
            tensors[name] = np.ones(shape, np.float16)
            continue
        for part, wanted in wanted_tensors(scheme, *shape).items():
            values = np.ones(wanted.shape, _DTYPES[wanted.dtypes[0]])
            if part == "g_idx":
                values = (np.arange(shape[1]) // 32).astype(np.int32)
            if part == "weight_shape":
                values = np.array(shape, np.int64)
            tensors[name.removesuffix("weight") + part] = values
    return save(tensors)


def tokenizer_json() -> bytes:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: index for index, token in enumerate(TOKENS)}, merges=[("a", "b")])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|im_end|>", special=True)])
    return tokenizer.to_str().encode()


def folder_files(kind: str) -> dict[str, bytes]:
    """All that a folder of a model has, by name."""
    token: dict[str, object] = {"content": "<|im_end|>"}
    return {
        "config.json": json.dumps(CONFIGS[kind]).encode(),
        "generation_config.json": b'{"eos_token_id": [0, 1]}',
        "model.safetensors": weights_of(CONFIGS[kind]),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE, "eos_token": token, "bos_token": "a"}).encode(),
    }
