"""The forward pass on a GPU: products by the library or `exact_linear`, Triton kernels for everything between them.

All memory is made once. A step of the same shape launches the same kernels on the same addresses.
"""

from dataclasses import dataclass, fields

import torch

from weir.kv.geometry import PAGE_TOKENS
from weir.model.architecture import ModelConfig, rotary_frequencies
from weir.model.torch.weights import LayerWeights, Weights
from weir.model.triton.batch import DeviceBatch, PrefillIndex, TritonLimits
from weir.ops.gpu.exact_linear import exact_linear
from weir.ops.gpu.paged_decode import DecodeTiles, WorkSize, decode_scratch, decode_tiles, most_splits, paged_decode
from weir.ops.gpu.paged_prefill import paged_prefill, prefill_tiles
from weir.ops.gpu.rms_norm import rms_norm
from weir.ops.gpu.rotary_kv_write import rotary_kv_write
from weir.ops.gpu.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class _Buffers:
    """[max_rows, width] each. `delta` is what a block adds to `residual`; the next norm adds it."""

    residual: torch.Tensor
    delta: torch.Tensor
    normed: torch.Tensor
    projected: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor

    def first(self, num_rows: int) -> "_Buffers":
        return _Buffers(*(getattr(self, field.name)[:num_rows] for field in fields(self)))


def _make_buffers(config: ModelConfig, max_rows: int, device: torch.device, dtype: torch.dtype) -> _Buffers:
    query_width = config.num_heads * config.head_dim
    widths = (
        config.hidden_size,
        config.hidden_size,
        config.hidden_size,
        query_width + 2 * config.num_kv_heads * config.head_dim,
        query_width,
        2 * config.intermediate_size,
        config.intermediate_size,
    )
    return _Buffers(*(torch.zeros(max_rows, width, device=device, dtype=dtype) for width in widths))


def _rotary_tables(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, fp32 [positions, head_dim / 2]; made on the host, as the fp32 path makes them."""
    positions = torch.arange(config.max_context_tokens).float()
    angles = torch.outer(positions, torch.from_numpy(rotary_frequencies(config)))
    return angles.cos().to(device), angles.sin().to(device)


def _library_linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `exact_linear`, but for its promise; what goes to a wider `out` is rounded to the rows' type before."""
    if bias is not None:
        torch.addmm(bias, rows, matrix.t(), out=out)
    elif out.dtype == rows.dtype:
        torch.mm(rows, matrix.t(), out=out)
    else:
        out.copy_(torch.mm(rows, matrix.t()))


class TritonDecoder:
    """A Llama, Mistral or Qwen2 model over pages on a GPU. Holds no state of any sequence."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pages: torch.Tensor,
        limits: TritonLimits,
        *,
        is_exact: bool = False,
    ) -> None:
        """`weights` and `pages` are on the device, of one type. `is_exact`: products that do not depend on the batch.

        Raises:
            ValueError: the pages are not of this model's geometry.
        """
        expected = (len(pages), config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
        if tuple(pages.shape) != expected or pages.dtype != weights.embedding.dtype:
            raise ValueError(f"pages are {pages.dtype} {list(pages.shape)}, expected {list(expected)} of the weights'")
        self._config = config
        self._weights = weights
        self._linear = exact_linear if is_exact else _library_linear
        self._layer_pages = [(pages[:, layer, 0], pages[:, layer, 1]) for layer in range(config.num_layers)]
        self._max_context_tokens = limits.max_context_tokens
        self._scale = config.head_dim**-0.5
        device, dtype = pages.device, pages.dtype
        capability = 90 if device.type == "cpu" else 10 * torch.cuda.get_device_capability(device)[0]
        self._decode_tiles = decode_tiles(config.head_dim, dtype)
        self._prefill_tiles = prefill_tiles(config.num_heads, config.num_kv_heads, config.head_dim, dtype, capability)
        self._scratch = decode_scratch(
            limits.max_sequences,
            config.num_heads,
            config.head_dim,
            limits.max_context_tokens,
            self._decode_tiles,
            device,
        )
        self._cos, self._sin = _rotary_tables(config, device)
        self._buffers = _make_buffers(config, limits.max_rows, device, dtype)
        self._logits = torch.empty(limits.max_logit_rows, config.vocab_size, dtype=torch.float32, device=device)

    @property
    def queries_per_tile(self) -> int:
        return self._prefill_tiles.queries_per_tile(self._config.num_heads, self._config.num_kv_heads)

    @property
    def decode_tiles(self) -> DecodeTiles:
        return self._decode_tiles

    def most_work(self, num_rows: int) -> WorkSize:
        """Of decoding so many rows."""
        splits = most_splits(self._max_context_tokens, self._decode_tiles)
        return WorkSize(num_rows * splits, splits)

    def forward(self, batch: DeviceBatch) -> None:
        """Writes the batch's keys and values into their pages and keeps its last hidden states."""
        buffers, epsilon = self._buffers.first(len(batch.token_ids)), self._config.rms_norm_eps
        torch.index_select(self._weights.embedding, 0, batch.token_ids, out=buffers.residual)
        for number, layer in enumerate(self._weights.layers):
            if number == 0:
                rms_norm(buffers.residual, layer.attention_norm, epsilon, buffers.normed)
            else:
                rms_norm(buffers.delta, layer.attention_norm, epsilon, buffers.normed, buffers.residual)
            self._attention(number, layer, batch, buffers)
            rms_norm(buffers.delta, layer.mlp_norm, epsilon, buffers.normed, buffers.residual)
            self._linear(buffers.normed, layer.gate_up, None, buffers.gate_up)
            silu_mul(buffers.gate_up, buffers.gated)
            self._linear(buffers.gated, layer.down, None, buffers.delta)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocabulary] of rows (int32) of the last `forward`; they are there until the next call.

        All graphs leave them at one place: buffers of their own would take the memory of many steps.
        """
        delta = self._buffers.delta.index_select(0, rows)
        residual = self._buffers.residual.index_select(0, rows)
        normed = torch.empty_like(delta)
        rms_norm(delta, self._weights.final_norm, self._config.rms_norm_eps, normed, residual)
        logits = self._logits[: len(rows)]
        self._linear(normed, self._weights.output, None, logits)
        return logits

    def _attention(self, number: int, layer: LayerWeights, batch: DeviceBatch, buffers: _Buffers) -> None:
        head_dim, num_heads = self._config.head_dim, self._config.num_heads
        keys, values = self._layer_pages[number]
        self._linear(buffers.normed, layer.query_key_value, layer.query_key_value_bias, buffers.projected)
        heads = buffers.projected.view(len(buffers.projected), -1, head_dim)
        rotary_kv_write(heads, self._cos, self._sin, batch.positions, batch.slot_mapping, keys, values)
        queries, out = heads[:, :num_heads], buffers.attended.view(-1, num_heads, head_dim)
        num_decodes = 0
        if batch.decode is not None:
            num_decodes = batch.decode.num_rows
            paged_decode(
                queries[:num_decodes],
                keys,
                values,
                batch.decode.work,
                self._scale,
                out[:num_decodes],
                self._scratch,
                self._decode_tiles,
            )
        if batch.prefill is not None:
            self._prefill(batch.prefill, queries[num_decodes:], keys, values, out[num_decodes:])
        self._linear(buffers.attended, layer.attention_output, layer.attention_output_bias, buffers.delta)

    def _prefill(
        self, index: PrefillIndex, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        paged_prefill(
            queries,
            keys,
            values,
            index.block_tables,
            index.first_rows,
            index.ends,
            index.tile_list,
            self._scale,
            out,
            self._prefill_tiles,
        )
