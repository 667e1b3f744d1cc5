"""Split-KV flash decoding (Dao, Haziza, Massa, Sizov: "Flash-Decoding for long-context inference", 2023) over pages.

The query heads that share a key head are the rows of one tile, so that its keys and values are read once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.gpu.attention import LOG2_E, attend_block, load_page_rows, query_heads_per_kv_head
from weir.ops.gpu.checks import check_dtype, check_kv_pages, check_rows, check_shape

_MIN_DOT_ROWS = 16
_MERGE_BLOCK = 16


# a table as wide as the longest sequence must not compile the kernel anew
@triton.jit(do_not_specialize=["stride_table"])
def paged_decode_kernel(
    p_queries,
    p_keys,
    p_values,
    p_tables,
    p_lengths,
    p_out,
    p_partial,
    p_lse,
    scale_log2,
    stride_query_row,
    stride_query_head,
    stride_page,
    stride_kv_head,
    stride_token,
    stride_table,
    stride_out_row,
    stride_out_head,
    max_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program (key head, row, split) attends to positions [split * SPLIT, ... + SPLIT) of its row.

    A row of one split is finished here. Of more, each split leaves its result and the base-2 logarithm of its sum of
    exponentials: partial [rows, heads, max_splits, HEAD_DIM], lse [rows, heads, max_splits], both fp32.
    """
    i_kv_head = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2)
    length = tl.load(p_lengths + i_row)
    start = i_split * SPLIT
    # a row of length 0 goes on in its first split, which writes zeros
    if (start >= length) & (i_split > 0):
        return
    end = tl.minimum(start + SPLIT, length)

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    m_q = (o_m < GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    o_head = i_kv_head * GROUP + o_m
    p_q = p_queries + i_row * stride_query_row + o_head[:, None] * stride_query_head + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)  # [BLOCK_M, BLOCK_D]

    p_table = p_tables + i_row * stride_table
    p_k = p_keys + i_kv_head * stride_kv_head
    p_v = p_values + i_kv_head * stride_kv_head
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_N):
        m_n = first + o_n < end
        b_k = load_page_rows(p_k, p_table, first + o_n, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, True)
        b_v = load_page_rows(p_v, p_table, first + o_n, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, True)
        b_max, b_sum, b_acc = attend_block(b_q, b_k, b_v, b_max, b_sum, b_acc, m_n[None, :], scale_log2, True)

    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    if length <= SPLIT:
        p_o = p_out + i_row * stride_out_row + o_head[:, None] * stride_out_head + o_d[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_q)
    else:
        num_heads = tl.num_programs(0) * GROUP
        o_split = (i_row * num_heads + o_head) * max_splits + i_split  # [BLOCK_M]
        tl.store(p_partial + o_split[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=m_q)
        tl.store(p_lse + o_split, tl.fma(b_max, scale_log2, tl.log2(b_sum)), mask=o_m < GROUP)


@triton.jit
def merge_splits_kernel(
    p_partial,
    p_lse,
    p_lengths,
    p_out,
    stride_out_row,
    stride_out_head,
    max_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (head, row) adds up its splits in order, BLOCK_S at a time, whatever `max_splits` is."""
    i_head = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(1).to(tl.int64)
    length = tl.load(p_lengths + i_row)
    if length <= SPLIT:
        return
    num_splits = tl.cdiv(length, SPLIT)
    first_split = (i_row * tl.num_programs(0) + i_head) * max_splits

    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    b_max = tl.full([], float("-inf"), tl.float32)
    b_sum = tl.zeros([], tl.float32)
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        o_s = first + tl.arange(0, BLOCK_S)
        m_s = o_s < num_splits
        b_lse = tl.load(p_lse + first_split + o_s, mask=m_s, other=float("-inf"))  # [BLOCK_S]
        p_rows = p_partial + (first_split + o_s)[:, None] * HEAD_DIM + o_d[None, :]
        b_rows = tl.load(p_rows, mask=m_s[:, None] & m_d[None, :], other=0.0)  # [BLOCK_S, BLOCK_D]
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_weight = tl.exp2(b_lse - b_new_max)
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = tl.fma(b_sum, b_decay, tl.sum(b_weight, 0))
        b_acc = b_acc * b_decay + tl.sum(b_weight[:, None] * b_rows, 0)
        b_max = b_new_max
    p_o = p_out + i_row * stride_out_row + i_head * stride_out_head + o_d
    tl.store(p_o, (b_acc / b_sum).to(p_out.dtype.element_ty), mask=m_d)


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
