"""Weights as the decoder wants them, all in fp32, from a GGUF file or a Hugging Face folder."""

from dataclasses import dataclass
from typing import Protocol

import torch

from weir.model.config import ModelConfig
from weir.model.errors import ModelError
from weir.model.gguf_weights import GgufTensors
from weir.model.hf_weights import SafetensorsFolder
from weir.model.source import ModelKind, ModelSource


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are `[out, in]`; `query_key_value` and `gate_up` are stacked along `out`: one product does all."""

    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    attention_output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """`output` is `embedding` itself where the model ties them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    output: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """What one step has to read, at least: every matrix once."""
        tensors = [self.final_norm, self.output]
        for layer in self.layers:
            tensors += [layer.attention_norm, layer.query_key_value, layer.attention_output]
            tensors += [layer.mlp_norm, layer.gate_up, layer.down]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class TensorFile(Protocol):
    """Tensors by the names that `tensor_shapes` uses (those of Hugging Face's Llama)."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor there, without reading any."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """In fp32."""
        ...


def load_weights(source: ModelSource, config: ModelConfig) -> Weights:
    """Reads and, where they are quantized, dequantizes all tensors: 1 s for 135 M parameters.

    Raises:
        ModelError: names every tensor that is missing, unknown or of another shape than `config` asks for.
    """
    is_gguf = source.kind is ModelKind.GGUF
    tensors: TensorFile = GgufTensors(source.path, config) if is_gguf else SafetensorsFolder(source.path)
    _check_shapes(source, tensors.shapes(), tensor_shapes(config), config.tie_word_embeddings)
    embedding = tensors.read("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(_read_layer(tensors, layer) for layer in range(config.num_layers)),
        final_norm=tensors.read("model.norm.weight"),
        output=embedding if config.tie_word_embeddings else tensors.read("lm_head.weight"),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of this configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _read_layer(tensors: TensorFile, layer: int) -> LayerWeights:
    def read(name: str) -> torch.Tensor:
        return tensors.read(f"model.layers.{layer}.{name}.weight")

    return LayerWeights(
        attention_norm=read("input_layernorm"),
        query_key_value=torch.cat([read(f"self_attn.{part}_proj") for part in "qkv"]),
        attention_output=read("self_attn.o_proj"),
        mlp_norm=read("post_attention_layernorm"),
        gate_up=torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]),
        down=read("mlp.down_proj"),
    )


def _check_shapes(
    source: ModelSource, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], tied: bool
) -> None:
    # buffers that old checkpoints saved, and the second name of a tied matrix
    found = {
        name: shape
        for name, shape in found.items()
        if not name.endswith(".rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not part of a Llama model" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ModelError(f"{source.path}: {'; '.join(problems[:10])}{more}")
