"""The forward pass: embedding, layers, final norm, logits."""

import torch
from torch.nn import functional

from weir.model.architecture import ModelConfig
from weir.model.torch.batch import StepBatch
from weir.model.torch.layers import Rotary, attend, mlp, rms_norm
from weir.model.torch.paged_kv import PagedKv
from weir.model.torch.weights import LayerWeights, Weights


class Decoder:
    """A Llama, Mistral or Qwen2 model over paged keys and values. Holds no state of any sequence."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._rotary = Rotary(config)

    def forward(self, batch: StepBatch, kv: PagedKv) -> torch.Tensor:
        """Writes the batch's keys and values into their pages; returns the hidden states [tokens, hidden]."""
        tables = self._rotary.tables(batch.positions)
        hidden = functional.embedding(batch.token_ids, self._weights.embedding)
        for number, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attention(number, layer, hidden, tables, batch, kv)
            hidden = hidden + mlp(rms_norm(hidden, layer.mlp_norm, self._config.rms_norm_eps), layer)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
        normed = rms_norm(hidden, self._weights.final_norm, self._config.rms_norm_eps)
        return functional.linear(normed, self._weights.output)

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
        rotated = self._rotary.rotate(heads[:, :num_rotated], tables)
        kv.write(number, batch.row_index, rotated[:, config.num_heads :], heads[:, num_rotated:])
        attended = attend(number, rotated[:, : config.num_heads], kv, batch)
        rows = attended.reshape(hidden.shape[0], -1)
        return functional.linear(rows, layer.attention_output, layer.attention_output_bias)
