"""Launches paged decode attention on a GPU (or in Triton's interpreter)."""

from dataclasses import dataclass

import torch
import triton

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.checks import check_dtype, check_kv_pages, check_rows, check_shape, query_heads_per_kv_head
from weir.ops.paged_decode.kernel import merge_splits_kernel, paged_decode_kernel

LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16
_MERGE_BLOCK = 16


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the work is cut. `split_tokens` and `block_tokens` set the order of additions, so results depend on them to
    the last bit: they are functions of the model's shape and type, never of the batch."""

    split_tokens: int
    block_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Room for the splits' results, reused by every layer and step: `partial` [rows, heads, splits, head_dim] and
    `lse` [rows, heads, splits], fp32."""

    partial: torch.Tensor
    lse: torch.Tensor


def decode_tiles(head_dim: int, dtype: torch.dtype) -> DecodeTiles:
    """A block is 32 KiB of keys and values, read two blocks ahead, so that a few programs on a multiprocessor keep
    enough bytes in flight to hide memory latency. Triton's pipeliner halves the stages of a load whose address comes
    from another load, as a page's does: 5 stages read 2 blocks ahead, 3 and 4 only 1.
    """
    block_tokens = min(128, 16384 // (triton.next_power_of_2(head_dim) * dtype.itemsize))
    return DecodeTiles(split_tokens=512, block_tokens=block_tokens, num_warps=4, num_stages=5)


def decode_scratch(
    max_rows: int, num_heads: int, head_dim: int, max_context_tokens: int, tiles: DecodeTiles, device: torch.device
) -> DecodeScratch:
    """Scratch for batches of up to `max_rows` rows of up to `max_context_tokens` positions."""
    splits = triton.cdiv(max_context_tokens, tiles.split_tokens)
    return DecodeScratch(
        torch.empty(max_rows, num_heads, splits, head_dim, dtype=torch.float32, device=device),
        torch.empty(max_rows, num_heads, splits, dtype=torch.float32, device=device),
    )


def paged_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    scratch: DecodeScratch,
    tiles: DecodeTiles,
) -> None:
    """Writes `out` [rows, heads, head_dim]; shapes and meaning as `reference.paged_decode`.

    `block_tables` and `lengths` are int32. Lengths must not pass the tables' width: they live on the device and are
    not checked. A row's result depends on its own query, pages and length only.

    Raises:
        ValueError: a shape, type or stride does not fit, or the scratch is too small for the tables' width.
    """
    group = query_heads_per_kv_head(queries, keys)
    check_kv_pages(keys, values)
    check_shape("out", out, queries.shape)
    check_rows("out", out)
    num_rows, _, head_dim = queries.shape
    _check_index(block_tables, lengths, num_rows)
    num_splits = triton.cdiv(block_tables.shape[1] * PAGE_TOKENS, tiles.split_tokens)
    max_splits = _check_scratch(scratch, queries, num_splits)
    if num_rows == 0:
        return
    paged_decode_kernel[keys.shape[1], num_rows, num_splits](
        queries,
        keys,
        values,
        block_tables,
        lengths,
        out,
        scratch.partial,
        scratch.lse,
        scale * LOG2_E,
        queries.stride(0),
        queries.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        max_splits,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        BLOCK_N=tiles.block_tokens,
        SPLIT=tiles.split_tokens,
        PAGE=PAGE_TOKENS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
    if num_splits > 1:
        _merge_splits(scratch, lengths, out, tiles)


def _merge_splits(scratch: DecodeScratch, lengths: torch.Tensor, out: torch.Tensor, tiles: DecodeTiles) -> None:
    num_rows, num_heads, head_dim = out.shape
    merge_splits_kernel[num_heads, num_rows](
        scratch.partial,
        scratch.lse,
        lengths,
        out,
        out.stride(0),
        out.stride(1),
        scratch.lse.shape[2],
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_S=_MERGE_BLOCK,
        SPLIT=tiles.split_tokens,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _check_index(block_tables: torch.Tensor, lengths: torch.Tensor, num_rows: int) -> None:
    check_shape("block_tables", block_tables, (num_rows, None))
    check_dtype("block_tables", block_tables, torch.int32)
    check_rows("block_tables", block_tables)
    check_shape("lengths", lengths, (num_rows,))
    check_dtype("lengths", lengths, torch.int32)


def _check_scratch(scratch: DecodeScratch, queries: torch.Tensor, num_splits: int) -> int:
    """Splits that the scratch has room for."""
    num_rows, num_heads, head_dim = queries.shape
    check_shape("scratch.lse", scratch.lse, (None, num_heads, None))
    max_rows, _, max_splits = scratch.lse.shape
    check_shape("scratch.partial", scratch.partial, (max_rows, num_heads, max_splits, head_dim))
    check_dtype("scratch.partial", scratch.partial, torch.float32)
    check_dtype("scratch.lse", scratch.lse, torch.float32)
    if not (scratch.partial.is_contiguous() and scratch.lse.is_contiguous()):
        raise ValueError("the scratch of paged decode must be contiguous")
    if max_rows < num_rows or max_splits < num_splits:
        raise ValueError(
            f"the scratch has room for {max_rows} rows of {max_splits} splits, this batch needs {num_rows} of "
            f"{num_splits}: make it with decode_scratch() for the largest batch and context"
        )
    return max_splits
