"""Rotary embedding (Su et al., "RoFormer", 2021; halves, not neighbours, as in GPT-NeoX) fused with the KV write, and
with the norm of each head before it (Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023).
"""

import torch
import triton
import triton.language as tl

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.gpu.checks import check_dtype, check_kv_pages, check_kv_scales, check_rows, check_shape
from weir.ops.reference import HeadNorms
from weir.ops.reference_quantized import INT8_MAX, LEAST_AMAX, KvScales

_BLOCK_HEADS = 4
_INT8_MAX = tl.constexpr(INT8_MAX)
_SCALE_OF_MAX = tl.constexpr(1.0 / INT8_MAX)
_LEAST_AMAX = tl.constexpr(LEAST_AMAX)
_ROUND_TO_INTEGER = tl.constexpr(12582912.0)
"""The sum of this and a number below 2**22 is rounded to whole numbers, ties to even."""


@triton.jit
def store_quantized_heads(b_first, b_second, p_page, p_scale, HALF: tl.constexpr, m_head):
    """int8 of the two halves of heads, fp32 [BLOCK_HEADS, BLOCK_HALF] each and 0 outside m_head, and their scales."""
    b_amax = tl.maximum(tl.max(tl.abs(b_first), 1), tl.max(tl.abs(b_second), 1))[:, None]
    b_amax = tl.maximum(b_amax, _LEAST_AMAX)  # [BLOCK_HEADS, 1]
    b_inverse = tl.div_rn(_INT8_MAX, b_amax)
    b_first = b_first * b_inverse + _ROUND_TO_INTEGER - _ROUND_TO_INTEGER
    b_second = b_second * b_inverse + _ROUND_TO_INTEGER - _ROUND_TO_INTEGER
    tl.store(p_page, b_first.to(tl.int8), mask=m_head)
    tl.store(p_page + HALF, b_second.to(tl.int8), mask=m_head)
    m_any = tl.max(m_head.to(tl.int32), 1)[:, None] > 0
    tl.store(p_scale, b_amax * _SCALE_OF_MAX, mask=m_any)


@triton.jit
def load_heads(p_heads, p_norm, epsilon, HALF: tl.constexpr, HAS_NORM: tl.constexpr, o_half, m_half, m_head):
    """The two halves of heads, fp32 [BLOCK_HEADS, BLOCK_HALF] each, normed by the weights [2 * HALF] at p_norm."""
    b_first = tl.load(p_heads, mask=m_head, other=0.0).to(tl.float32)
    b_second = tl.load(p_heads + HALF, mask=m_head, other=0.0).to(tl.float32)
    if HAS_NORM:
        b_squares = tl.sum(b_first * b_first + b_second * b_second, 1)
        b_scale = tl.rsqrt(b_squares / (2 * HALF) + epsilon)[:, None]
        b_first = b_first * b_scale * tl.load(p_norm + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
        b_second = b_second * b_scale * tl.load(p_norm + HALF + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
    return b_first, b_second


@triton.jit
def rotary_kv_write_kernel(
    p_qkv,
    p_cos,
    p_sin,
    p_positions,
    p_slot_mapping,
    p_keys,
    p_values,
    p_key_scales,
    p_value_scales,
    p_query_norm,
    p_key_norm,
    epsilon,
    stride_qkv_row,
    stride_qkv_head,
    stride_table_row,
    stride_page,
    stride_kv_head,
    stride_token,
    stride_scale_page,
    stride_scale_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_NORM: tl.constexpr,
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
        b_first, b_second = load_heads(p_q, p_query_norm, epsilon, HALF, HAS_NORM, o_half, m_half, m_head)
        tl.store(p_q, (b_first * b_cos - b_second * b_sin).to(p_qkv.dtype.element_ty), mask=m_head)
        tl.store(p_q + HALF, (b_second * b_cos + b_first * b_sin).to(p_qkv.dtype.element_ty), mask=m_head)
    else:
        kv_slot = tl.load(p_slot_mapping + i_row).to(tl.int64)
        o_head = (i_block - QUERY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        m_head = (o_head < NUM_KV_HEADS)[:, None] & m_half[None, :] & (kv_slot >= 0)
        p_k = p_row + (NUM_HEADS + o_head)[:, None] * stride_qkv_head
        p_v = p_k + NUM_KV_HEADS * stride_qkv_head
        o_kv = (kv_slot // PAGE) * stride_page + (kv_slot % PAGE) * stride_token
        o_page = o_kv + o_head.to(tl.int64)[:, None] * stride_kv_head + o_half[None, :]
        b_first, b_second = load_heads(p_k, p_key_norm, epsilon, HALF, HAS_NORM, o_half, m_half, m_head)
        b_first_key = b_first * b_cos - b_second * b_sin
        b_second_key = b_second * b_cos + b_first * b_sin
        b_first_value = tl.load(p_v, mask=m_head, other=0.0)
        b_second_value = tl.load(p_v + HALF, mask=m_head, other=0.0)
        if IS_INT8:
            o_scale = (kv_slot // PAGE) * stride_scale_page + kv_slot % PAGE
            o_scale += o_head.to(tl.int64)[:, None] * stride_scale_head
            store_quantized_heads(b_first_key, b_second_key, p_keys + o_page, p_key_scales + o_scale, HALF, m_head)
            b_first_value, b_second_value = b_first_value.to(tl.float32), b_second_value.to(tl.float32)
            store_quantized_heads(
                b_first_value, b_second_value, p_values + o_page, p_value_scales + o_scale, HALF, m_head
            )
        else:
            tl.store(p_keys + o_page, b_first_key.to(p_keys.dtype.element_ty), mask=m_head)
            tl.store(p_keys + o_page + HALF, b_second_key.to(p_keys.dtype.element_ty), mask=m_head)
            tl.store(p_values + o_page, b_first_value.to(p_values.dtype.element_ty), mask=m_head)
            tl.store(p_values + o_page + HALF, b_second_value.to(p_values.dtype.element_ty), mask=m_head)


def rotary_kv_write(
    query_key_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KvScales | None = None,
    norms: HeadNorms | None = None,
) -> None:
    """Shapes and meaning as `reference.rotary_kv_write`, with `scales` as
    `reference_quantized.rotary_kv_write`. Tables are fp32, `positions` int32, `slot_mapping` int32 or int64.

    Positions and slot mapping live on the device and are not checked against the tables and pages.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    check_kv_pages(keys, values)
    found = check_kv_scales(keys, scales)
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_rows = query_key_value.shape[0]
    num_heads = query_key_value.shape[1] - 2 * num_kv_heads
    check_shape("query_key_value", query_key_value, (num_rows, None, head_dim))
    check_rows("query_key_value", query_key_value)
    if num_heads < 1 or head_dim % 2:
        raise ValueError(
            f"query_key_value has {query_key_value.shape[1]} heads of {head_dim}, expected more than "
            f"2 x {num_kv_heads} heads of an even size"
        )
    _check_norms(norms, head_dim)
    _check_places(cos, sin, positions, slot_mapping, (num_rows, head_dim))
    if num_rows == 0:
        return
    num_blocks = triton.cdiv(num_heads, _BLOCK_HEADS) + triton.cdiv(num_kv_heads, _BLOCK_HEADS)
    rotary_kv_write_kernel[num_rows, num_blocks](
        query_key_value,
        cos,
        sin,
        positions,
        slot_mapping,
        keys,
        values,
        found.keys,
        found.values,
        cos if norms is None else norms.queries,
        cos if norms is None else norms.keys,
        0.0 if norms is None else norms.epsilon,
        *query_key_value.stride()[:2],
        cos.stride(0),
        *keys.stride()[:3],
        *found.keys.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=_BLOCK_HEADS,
        PAGE=PAGE_TOKENS,
        IS_INT8=scales is not None,
        HAS_NORM=norms is not None,
        num_warps=1,
    )


def _check_norms(norms: HeadNorms | None, head_dim: int) -> None:
    if norms is not None:
        for name, weight in (("norms.queries", norms.queries), ("norms.keys", norms.keys)):
            check_shape(name, weight, (head_dim,))
            check_rows(name, weight)


def _check_places(
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    shape: tuple[int, int],
) -> None:
    """`shape`: rows, and the size of a head."""
    num_rows, head_dim = shape
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (cos.shape[0], head_dim // 2))
        check_dtype(name, table, torch.float32)
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    check_shape("positions", positions, (num_rows,))
    check_dtype("positions", positions, torch.int32)
    check_shape("slot_mapping", slot_mapping, (num_rows,))
    check_dtype("slot_mapping", slot_mapping, torch.int32, torch.int64)
