"""The forward pass on a GPU: products by the library or `exact_linear`, Triton kernels for everything between them.

All memory is made once. A step of the same shape launches the same kernels on the same addresses.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from weir.model.architecture import (
    Frequencies,
    ModelConfig,
    local_rotary_frequencies,
    rotary_frequencies,
    rotary_magnitudes,
)
from weir.model.torch.weights import LayerWeights, WeightFormat, Weights
from weir.model.triton.batch import DeviceBatch, PrefillIndex, TritonLimits
from weir.model.triton.memory import layer_pages, page_shape
from weir.model.triton.products import LayerProducts, ProductRows
from weir.ops.gpu.attention import DeviceScoring
from weir.ops.gpu.decode_work import DecodeTiles, WorkSize, decode_tiles, most_splits
from weir.ops.gpu.paged_decode import decode_scratch, paged_decode
from weir.ops.gpu.paged_prefill import paged_prefill, prefill_tiles
from weir.ops.gpu.rms_norm import rms_norm
from weir.ops.gpu.rotary_kv_write import rotary_kv_write
from weir.ops.reference import HeadNorms


@dataclass(frozen=True, slots=True)
class _Buffers:
    """[max_rows, width] each. `delta` is what a block adds to `residual`; the next norm adds it. `quantized` is what
    was attended, empty where products take that as it is."""

    residual: torch.Tensor
    delta: torch.Tensor
    normed: ProductRows
    projected: torch.Tensor
    attended: torch.Tensor
    quantized: ProductRows
    gate_up: torch.Tensor
    gated: ProductRows

    def first(self, num_rows: int) -> "_Buffers":
        return _Buffers(*(getattr(self, field.name)[:num_rows] for field in fields(self)))


def _make_buffers(
    config: ModelConfig, max_rows: int, kept: WeightFormat, device: torch.device, products: LayerProducts
) -> _Buffers:
    def numbers(width: int) -> torch.Tensor:
        return torch.zeros(max_rows, width, device=device, dtype=kept.dtype)

    query_width = config.num_heads * config.head_dim
    return _Buffers(
        residual=numbers(config.hidden_size),
        delta=numbers(config.hidden_size),
        normed=products.rows(max_rows, config.hidden_size),
        projected=numbers(query_width + 2 * config.num_kv_heads * config.head_dim),
        attended=numbers(query_width),
        quantized=products.rows(max_rows, query_width if kept.is_fp8 else 0),
        gate_up=numbers(2 * config.intermediate_size),
        gated=products.rows(max_rows, config.intermediate_size),
    )


_RotaryTables = tuple[torch.Tensor, torch.Tensor]


def _rotary_tables(
    frequencies: Frequencies, magnitudes: Frequencies, num_positions: int, device: torch.device
) -> _RotaryTables:
    """Cosines and sines, fp32 [positions, head_dim / 2]; made on the host, as the fp32 path makes them."""
    angles = torch.outer(torch.arange(num_positions).float(), torch.from_numpy(frequencies))
    factors = torch.from_numpy(magnitudes)
    return (angles.cos() * factors).to(device), (angles.sin() * factors).to(device)


def _tables_by_layer(config: ModelConfig, device: torch.device) -> list[_RotaryTables]:
    num_positions = config.max_context_tokens
    tables = local = _rotary_tables(rotary_frequencies(config), rotary_magnitudes(config), num_positions, device)
    frequencies = local_rotary_frequencies(config)
    if frequencies is not None:
        local = _rotary_tables(frequencies, np.ones_like(frequencies), num_positions, device)
    return [tables if config.window_of(layer) is None else local for layer in range(config.num_layers)]


class TritonDecoder:
    """A model over pages on a GPU. Holds no state of any sequence."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pages: torch.Tensor,
        limits: TritonLimits,
        *,
        is_exact: bool = False,
    ) -> None:
        """`weights` and `pages` are on the device, of one type but for matrices in E4M3 and pages in int8. `is_exact`:
        products that do not depend on the batch.

        Raises:
            ValueError: the pages are not of this model's geometry.
        """
        device, dtype = pages.device, weights.embedding.dtype
        expected = page_shape(config, len(pages), pages.dtype)
        if tuple(pages.shape) != expected or pages.dtype not in (dtype, torch.int8):
            raise ValueError(f"pages are {pages.dtype} {list(pages.shape)}, expected {list(expected)} of {dtype}")
        self._config = config
        self._weights = weights
        self._layer_pages = layer_pages(pages, config)
        self._max_context_tokens = limits.max_context_tokens
        scale = config.score_divisor**-0.5
        softcap = config.attention_softcap
        self._scoring = [DeviceScoring(scale, config.window_of(layer), softcap) for layer in range(config.num_layers)]
        capability = 90 if device.type == "cpu" else 10 * torch.cuda.get_device_capability(device)[0]
        self._decode_tiles = decode_tiles(config.head_dim, pages.dtype)
        self._prefill_tiles = prefill_tiles(config.num_heads, config.num_kv_heads, config.head_dim, dtype, capability)
        self._scratch = decode_scratch(
            limits.max_sequences,
            config.num_heads,
            config.head_dim,
            limits.max_context_tokens,
            self._decode_tiles,
            device,
        )
        self._rotary_tables = _tables_by_layer(config, device)
        kept = WeightFormat(dtype, weights.layers[0].down.dtype is torch.float8_e4m3fn)
        self._products = LayerProducts(kept, device, config.activation, is_exact=is_exact)
        self._buffers = _make_buffers(config, limits.max_rows, kept, device, self._products)
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
        products = self._products
        torch.index_select(self._weights.embedding, 0, batch.token_ids, out=buffers.residual)
        if self._config.embedding_scale != 1.0:
            buffers.residual.mul_(self._config.embedding_scale)
        for number, layer in enumerate(self._weights.layers):
            if number == 0:
                products.norm(buffers.residual, layer.attention_norm, epsilon, buffers.normed)
            else:
                products.norm(buffers.delta, layer.attention_norm, epsilon, buffers.normed, buffers.residual)
            self._attention(number, layer, batch, buffers)
            self._norm_delta(layer.after_attention_norm, buffers)
            scales = layer.scales
            products.norm(buffers.delta, layer.mlp_norm, epsilon, buffers.normed, buffers.residual)
            products.multiply(buffers.normed, layer.gate_up, scales.gate_up, None, buffers.gate_up)
            products.gate(buffers.gate_up, buffers.gated)
            products.multiply(buffers.gated, layer.down, scales.down, None, buffers.delta)
            self._norm_delta(layer.after_mlp_norm, buffers)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocabulary] of rows (int32) of the last `forward`; they are there until the next call.

        All graphs leave them at one place: buffers of their own would take the memory of many steps.
        """
        delta = self._buffers.delta.index_select(0, rows)
        residual = self._buffers.residual.index_select(0, rows)
        normed = torch.empty_like(delta)
        rms_norm(delta, self._weights.final_norm, self._config.rms_norm_eps, normed, residual)
        logits = self._logits[: len(rows)]
        self._products.linear(normed, self._weights.output, None, logits)
        cap = self._config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attention(self, number: int, layer: LayerWeights, batch: DeviceBatch, buffers: _Buffers) -> None:
        head_dim, num_heads = self._config.head_dim, self._config.num_heads
        pages = self._layer_pages[number]
        products, scales = self._products, layer.scales
        matrix, bias = layer.query_key_value, layer.query_key_value_bias
        products.multiply(buffers.normed, matrix, scales.query_key_value, bias, buffers.projected)
        heads = buffers.projected.view(len(buffers.projected), -1, head_dim)
        rotary_kv_write(
            heads,
            *self._rotary_tables[number],
            batch.positions,
            batch.slot_mapping,
            pages.keys,
            pages.values,
            pages.scales,
            self._head_norms(layer),
        )
        queries, out = heads[:, :num_heads], buffers.attended.view(-1, num_heads, head_dim)
        if batch.decode is not None:
            num_decodes = batch.decode.num_rows
            paged_decode(
                queries[:num_decodes],
                pages.keys,
                pages.values,
                batch.decode.work,
                self._scoring[number],
                out[:num_decodes],
                self._scratch,
                self._decode_tiles,
                pages.scales,
            )
        if batch.prefill is not None:
            self._prefill(number, batch.prefill, queries, out)
        rows = products.made_of(buffers.attended, buffers.quantized)
        matrix, bias = layer.attention_output, layer.attention_output_bias
        products.multiply(rows, matrix, scales.attention_output, bias, buffers.delta)

    def _norm_delta(self, weight: torch.Tensor | None, buffers: _Buffers) -> None:
        """Of models that norm what is added."""
        if weight is not None:
            rms_norm(buffers.delta, weight, self._config.rms_norm_eps, buffers.delta)

    def _head_norms(self, layer: LayerWeights) -> HeadNorms | None:
        if layer.query_norm is None or layer.key_norm is None:
            return None
        return HeadNorms(layer.query_norm, layer.key_norm, self._config.rms_norm_eps)

    def _prefill(self, number: int, index: PrefillIndex, queries: torch.Tensor, out: torch.Tensor) -> None:
        pages = self._layer_pages[number]
        paged_prefill(
            queries,
            pages.keys,
            pages.values,
            index.block_tables,
            index.first_rows,
            index.ends,
            index.tile_list,
            self._scoring[number],
            out,
            self._prefill_tiles,
            pages.scales,
        )
