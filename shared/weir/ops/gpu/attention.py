"""What decode and prefill share: one block of keys and values of the flash-attention loop, and checks of queries.

Multiply-adds are fused where `tl.fma` says so and nowhere else (launchers turn the compiler's own fusion off): were it
to contract masked and unmasked blocks differently, a row's result would depend on where a chunk begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_dtype, check_rows, check_shape
from weir.ops.head_dims import TRITON_HEAD_DIMS

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DeviceScoring:
    """As `reference.paged_decode` has them: what products are multiplied with, how many positions are seen at most, and
    what scores are capped at."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def numbers(self) -> tuple[float, float, int]:
        """As kernels have them: what scores are multiplied with before two is raised to them, products before tanh if
        they are capped, and the window."""
        if self.softcap is None:
            return self.scale * LOG2_E, 0.0, self.window or 0
        return self.softcap * LOG2_E, self.scale / self.softcap, self.window or 0

    @property
    def flags(self) -> Mapping[str, bool]:
        """What is compiled in."""
        return {"HAS_WINDOW": self.window is not None, "IS_CAPPED": self.softcap is not None}


@triton.jit
def load_page_rows(
    p_pages,
    p_table,
    o_n,
    m_n,
    stride_page,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows o_n of one head, from their pages; rows outside m_n read as 0, whatever the page holds there."""
    o_d = tl.arange(0, BLOCK_D)
    if MASKED:
        b_page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0)  # [BLOCK_N]
    else:
        b_page = tl.load(p_table + o_n // PAGE)  # [BLOCK_N]
    o_row = b_page.to(tl.int64) * stride_page + (o_n % PAGE) * stride_token
    p_rows = p_pages + o_row[:, None] + o_d[None, :]  # [BLOCK_N, BLOCK_D]
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(p_rows, mask=m_n[:, None], other=0.0)
        return tl.load(p_rows, mask=m_n[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM == BLOCK_D:
        return tl.load(p_rows)
    return tl.load(p_rows, mask=(o_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_page_scales(
    p_key_scales,
    p_value_scales,
    p_table,
    o_n,
    m_n,
    stride_scale_page,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """What the keys and the values of rows o_n of one head are to be multiplied by [BLOCK_N]; nothing of use if they
    are not int8."""
    b_key_scale, b_value_scale = o_n, o_n
    if IS_INT8:
        if MASKED:
            b_page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0)
            o_scale = b_page.to(tl.int64) * stride_scale_page + o_n % PAGE
            b_key_scale = tl.load(p_key_scales + o_scale, mask=m_n, other=0.0)
            b_value_scale = tl.load(p_value_scales + o_scale, mask=m_n, other=0.0)
        else:
            o_scale = tl.load(p_table + o_n // PAGE).to(tl.int64) * stride_scale_page + o_n % PAGE
            b_key_scale = tl.load(p_key_scales + o_scale)
            b_value_scale = tl.load(p_value_scales + o_scale)
    return b_key_scale, b_value_scale


@triton.jit
def attend_block(
    b_q,
    b_k,
    b_v,
    b_k_scale,
    b_v_scale,
    b_max,
    b_sum,
    b_acc,
    m_s,
    scale_log2,
    cap_factor,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Online softmax in base 2 over one block: [BLOCK_M, BLOCK_D] x [BLOCK_N, BLOCK_D].

    Keys and values in int8 are exact in the queries' type; their scales go to the scores and to the weights.
    b_max [BLOCK_M] is the greatest score before scaling, b_sum [BLOCK_M] the sum of 2^(scaled score - scaled b_max).
    Every row sees at least one key of the first block, so b_max is finite from then on; with HAS_WINDOW it may see none
    at first, which changes no bit of it. IS_CAPPED: a product s counts as tanh(s * cap_factor).
    """
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if IS_INT8:
        b_s = b_s * b_k_scale[None, :]
    if IS_CAPPED:
        b_s = 2.0 * tl.sigmoid(2.0 * (b_s * cap_factor)) - 1.0
    if MASKED:
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = b_new_max
    if HAS_WINDOW:
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(tl.fma(b_s, scale_log2, (-b_shift * scale_log2)[:, None]))  # [BLOCK_M, BLOCK_N]
    b_decay = tl.exp2((b_max - b_shift) * scale_log2)
    b_sum = tl.fma(b_sum, b_decay, tl.sum(b_p, 1))
    if IS_INT8:
        b_p = b_p * b_v_scale[None, :]
    b_acc = tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc * b_decay[:, None], input_precision="ieee")
    return b_new_max, b_sum, b_acc


@triton.jit
def attend_pages(
    b_q,
    p_k,
    p_v,
    p_ks,
    p_vs,
    p_table,
    o_n,
    m_n,
    m_s,
    b_max,
    b_sum,
    b_acc,
    scale_log2,
    cap_factor,
    stride_page,
    stride_token,
    stride_scale_page,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """`attend_block` over positions o_n [BLOCK_N] of a sequence; those outside m_n are not read."""
    b_k = load_page_rows(p_k, p_table, o_n, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, MASKED)
    b_v = load_page_rows(p_v, p_table, o_n, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, MASKED)
    b_ks, b_vs = load_page_scales(p_ks, p_vs, p_table, o_n, m_n, stride_scale_page, PAGE, MASKED, IS_INT8)
    return attend_block(
        b_q, b_k, b_v, b_ks, b_vs, b_max, b_sum, b_acc, m_s, scale_log2, cap_factor, MASKED, HAS_WINDOW, IS_CAPPED,
        IS_INT8
    )  # fmt: skip


def query_heads_per_kv_head(queries: torch.Tensor, keys: torch.Tensor) -> int:
    """Checks `queries` [rows, heads, head_dim] against pages."""
    check_shape("queries", queries, (None, None, keys.shape[3]))
    if keys.dtype is not torch.int8:
        check_dtype("queries", queries, keys.dtype)
    check_rows("queries", queries)
    if queries.shape[1] % keys.shape[1]:
        raise ValueError(f"{queries.shape[1]} query heads are no multiple of {keys.shape[1]} key heads")
    least, most = TRITON_HEAD_DIMS
    if not least <= keys.shape[3] <= most:
        raise ValueError(f"head_dim is {keys.shape[3]}, the attention kernels take {least} to {most}")
    return queries.shape[1] // keys.shape[1]
