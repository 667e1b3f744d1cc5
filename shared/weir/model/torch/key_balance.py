"""Keys whose channels are about as large as each other, for pages that keep one scale for all channels of a head.

Some channels of keys are many times as large as the others (Liu et al.: "KIVI", 2024), and a scale that fits them
leaves few steps to the rest. A channel that is divided, and met by queries that are multiplied, gives the same scores,
after the rotary embedding too, if both channels of a pair that it turns have the same factor. Factors are powers of
two, which changes no bit of a score.
"""

import torch

from weir.model.architecture import ModelConfig
from weir.model.torch.weights import LayerWeights, Weights

_LEAST_POWER = 2.0**-60


def balance_keys(weights: Weights, config: ModelConfig) -> None:
    """In place."""
    for layer in weights.layers:
        powers = _powers(layer, config)
        if layer.query_norm is not None and layer.key_norm is not None:
            _balance_norms(layer.query_norm, layer.key_norm, powers)
        else:
            _balance_rows(layer, _factors(powers), config)


def _balance_norms(query_norm: torch.Tensor, key_norm: torch.Tensor, powers: torch.Tensor) -> None:
    """Heads that are normed have their factors undone by it, but for those of its weights, which all heads share."""
    normed = powers / powers.mean(1, keepdim=True) * key_norm.float().square()
    factors = _factors(normed.mean(0, keepdim=True))[0].repeat(2).to(key_norm.dtype)
    query_norm *= factors
    key_norm /= factors


def _balance_rows(layer: LayerWeights, factors: torch.Tensor, config: ModelConfig) -> None:
    factors = factors.repeat(1, 2)  # [kv heads, head_dim]
    queries = factors.repeat_interleave(config.num_heads // config.num_kv_heads, 0)
    rows = torch.cat([queries.view(-1), 1 / factors.view(-1)])
    scaled = layer.scales.query_key_value
    if scaled is not None:
        scaled[: len(rows)] *= rows
    else:
        layer.query_key_value[: len(rows)] *= rows.to(layer.query_key_value.dtype)[:, None]
    if layer.query_key_value_bias is not None:
        layer.query_key_value_bias[: len(rows)] *= rows.to(layer.query_key_value_bias.dtype)


def _powers(layer: LayerWeights, config: ModelConfig) -> torch.Tensor:
    """Mean squares of the channels of each key head, [kv heads, head_dim], for inputs whose channels are independent of
    each other."""
    first = config.num_heads * config.head_dim
    last = first + config.num_kv_heads * config.head_dim
    matrix = layer.query_key_value[first:last].float() * layer.attention_norm.float()
    power = matrix.square().sum(1)
    if layer.scales.query_key_value is not None:
        power = power * layer.scales.query_key_value[first:last].square()
    if layer.query_key_value_bias is not None:
        power = power + layer.query_key_value_bias[first:last].float().square()
    return power.view(config.num_kv_heads, config.head_dim)


def _factors(powers: torch.Tensor) -> torch.Tensor:
    """What the pairs of channels of heads [heads, head_dim] are to be divided by, [heads, half]: how large they are
    beside the head's median."""
    logarithms = powers.view(len(powers), 2, -1).sum(1).clamp(min=_LEAST_POWER).log2()
    return torch.exp2((logarithms - logarithms.median(1, keepdim=True).values).div(2).round())
