"""The forward pass in PyTorch. Rows are tokens of the step's flat batch."""

import numpy as np
import torch
from torch.nn import functional

from weir.model.architecture import (
    Activation,
    Frequencies,
    ModelConfig,
    local_rotary_frequencies,
    rotary_frequencies,
    rotary_magnitudes,
)
from weir.model.torch.batch import StepBatch
from weir.model.torch.paged_kv import PagedKv
from weir.model.torch.weights import LayerWeights, Weights


class Rotary:
    """Rotates pairs (i, i + head_dim / 2) of queries and keys by position."""

    def __init__(self, frequencies: Frequencies, magnitudes: Frequencies | None = None) -> None:
        self._frequencies = torch.from_numpy(frequencies)
        self._magnitudes = torch.from_numpy(np.ones_like(frequencies) if magnitudes is None else magnitudes)
        self._half = len(frequencies)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each [tokens, 1, head_dim]: made once a step, used in every layer."""
        angles = torch.outer(positions.float(), self._frequencies)
        cos, sin = angles.cos() * self._magnitudes, angles.sin() * self._magnitudes
        # the first half of a head takes minus the second half: the sign lives in the table
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]

    def rotate(self, heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`heads` [tokens, heads, head_dim]."""
        cos, sin = tables
        return heads * cos + heads.roll(self._half, dims=-1) * sin


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Each row divided by its root mean square."""
    return functional.rms_norm(rows, weight.shape, weight, epsilon)


def norm_if(rows: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """As they are without a weight."""
    return rows if weight is None else rms_norm(rows, weight, epsilon)


def norm_heads(heads: torch.Tensor, layer: LayerWeights, config: ModelConfig) -> torch.Tensor:
    """Queries and keys [tokens, heads and key heads, head_dim], each head normed where the model does so (Dehghani et
    al.: "Scaling Vision Transformers to 22 Billion Parameters", 2023)."""
    if layer.query_norm is None or layer.key_norm is None:
        return heads
    queries, keys = heads[:, : config.num_heads], heads[:, config.num_heads :]
    epsilon = config.rms_norm_eps
    return torch.cat([rms_norm(queries, layer.query_norm, epsilon), rms_norm(keys, layer.key_norm, epsilon)], dim=1)


def mlp(rows: torch.Tensor, layer: LayerWeights, activation: Activation) -> torch.Tensor:
    """Gated (Shazeer: "GLU variants improve transformer", 2020)."""
    gate, up = functional.linear(rows, layer.gate_up).chunk(2, dim=-1)
    gate = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return functional.linear(gate * up, layer.down)


def attend_grouped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[batch, heads, tokens, head_dim]; keys and values may have fewer heads. PyTorch's own knows no softcap."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = capped(queries @ keys.transpose(-1, -2) * scale, softcap)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ values


def capped(values: torch.Tensor, cap: float | None) -> torch.Tensor:
    """As they are without a cap."""
    return values if cap is None else cap * torch.tanh(values / cap)


def attend(layer: int, queries: torch.Tensor, kv: PagedKv, batch: StepBatch, config: ModelConfig) -> torch.Tensor:
    """`queries` [tokens, heads, head_dim] against their sequences' pages; the step's own keys are in them already."""
    scale, has_window = config.score_divisor**-0.5, config.window_of(layer) is not None
    outputs = torch.empty_like(queries)
    for group in batch.decode_groups:
        keys, values = kv.gather(layer, group.block_index)
        num_sequences, num_kv_heads, _, head_dim = keys.shape
        row, position = group.stale
        keys[row, :, position] = 0.0
        values[row, :, position] = 0.0
        # the query heads of one key head stand where the positions of a longer query would
        grouped = queries[group.first : group.last].view(num_sequences, num_kv_heads, -1, head_dim)
        mask = group.window_mask if has_window else group.mask
        attended = attend_grouped(grouped, keys, values, mask, scale, config.attention_softcap)
        outputs[group.first : group.last] = attended.reshape(num_sequences, -1, head_dim)
    for chunk in batch.prefill_chunks:
        keys, values = kv.gather(layer, chunk.block_index)
        attended = attend_grouped(
            queries[chunk.first : chunk.last].transpose(0, 1)[None],
            keys[:, :, : chunk.num_read],
            values[:, :, : chunk.num_read],
            chunk.window_mask if has_window else chunk.mask,
            scale,
            config.attention_softcap,
        )
        outputs[chunk.first : chunk.last] = attended[0].transpose(0, 1)
    return outputs


class Decoder:
    """A model over paged keys and values. Holds no state of any sequence."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._rotary = Rotary(rotary_frequencies(config), rotary_magnitudes(config))
        local = local_rotary_frequencies(config)
        self._local_rotary = self._rotary if local is None else Rotary(local)

    def forward(self, batch: StepBatch, kv: PagedKv) -> torch.Tensor:
        """Writes the batch's keys and values into their pages; returns the hidden states [tokens, hidden]."""
        config, epsilon = self._config, self._config.rms_norm_eps
        tables = self._rotary.tables(batch.positions)
        local = tables if self._local_rotary is self._rotary else self._local_rotary.tables(batch.positions)
        hidden = functional.embedding(batch.token_ids, self._weights.embedding) * config.embedding_scale
        for number, layer in enumerate(self._weights.layers):
            own_tables = tables if config.window_of(number) is None else local
            attended = self._attention(number, layer, hidden, own_tables, batch, kv)
            hidden = hidden + norm_if(attended, layer.after_attention_norm, epsilon)
            gated = mlp(rms_norm(hidden, layer.mlp_norm, epsilon), layer, config.activation)
            hidden = hidden + norm_if(gated, layer.after_mlp_norm, epsilon)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
        normed = rms_norm(hidden, self._weights.final_norm, self._config.rms_norm_eps)
        return capped(functional.linear(normed, self._weights.output), self._config.logit_softcap)

    def _attention(
        self,
        number: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        batch: StepBatch,
        kv: PagedKv,
    ) -> torch.Tensor:
        config = self._config
        normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        projected = functional.linear(normed, layer.query_key_value, layer.query_key_value_bias)
        heads = projected.view(hidden.shape[0], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = self._rotary.rotate(norm_heads(heads[:, :num_rotated], layer, config), tables)
        kv.write(number, batch.row_index, rotated[:, config.num_heads :], heads[:, num_rotated:])
        attended = attend(number, rotated[:, : config.num_heads], kv, batch, config)
        rows = attended.reshape(hidden.shape[0], -1)
        return functional.linear(rows, layer.attention_output, layer.attention_output_bias)
