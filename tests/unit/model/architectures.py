"""Tiny random models of every architecture that Weir serves, made and saved by transformers' own classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.unit.model.tiny import TinyLlama

VOCAB_SIZE = 160
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}


@dataclass(frozen=True)
class Variant:
    """`changes` to `BASE`."""

    name: str
    config_class: type[Any]
    changes: dict[str, Any]


BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "bos_token_id": 1,
}

LLAMA, MISTRAL = transformers.LlamaConfig, transformers.MistralConfig
QWEN2, QWEN3 = transformers.Qwen2Config, transformers.Qwen3Config
GEMMA2, GEMMA3 = transformers.Gemma2Config, transformers.Gemma3TextConfig
PHI3 = transformers.Phi3Config
PHI3_CHANGES: dict[str, Any] = {"pad_token_id": 0, "hidden_size": 128, "intermediate_size": 96}
# three quarters of a head of 32 rotate: 12 frequencies
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.05 * number for number in range(12)],
    "long_factor": [1.5 + 0.5 * number for number in range(12)],
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
}
# 1 layer of 3 attends to everything; window 60
GEMMA3_CHANGES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 60,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,
    "rope_parameters": GEMMA3_ROPE,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# caps so low that they bend
GEMMA2_CHANGES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 60,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
VARIANTS = (
    Variant("llama", LLAMA, {}),
    Variant("llama-tied", LLAMA, {"tie_word_embeddings": True}),
    Variant("llama-as-many-key-heads", LLAMA, {"num_key_value_heads": 4}),
    Variant("llama-one-key-head", LLAMA, {"num_key_value_heads": 1}),
    Variant("llama-three-queries-a-key", LLAMA, {"hidden_size": 96, "num_attention_heads": 6}),
    Variant("llama-head-dim-of-its-own", LLAMA, {"hidden_size": 48, "head_dim": 32}),
    Variant("llama-attention-bias", LLAMA, {"attention_bias": True}),
    Variant("llama-large-epsilon", LLAMA, {"rms_norm_eps": 0.5}),
    Variant("llama-linear-scaling", LLAMA, {"rope_parameters": LINEAR_SCALING}),
    Variant("llama-llama3-scaling", LLAMA, {"rope_parameters": LLAMA3_SCALING}),
    Variant("mistral", MISTRAL, {"sliding_window": None}),
    Variant("mistral-head-dim-of-its-own", MISTRAL, {"sliding_window": None, "head_dim": 24}),
    Variant("mistral-sliding-window", MISTRAL, {"sliding_window": 60}),
    Variant("qwen2", QWEN2, {}),
    Variant("qwen2-tied", QWEN2, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Variant("qwen2-linear-scaling", QWEN2, {"rope_parameters": LINEAR_SCALING}),
    Variant("qwen2-sliding-window", QWEN2, {"use_sliding_window": True, "sliding_window": 60, "max_window_layers": 1}),
    Variant(
        "qwen2-sliding-window-past-the-last-layer",
        QWEN2,
        {"use_sliding_window": True, "sliding_window": 60, "max_window_layers": 2},
    ),
    Variant("qwen3", QWEN3, {"head_dim": 32}),
    Variant("qwen3-tied", QWEN3, {"head_dim": 24, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    Variant("qwen3-attention-bias", QWEN3, {"head_dim": 16, "attention_bias": True}),
    Variant("qwen3-large-epsilon", QWEN3, {"rms_norm_eps": 0.5}),
    Variant(
        "qwen3-sliding-window",
        QWEN3,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 60, "max_window_layers": 1},
    ),
    Variant("phi3", PHI3, PHI3_CHANGES | {"sliding_window": 60}),
    Variant(
        "phi3-longrope",
        PHI3,
        PHI3_CHANGES
        | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    Variant("gemma2", GEMMA2, GEMMA2_CHANGES),
    Variant("gemma3", GEMMA3, GEMMA3_CHANGES),
    Variant(
        "gemma3-scaled",
        GEMMA3,
        GEMMA3_CHANGES
        | {
            "hidden_size": 96,
            "query_pre_attn_scalar": 32,
            "rope_parameters": GEMMA3_ROPE
            | {"full_attention": {"rope_type": "linear", "rope_theta": 20_000.0, "factor": 2.5}},
        },
    ),
)


OFFSET_NORMS = (GEMMA2, GEMMA3)


# PyTorch's attention knows no softcap
ATTENTION = {GEMMA2: "eager"}


def save_variant(
    folder: Path, variant: Variant, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: Any
) -> TinyLlama:
    """Seeded; norms and biases are random too, which transformers makes ones and zeros."""
    torch.manual_seed(11)
    config = variant.config_class(**(BASE | variant.changes | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                # Gemma's are about 0: it multiplies by 1 + w
                parameter.uniform_(0.5, 1.5).sub_(1.0 if variant.config_class in OFFSET_NORMS else 0.0)
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    # loaded again, because `to(dtype)` has rounded the rotary frequencies too
    return TinyLlama(
        folder,
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION.get(variant.config_class, "sdpa")
        ).eval(),
    )
