"""Weights as the decoder wants them, all in fp32, from a GGUF file or a Hugging Face folder."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weir.model.config import ModelConfig
from weir.model.source import ModelSource
from weir.model.tensor_file import open_tensors


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


def load_weights(source: ModelSource, config: ModelConfig) -> Weights:
    """Reads and, where they are quantized, dequantizes all tensors: 1 s for 135 M parameters.

    Raises:
        ModelError: names every tensor that is missing, unknown or of another shape than `config` asks for.
    """
    tensors = open_tensors(source, config)

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(tensors.read(name))

    embedding = read("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(_read_layer(read, layer) for layer in range(config.num_layers)),
        final_norm=read("model.norm.weight"),
        output=embedding if config.tie_word_embeddings else read("lm_head.weight"),
    )


def _read_layer(read_tensor: Callable[[str], torch.Tensor], layer: int) -> LayerWeights:
    def read(name: str) -> torch.Tensor:
        return read_tensor(f"model.layers.{layer}.{name}.weight")

    return LayerWeights(
        attention_norm=read("input_layernorm"),
        query_key_value=torch.cat([read(f"self_attn.{part}_proj") for part in "qkv"]),
        attention_output=read("self_attn.o_proj"),
        mlp_norm=read("post_attention_layernorm"),
        gate_up=torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]),
        down=read("mlp.down_proj"),
    )
