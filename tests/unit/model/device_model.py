"""A model and its pages on a device, without the files and the memory that a worker has."""

from dataclasses import fields, replace
from typing import Any

import torch

from weir.kv.geometry import PAGE_TOKENS
from weir.model.architecture import ModelConfig
from weir.model.torch.weights import LayerWeights, Weights


def weights_on(weights: Weights, device: torch.device, dtype: torch.dtype) -> Weights:
    """A copy; tied matrices stay one."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype)

    def moved_layer(layer: LayerWeights) -> LayerWeights:
        found = {field.name: getattr(layer, field.name) for field in fields(layer)}
        moves: dict[str, Any] = {name: moved(tensor) for name, tensor in found.items() if torch.is_tensor(tensor)}
        return replace(layer, **moves)

    embedding = moved(weights.embedding)
    return replace(
        weights,
        embedding=embedding,
        layers=tuple(moved_layer(layer) for layer in weights.layers),
        final_norm=moved(weights.final_norm),
        output=embedding if weights.output is weights.embedding else moved(weights.output),
    )


def empty_pages(config: ModelConfig, num_pages: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[num_pages, layers, 2 (key, value), kv heads, PAGE_TOKENS, head_dim]: a page is one piece of memory."""
    shape = (num_pages, config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
    return torch.zeros(shape, device=device, dtype=dtype)
