"""Split-KV flash decoding (Dao, Haziza, Massa, Sizov: "Flash-Decoding for long-context inference", 2023) over pages.

The query heads that share a key head are the rows of one tile, so that its keys and values are read once.
"""

import triton
import triton.language as tl

from weir.ops.attention_block import attend_block, load_page_rows


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
