"""Rotary embedding (Su et al., "RoFormer", 2021; halves, not neighbours, as in GPT-NeoX) fused with the KV write."""

import triton
import triton.language as tl


@triton.jit
def rotary_kv_write_kernel(
    p_qkv,
    p_cos,
    p_sin,
    p_positions,
    p_slots,
    p_keys,
    p_values,
    stride_qkv_row,
    stride_qkv_head,
    stride_table_row,
    stride_page,
    stride_kv_head,
    stride_token,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program (row, block of heads). The blocks of query heads come first, then those of key heads with their values.

    Each head is read as its two halves, [BLOCK_HEADS, BLOCK_HALF] each.
    """
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    i_row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    o_half = tl.arange(0, BLOCK_HALF)
    m_half = o_half < HALF
    position = tl.load(p_positions + i_row).to(tl.int64)
    b_cos = tl.load(p_cos + position * stride_table_row + o_half, mask=m_half, other=0.0)[None, :]
    b_sin = tl.load(p_sin + position * stride_table_row + o_half, mask=m_half, other=0.0)[None, :]
    p_row = p_qkv + i_row * stride_qkv_row + o_half[None, :]

    if i_block < QUERY_BLOCKS:
        o_head = i_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        m_head = (o_head < NUM_HEADS)[:, None] & m_half[None, :]
        p_q = p_row + o_head[:, None] * stride_qkv_head
        b_first = tl.load(p_q, mask=m_head, other=0.0).to(tl.float32)
        b_second = tl.load(p_q + HALF, mask=m_head, other=0.0).to(tl.float32)
        tl.store(p_q, (b_first * b_cos - b_second * b_sin).to(p_qkv.dtype.element_ty), mask=m_head)
        tl.store(p_q + HALF, (b_second * b_cos + b_first * b_sin).to(p_qkv.dtype.element_ty), mask=m_head)
    else:
        slot = tl.load(p_slots + i_row).to(tl.int64)
        o_head = (i_block - QUERY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        m_head = (o_head < NUM_KV_HEADS)[:, None] & m_half[None, :] & (slot >= 0)
        p_k = p_row + (NUM_HEADS + o_head)[:, None] * stride_qkv_head
        p_v = p_k + NUM_KV_HEADS * stride_qkv_head
        o_kv = (slot // PAGE) * stride_page + (slot % PAGE) * stride_token
        o_page = o_kv + o_head.to(tl.int64)[:, None] * stride_kv_head + o_half[None, :]
        b_first = tl.load(p_k, mask=m_head, other=0.0).to(tl.float32)
        b_second = tl.load(p_k + HALF, mask=m_head, other=0.0).to(tl.float32)
        tl.store(p_keys + o_page, (b_first * b_cos - b_second * b_sin).to(p_keys.dtype.element_ty), mask=m_head)
        tl.store(p_keys + o_page + HALF, (b_second * b_cos + b_first * b_sin).to(p_keys.dtype.element_ty), mask=m_head)
        b_first_value = tl.load(p_v, mask=m_head, other=0.0)
        b_second_value = tl.load(p_v + HALF, mask=m_head, other=0.0)
        tl.store(p_values + o_page, b_first_value.to(p_values.dtype.element_ty), mask=m_head)
        tl.store(p_values + o_page + HALF, b_second_value.to(p_values.dtype.element_ty), mask=m_head)
