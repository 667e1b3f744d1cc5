"""Formats of weights, rows and pages, and a forward pass that rounds to them wherever the GPU path does."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from weir.model.architecture import ModelConfig, rotary_frequencies
from weir.model.torch.decoder import Rotary, norm_heads, rms_norm
from weir.model.torch.weights import LayerWeights, Weights
from weir.ops.reference_quantized import E4M3_MAX, INT8_MAX, LEAST_AMAX, quantize_heads, quantize_rows

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Of [rows, width], or of [tokens, heads, head_dim], to what a format keeps of it; fp32."""


def exact(rows: torch.Tensor) -> torch.Tensor:
    return rows


def bf16(rows: torch.Tensor) -> torch.Tensor:
    return rows.bfloat16().float()


def e4m3_rows(rows: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_rows(rows.reshape(-1, rows.shape[-1]))
    return (values.float() * scales[:, None]).view(rows.shape)


def e4m3_tensor(rows: torch.Tensor) -> torch.Tensor:
    """One scale for all."""
    scale = rows.abs().max() / E4M3_MAX
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def e4m3_plain(rows: torch.Tensor) -> torch.Tensor:
    """Without a scale: what is above 448 becomes 448."""
    return rows.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def int8_heads(heads: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_heads(heads)
    return values.float() * scales[..., None]


def int8_groups(heads: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_heads(heads.unflatten(-1, (-1, 16)))  # type: ignore[no-untyped-call]
    return (values.float() * scales[..., None]).view(heads.shape)


def int8_groups_of(num_inputs: int) -> Rounding:
    """A scale for so many inputs of a row, the last group being what is left: the CPU's format, which has 32."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        groups = [int8_heads(group) for group in torch.split(rows, num_inputs, dim=-1)]
        return torch.cat(groups, dim=-1)

    return rounded


def int8_plain(rows: torch.Tensor) -> torch.Tensor:
    """One scale for all that is written at once: a bound on what one for a layer could do."""
    scale = rows.abs().max().clamp(min=LEAST_AMAX) / INT8_MAX
    return (rows / scale).round().clamp(-INT8_MAX, INT8_MAX) * scale


@dataclass(frozen=True, slots=True)
class Format:
    """`weights`: of every matrix of a layer, `output`: of the last one, `rows`: of what they multiply, `keys` and
    `values`: of pages."""

    weights: Rounding = exact
    output: Rounding = exact
    rows: Rounding = exact
    keys: Rounding = exact
    values: Rounding = exact


FORMATS = {
    "bf16 pages": Format(keys=bf16, values=bf16),
    "E4M3 pages, no scale": Format(keys=e4m3_plain, values=e4m3_plain),
    "E4M3 pages, a scale a head of a token": Format(keys=e4m3_rows, values=e4m3_rows),
    "int8 pages, a scale a head of a token": Format(keys=int8_heads, values=int8_heads),
    "int8 pages, a scale 16 numbers": Format(keys=int8_groups, values=int8_groups),
    "mixed pages, E4M3 keys and int8 values": Format(keys=e4m3_rows, values=int8_heads),
    "int8 pages, one scale a layer": Format(keys=int8_plain, values=int8_plain),
    "E4M3 weights, a scale a tensor": Format(weights=e4m3_tensor),
    "E4M3 weights, a scale a row": Format(weights=e4m3_rows),
    "fp8": Format(weights=e4m3_rows, rows=e4m3_rows, keys=bf16, values=bf16),
    "fp8, output too": Format(weights=e4m3_rows, output=e4m3_rows, rows=e4m3_rows, keys=bf16, values=bf16),
    **{
        f"int8 rows, a scale {size} inputs; weights {name}": Format(weights=weights, rows=int8_groups_of(size))
        for size in (32, 64, 128, 192, 256, 1 << 20)
        for name, weights in (("as they are", exact), ("alike", int8_groups_of(size)))
    },
    "fp8-kv8": Format(weights=e4m3_rows, rows=e4m3_rows, keys=int8_heads, values=int8_heads),
}


def rounded_weights(weights: Weights, weights_format: Rounding) -> Weights:
    """All matrices of the layers; norms, biases and embedding stay."""

    def rounded(layer: LayerWeights) -> LayerWeights:
        return replace(
            layer,
            query_key_value=weights_format(layer.query_key_value),
            attention_output=weights_format(layer.attention_output),
            gate_up=weights_format(layer.gate_up),
            down=weights_format(layer.down),
        )

    return replace(weights, layers=tuple(map(rounded, weights.layers)))


def with_key_outliers(weights: Weights, config: ModelConfig, factor: float) -> Weights:
    """The same function of the same tokens: in every key head one pair of channels is `factor` times as large, and the
    queries that meet it as much smaller. Keys of many models are so (Liu et al., "KIVI", 2024)."""
    group, half = config.num_heads // config.num_kv_heads, config.head_dim // 2

    def changed(layer: LayerWeights) -> LayerWeights:
        stacked = layer.query_key_value.clone()
        heads = stacked.view(-1, config.head_dim, stacked.shape[1])
        for kv_head in range(config.num_kv_heads):
            channels = [half - 1 - kv_head, config.head_dim - 1 - kv_head]  # a slow pair: it turns little
            heads[config.num_heads + kv_head, channels] *= factor
            heads[kv_head * group : (kv_head + 1) * group, channels] /= factor
        return replace(layer, query_key_value=stacked)

    return replace(weights, layers=tuple(map(changed, weights.layers)))


def log_probabilities(config: ModelConfig, weights: Weights, token_ids: torch.Tensor, used: Format) -> torch.Tensor:
    """fp32 [tokens, vocabulary] of one window; `weights` have been rounded."""
    rotary = Rotary(rotary_frequencies(config))
    tables = rotary.tables(torch.arange(len(token_ids)))
    num_rotated = config.num_heads + config.num_kv_heads

    def linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(used.rows(rows), matrix, bias)

    hidden = functional.embedding(token_ids, weights.embedding)
    for layer in weights.layers:
        normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        heads = linear(normed, layer.query_key_value, layer.query_key_value_bias)
        heads = heads.view(len(token_ids), -1, config.head_dim)
        rotated = rotary.rotate(norm_heads(heads[:, :num_rotated], layer, config), tables)
        attended = functional.scaled_dot_product_attention(
            rotated[:, : config.num_heads].transpose(0, 1)[None],
            used.keys(rotated[:, config.num_heads :]).transpose(0, 1)[None],
            used.values(heads[:, num_rotated:]).transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )
        rows = attended[0].transpose(0, 1).reshape(len(token_ids), -1)
        hidden = hidden + linear(rows, layer.attention_output, layer.attention_output_bias)
        normed = rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
        gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
        hidden = hidden + linear(functional.silu(gate) * up, layer.down)
    normed = rms_norm(hidden, weights.final_norm, config.rms_norm_eps)
    if used.output is exact:
        return functional.linear(normed, weights.output).log_softmax(-1)
    return functional.linear(used.rows(normed), used.output(weights.output)).log_softmax(-1)
