"""The kernels' benchmark: what is run, on what shapes, and what else computes the same.

Each rival gets what it likes best: contiguous copies where it has no pages. What it needs may be missing (a compiler, a
package): making it raises, and the benchmark's table says why.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.ops import reference
from weir.ops.gpu import decode_work as work_list
from weir.ops.gpu import exact_linear as linear
from weir.ops.gpu import gated as gate
from weir.ops.gpu import paged_decode as decode
from weir.ops.gpu import paged_prefill as prefill
from weir.ops.gpu import rms_norm, sampling
from weir.ops.gpu import rotary_kv_write as rotary
from weir.ops.gpu.attention import DeviceScoring

Call = Callable[[], object]
_FLASHINFER_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`error` runs kernel and reference: the greatest difference over the reference's greatest value.

    `num_bytes` are read and written once each by the best of kernels; `rivals` make what computes the same.
    """

    op: str
    shape: str
    num_bytes: int
    num_flops: int
    run: Call
    error: Callable[[], float]
    rivals: Mapping[str, Callable[[], Call]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of a model's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = AttentionShape("8B", 32, 8, 128)
SMOLLM = AttentionShape("135M", 9, 3, 64)


@dataclass(frozen=True, slots=True)
class KvBatch:
    """`keys`, `values` [pages, kv heads, PAGE_TOKENS, head_dim]; `block_tables` int32 [sequences, pages a sequence]."""

    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor
    lengths: list[int]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies [sequences, kv heads, length, head_dim] of sequences that are all of one length."""
        length = self.lengths[0]
        return self._gather(self.keys, length), self._gather(self.values, length)

    def _gather(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        num_sequences, num_pages = self.block_tables.shape
        rows = pages[self.block_tables.long()].transpose(1, 2)
        rows = rows.reshape(num_sequences, pages.shape[1], num_pages * PAGE_TOKENS, pages.shape[3])
        return rows[:, :, :length].contiguous()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))


def kv_batch(shape: AttentionShape, lengths: list[int], dtype: torch.dtype, device: torch.device) -> KvBatch:
    """Sequences in pages of random order, between which lie the keys and values of a second layer."""
    counts = [num_pages_for(length) for length in lengths]
    pages = torch.randn(sum(counts), 2, 2, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim, device=device, dtype=dtype)
    order = torch.randperm(sum(counts), device=device, dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(counts), device=device, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[first : first + count]
        first += count
    return KvBatch(pages[:, 0, 0], pages[:, 0, 1], tables, lengths)


def decode_case(
    shape: AttentionShape,
    lengths: list[int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    tiles: work_list.DecodeTiles | None = None,
    with_rivals: bool = False,
) -> KernelCase:
    """Rivals want all lengths to be the same."""
    kv = kv_batch(shape, lengths, dtype, device)
    batch, scale = len(lengths), shape.head_dim**-0.5
    tiles = tiles or work_list.decode_tiles(shape.head_dim, dtype)
    queries = torch.randn(batch, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
    out = torch.empty_like(queries)
    scratch = decode.decode_scratch(batch, shape.num_heads, shape.head_dim, max(lengths) + PAGE_TOKENS, tiles, device)
    ends = torch.tensor(lengths, device=device, dtype=torch.int32)
    work = work_list.decode_work(kv.block_tables, ends, tiles)
    run = partial(decode.paged_decode, queries, kv.keys, kv.values, work, DeviceScoring(scale), out, scratch, tiles)

    def error() -> float:
        run()
        expected = reference.paged_decode(queries, kv.keys, kv.values, kv.block_tables, ends, scale)
        return relative_error(out, expected)

    kv_elements = 2 * sum(lengths) * shape.num_kv_heads * shape.head_dim
    return KernelCase(
        "paged_decode",
        f"{shape.name} {batch} x {_span(lengths)}",
        (kv_elements + 2 * queries.numel()) * dtype.itemsize,
        4 * sum(lengths) * shape.num_heads * shape.head_dim,
        run,
        error,
        decode_rivals(queries, kv, scale) if with_rivals else {},
    )


def prefill_case(
    shape: AttentionShape,
    chunk: int,
    ends: list[int],
    device: torch.device,
    compute_capability: int,
    dtype: torch.dtype = torch.bfloat16,
    with_rivals: bool = False,
) -> KernelCase:
    """A chunk of the same length at the end of each sequence. Rivals want whole prompts."""
    kv = kv_batch(shape, ends, dtype, device)
    num_sequences, scale = len(ends), shape.head_dim**-0.5
    queries = torch.randn(num_sequences * chunk, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
    out = torch.empty_like(queries)
    tiles = prefill.prefill_tiles(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, compute_capability)
    queries_per_tile = tiles.queries_per_tile(shape.num_heads, shape.num_kv_heads)
    tile_list = prefill.tiles_of([chunk] * num_sequences, ends, queries_per_tile)
    first_rows = torch.arange(num_sequences + 1, device=device, dtype=torch.int32) * chunk
    index = (kv.block_tables, first_rows, torch.tensor(ends, device=device, dtype=torch.int32))
    device_tiles = torch.tensor(tile_list, device=device, dtype=torch.int32)
    run = partial(
        prefill.paged_prefill, queries, kv.keys, kv.values, *index, device_tiles, DeviceScoring(scale), out, tiles
    )

    def error() -> float:
        run()
        return relative_error(out, reference.paged_prefill(queries, kv.keys, kv.values, *index, scale))

    pairs = sum(chunk * (end - chunk) + chunk * (chunk + 1) // 2 for end in ends)
    kv_elements = 2 * sum(ends) * shape.num_kv_heads * shape.head_dim
    return KernelCase(
        "paged_prefill",
        f"{shape.name} {num_sequences} x {chunk} of {_span(ends)}",
        (kv_elements + 2 * queries.numel()) * dtype.itemsize,
        4 * pairs * shape.num_heads * shape.head_dim,
        run,
        error,
        prefill_rivals(queries, kv, scale) if with_rivals else {},
    )


def _span(lengths: list[int]) -> str:
    return str(lengths[0]) if len(set(lengths)) == 1 else f"{min(lengths)}-{max(lengths)}"


def norm_case(num_rows: int, hidden: int, device: torch.device) -> KernelCase:
    rows, residual = (torch.randn(num_rows, hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(hidden, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(rows)
    run = partial(rms_norm.rms_norm, rows, weight, 1e-5, out, residual)

    def error() -> float:
        expected = reference.rms_norm(rows, weight, 1e-5, residual.clone())
        run()
        return relative_error(out, expected)

    return KernelCase("rms_norm + residual", f"{num_rows} x {hidden}", 4 * rows.nbytes + weight.nbytes, 0, run, error)


def linear_case(
    num_rows: int, num_outputs: int, num_inputs: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> KernelCase:
    rows = torch.randn(num_rows, num_inputs, device=device, dtype=dtype)
    matrix = torch.randn(num_outputs, num_inputs, device=device, dtype=dtype)
    out = torch.empty(num_rows, num_outputs, device=device, dtype=dtype)
    run = partial(linear.exact_linear, rows, matrix, None, out)

    def error() -> float:
        run()
        return relative_error(out, reference.linear(rows, matrix))

    num_bytes = rows.nbytes + matrix.nbytes + out.nbytes
    shape = f"{num_rows} x {num_outputs} x {num_inputs}"
    return KernelCase("exact_linear", shape, num_bytes, 2 * num_rows * matrix.numel(), run, error)


def silu_case(num_rows: int, width: int, device: torch.device) -> KernelCase:
    gate_up = torch.randn(num_rows, 2 * width, device=device, dtype=torch.bfloat16)
    out = torch.empty(num_rows, width, device=device, dtype=torch.bfloat16)
    run = partial(gate.gated, gate_up, out)

    def error() -> float:
        run()
        return relative_error(out, reference.gated(gate_up))

    return KernelCase("silu_mul", f"{num_rows} x {width}", gate_up.nbytes + out.nbytes, 0, run, error)


def rotary_case(shape: AttentionShape, num_rows: int, device: torch.device, *, has_norms: bool = False) -> KernelCase:
    dtype = torch.bfloat16
    pages = torch.zeros(
        num_pages_for(num_rows), 2, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim, device=device, dtype=dtype
    )
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    rows = torch.randn(num_rows, num_heads, shape.head_dim, device=device, dtype=dtype)
    angles = torch.rand(num_rows, shape.head_dim // 2, device=device) * 6.28
    positions = torch.arange(num_rows, device=device, dtype=torch.int32)
    slot_mapping = torch.randperm(pages.shape[0] * PAGE_TOKENS, device=device)[:num_rows]
    index = (angles.cos(), angles.sin(), positions, slot_mapping)
    norm = torch.rand(shape.head_dim, device=device, dtype=dtype) + 0.5
    norms = reference.HeadNorms(norm, norm, 1e-6) if has_norms else None
    run = partial(rotary.rotary_kv_write, rows, *index, pages[:, 0], pages[:, 1], None, norms)

    def error() -> float:
        expected, expected_pages = rows.clone(), pages.clone()
        reference.rotary_kv_write(expected, *index, expected_pages[:, 0], expected_pages[:, 1], norms)
        run()
        return max(relative_error(rows, expected), relative_error(pages, expected_pages))

    query_bytes = 2 * num_rows * shape.num_heads * shape.head_dim * dtype.itemsize
    kv_bytes = 4 * num_rows * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    table_bytes = 2 * angles.nbytes
    return KernelCase(
        "rotary_kv_write", f"{shape.name} {num_rows}", query_bytes + kv_bytes + table_bytes, 0, run, error
    )


def sampling_case(num_rows: int, vocab_size: int, device: torch.device) -> KernelCase:
    logits = torch.randn(num_rows, vocab_size, device=device) * 3
    temperatures = torch.linspace(0.0, 1.5, num_rows, device=device)
    uniforms = torch.rand(num_rows, device=device, dtype=torch.float64)
    token_ids = torch.empty(num_rows, device=device, dtype=torch.int32)
    scratch = sampling.sampling_scratch(num_rows, vocab_size, device)
    run = partial(sampling.sample, logits, temperatures, uniforms, token_ids, scratch)

    def error() -> float:
        run()
        return float((token_ids != reference.sample(logits, temperatures, uniforms)).sum())

    rival = partial(torch.argmax, logits, -1)
    return KernelCase(
        "sampling",
        f"{num_rows} x {vocab_size}",
        logits.nbytes,
        0,
        run,
        error,
        {"torch argmax alone": lambda: rival},
    )


def decode_rivals(queries: torch.Tensor, kv: KvBatch, scale: float) -> Mapping[str, Callable[[], Call]]:
    """`queries` [rows, heads, head_dim]."""
    return {
        "torch SDPA, gathering": lambda: partial(_gather_and_attend, queries[:, :, None], kv, scale),
        "torch SDPA, contiguous": lambda: partial(
            functional.scaled_dot_product_attention,
            queries[:, :, None],
            *kv.contiguous(),
            scale=scale,
            enable_gqa=True,
        ),
        "FlexAttention, contiguous": lambda: _flex(queries[:, :, None], kv, scale, is_causal=False),
        "FlashInfer": lambda: _flashinfer_decode(queries, kv, scale),
    }


def prefill_rivals(queries: torch.Tensor, kv: KvBatch, scale: float) -> Mapping[str, Callable[[], Call]]:
    """`queries` [sequences * length, heads, head_dim]: whole prompts of one length."""
    length = kv.lengths[0]
    batched = queries.reshape(len(kv.lengths), length, *queries.shape[1:]).transpose(1, 2)
    return {
        "torch SDPA, contiguous": lambda: partial(
            functional.scaled_dot_product_attention,
            batched,
            *kv.contiguous(),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        ),
        "FlexAttention, contiguous": lambda: _flex(batched, kv, scale, is_causal=True),
    }


def _gather_and_attend(queries: torch.Tensor, kv: KvBatch, scale: float) -> torch.Tensor:
    keys, values = kv.contiguous()
    return functional.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)


def _flex(queries: torch.Tensor, kv: KvBatch, scale: float, is_causal: bool) -> Call:
    flex = import_module("torch.nn.attention.flex_attention")
    keys, values = kv.contiguous()
    mask = None
    if is_causal:
        mask = flex.create_block_mask(
            lambda _batch, _head, query, key: query >= key,
            None,
            None,
            queries.shape[2],
            keys.shape[2],
            device=queries.device,
        )
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
    return partial(compiled, queries, keys, values, scale=scale, enable_gqa=True, block_mask=mask)


def _flashinfer_decode(queries: torch.Tensor, kv: KvBatch, scale: float) -> Call:
    flashinfer = import_module("flashinfer")
    num_rows, num_heads, head_dim = queries.shape
    device = queries.device
    num_pages = kv.block_tables.shape[1]
    workspace = torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_pages,
        kv.block_tables.flatten(),
        torch.full((num_rows,), (kv.lengths[0] - 1) % PAGE_TOKENS + 1, dtype=torch.int32, device=device),
        num_heads,
        kv.keys.shape[1],
        head_dim,
        PAGE_TOKENS,
        q_data_type=queries.dtype,
        kv_data_type=kv.keys.dtype,
        sm_scale=scale,
    )
    return partial(wrapper.run, queries, (kv.keys, kv.values))
