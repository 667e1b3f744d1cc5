"""Split-KV flash decoding (Dao, Haziza, Massa, Sizov: "Flash-Decoding for long-context inference", 2023) over pages.

The query heads that share a key head are the rows of one tile, so that its keys and values are read once. Work is a
list on the device of splits of rows, which a fixed number of programs goes through: what is launched does not depend on
how long the longest row is. The program that ends a row's last split adds the splits up, in their order and not in that
of their ends.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.gpu.attention import DeviceScoring, attend_pages, query_heads_per_kv_head
from weir.ops.gpu.checks import check_dtype, check_kv_pages, check_kv_scales, check_rows, check_shape
from weir.ops.gpu.decode_work import MAX_SPLITS, DecodeTiles, DecodeWork, most_splits
from weir.ops.reference_quantized import KvScales

_MIN_DOT_ROWS = 16
_MAX_WARPS = 8
_MERGE_ELEMENTS = 2048
_PROGRAMS_WITHOUT_GPU = 64


@triton.jit
def merge_splits(
    p_partial,
    p_lse,
    first_split,
    num_splits,
    p_out,
    stride_out_head,
    max_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Adds up the splits of GROUP heads in their order, BLOCK_S at a time, whatever `max_splits` is.

    Other programs have written them meanwhile: they are read from the cache that all share.
    """
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < HEAD_DIM
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        o_s = first + tl.arange(0, BLOCK_S)
        m_s = o_s < num_splits
        m_sg = m_s[:, None] & m_g[None, :]
        o_sg = first_split + o_g[None, :] * max_splits + o_s[:, None]  # [BLOCK_S, BLOCK_G]
        b_lse = tl.load(p_lse + o_sg, mask=m_sg, other=0.0, cache_modifier=".cg")
        b_lse = tl.where(m_s[:, None], b_lse, float("-inf"))
        p_rows = p_partial + o_sg[:, :, None] * HEAD_DIM + o_d[None, None, :]
        b_rows = tl.load(p_rows, mask=m_sg[:, :, None] & m_d[None, None, :], other=0.0, cache_modifier=".cg")
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_weight = tl.exp2(b_lse - b_new_max[None, :])
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = tl.fma(b_sum, b_decay, tl.sum(b_weight, 0))
        b_acc = b_acc * b_decay[:, None] + tl.sum(b_weight[:, :, None] * b_rows, 0)
        b_max = b_new_max
    p_o = p_out + o_g[:, None] * stride_out_head + o_d[None, :]
    tl.store(p_o, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_g[:, None] & m_d[None, :])


@triton.jit
def attend_split(
    b_q,
    p_keys,
    p_values,
    p_table,
    start,
    end,
    lower,
    scale_log2,
    cap_factor,
    stride_page,
    stride_token,
    p_key_scales,
    p_value_scales,
    stride_scale_page,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Of positions [start, end), and from `lower` on, which cuts the first block: the result [BLOCK_M, BLOCK_D] and the
    base-2 logarithm of the sum of exponentials [BLOCK_M]. Of no position it is 0."""
    o_n = tl.arange(0, BLOCK_N)
    b_max = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([b_q.shape[0]], tl.float32)
    b_acc = tl.zeros([b_q.shape[0], BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_N):
        o_t = first + o_n
        m_n = o_t < end
        if HAS_WINDOW:
            m_n = m_n & (o_t >= lower)
        b_max, b_sum, b_acc = attend_pages(
            b_q, p_keys, p_values, p_key_scales, p_value_scales, p_table, o_t, m_n, m_n[None, :], b_max, b_sum, b_acc,
            scale_log2, cap_factor, stride_page, stride_token, stride_scale_page, HEAD_DIM, BLOCK_D, PAGE, True,
            HAS_WINDOW, IS_CAPPED, IS_INT8
        )  # fmt: skip
    b_sum = tl.where(b_sum > 0, b_sum, 1.0)
    return b_acc / b_sum[:, None], tl.fma(b_max, scale_log2, tl.log2(b_sum))


@triton.jit
def paged_decode_kernel(
    p_queries,
    p_keys,
    p_values,
    p_work,
    p_num_items,
    p_out,
    p_partial,
    p_lse,
    p_num_done,
    p_key_scales,
    p_value_scales,
    scale_log2,
    cap_factor,
    window,
    stride_query_row,
    stride_query_head,
    stride_page,
    stride_kv_head,
    stride_token,
    stride_scale_page,
    stride_scale_head,
    stride_out_row,
    stride_out_head,
    max_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Program (number) takes each num_programs-th pair of a key head and an item: row, split, place of the row's table,
    its length.

    It attends to the positions of that split. A row of one split is finished here. Of more, each split leaves its
    result and the base-2 logarithm of its sum of exponentials: partial [rows, heads, max_splits, HEAD_DIM], lse [rows,
    heads, max_splits], both fp32. Whoever finds that all others of the row are there adds them up. Splits and blocks
    are where they are without a window: those before it are passed over, and the first one that is not, is cut.
    """
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    for i_pair in range(tl.program_id(0), tl.load(p_num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        i_item = i_pair // NUM_KV_HEADS
        i_kv_head = i_pair % NUM_KV_HEADS
        o_head = i_kv_head * GROUP + o_m
        m_head = o_head < (i_kv_head + 1) * GROUP
        m_q = m_head[:, None] & (o_d < HEAD_DIM)[None, :]
        p_k = p_keys + i_kv_head * stride_kv_head
        p_v = p_values + i_kv_head * stride_kv_head
        i_row = tl.load(p_work + 4 * i_item).to(tl.int64)
        i_split = tl.load(p_work + 4 * i_item + 1)
        p_table = p_work + tl.load(p_work + 4 * i_item + 2)
        length = tl.load(p_work + 4 * i_item + 3)
        split_tokens = SPLIT * tl.cdiv(length, SPLIT * MAX_SPLITS)
        start = i_split * split_tokens
        end = tl.minimum(start + split_tokens, length)
        lower = 0
        first_seen = 0
        if HAS_WINDOW:
            lower = tl.maximum(length - window, 0)
            first_seen = lower // tl.maximum(split_tokens, 1)
            start = tl.maximum(start, lower // BLOCK_N * BLOCK_N)
        if i_split >= first_seen:
            p_q = p_queries + i_row * stride_query_row + o_head[:, None] * stride_query_head + o_d[None, :]
            b_q = tl.load(p_q, mask=m_q, other=0.0)  # [BLOCK_M, BLOCK_D]
            b_out, b_lse = attend_split(
                b_q, p_k, p_v, p_table, start, end, lower, scale_log2, cap_factor, stride_page, stride_token,
                p_key_scales + i_kv_head * stride_scale_head, p_value_scales + i_kv_head * stride_scale_head,
                stride_scale_page, BLOCK_N, HEAD_DIM, BLOCK_D, PAGE, HAS_WINDOW, IS_CAPPED, IS_INT8
            )  # fmt: skip
            p_row_out = p_out + i_row * stride_out_row
            if length <= split_tokens:
                p_o = p_row_out + o_head[:, None] * stride_out_head + o_d[None, :]
                tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_q)
            else:
                o_split = (i_row * NUM_KV_HEADS * GROUP + o_head) * max_splits + i_split  # [BLOCK_M]
                tl.store(p_partial + o_split[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=m_q)
                tl.store(p_lse + o_split, b_lse, mask=m_head)
                num_splits = tl.cdiv(length, split_tokens) - first_seen
                p_done = p_num_done + i_row * NUM_KV_HEADS + i_kv_head
                tl.debug_barrier()  # all threads have written before one of them says so
                if tl.atomic_add(p_done, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                    first_split = (i_row * NUM_KV_HEADS + i_kv_head) * GROUP * max_splits + first_seen
                    p_merged = p_row_out + i_kv_head * GROUP * stride_out_head
                    merge_splits(
                        p_partial, p_lse, first_split, num_splits, p_merged, stride_out_head, max_splits, GROUP,
                        HEAD_DIM, BLOCK_D, BLOCK_G, BLOCK_S
                    )  # fmt: skip
                    tl.store(p_done, 0)  # for the next launch, which may be the same graph again


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Room for the splits' results, reused by every layer and step: `partial` [rows, heads, splits, head_dim] and
    `lse` [rows, heads, splits], fp32. `num_done` int32 is 0 between launches. `num_programs`: of a launch, at most."""

    partial: torch.Tensor
    lse: torch.Tensor
    num_done: torch.Tensor
    num_programs: int


def decode_scratch(
    max_rows: int, num_heads: int, head_dim: int, max_context_tokens: int, tiles: DecodeTiles, device: torch.device
) -> DecodeScratch:
    """Scratch for batches of up to `max_rows` rows of up to `max_context_tokens` positions."""
    splits = most_splits(max_context_tokens, tiles)
    num_programs = _PROGRAMS_WITHOUT_GPU
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        num_programs = tiles.num_programs * multiprocessors
    return DecodeScratch(
        torch.empty(max_rows, num_heads, splits, head_dim, dtype=torch.float32, device=device),
        torch.empty(max_rows, num_heads, splits, dtype=torch.float32, device=device),
        torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device),
        num_programs,
    )


def paged_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    work: DecodeWork,
    scoring: DeviceScoring,
    out: torch.Tensor,
    scratch: DecodeScratch,
    tiles: DecodeTiles,
    scales: KvScales | None = None,
) -> None:
    """Writes the rows of `out` [rows, heads, head_dim] that `work` names; shapes and meaning as
    `reference.paged_decode`. With `scales` keys and values are int8.

    What is in `work` lives on the device and is not checked. A row's result depends on its own query, pages and length
    only: not on the order of the work, nor on who does it.

    Raises:
        ValueError: a shape, type or stride does not fit, or the scratch is too small.
    """
    group = query_heads_per_kv_head(queries, keys)
    check_kv_pages(keys, values)
    found = check_kv_scales(keys, scales)
    check_shape("out", out, queries.shape)
    check_rows("out", out)
    _check_work(work)
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    _check_scratch(scratch, queries, work.size.max_splits)
    if work.size.max_items == 0:
        return
    block_d, block_g = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    block_m = max(_MIN_DOT_ROWS, block_g)
    paged_decode_kernel[min(work.size.max_items * num_kv_heads, scratch.num_programs),](
        queries,
        keys,
        values,
        work.items,
        work.num_items,
        out,
        scratch.partial,
        scratch.lse,
        scratch.num_done,
        found.keys,
        found.values,
        *scoring.numbers,
        *queries.stride()[:2],
        *keys.stride()[:3],
        *found.keys.stride()[:2],
        *out.stride()[:2],
        scratch.lse.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_tokens,
        BLOCK_G=block_g,
        BLOCK_S=min(16, max(1, _MERGE_ELEMENTS // (block_g * block_d))),
        SPLIT=tiles.split_tokens,
        MAX_SPLITS=MAX_SPLITS,
        PAGE=PAGE_TOKENS,
        IS_INT8=scales is not None,
        **scoring.flags,
        num_warps=max(tiles.num_warps, min(_MAX_WARPS, block_m // _MIN_DOT_ROWS)),  # of many heads, by their registers
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
        # two programs a multiprocessor: the assembler aims at three, and spills for it
        **({} if head_dim <= 128 else {"maxnreg": 224}),
    )


def _check_work(work: DecodeWork) -> None:
    for name, tensor, length in (("work.items", work.items, None), ("work.num_items", work.num_items, 1)):
        check_shape(name, tensor, (length,))
        check_dtype(name, tensor, torch.int32)


def _check_scratch(scratch: DecodeScratch, queries: torch.Tensor, num_splits: int) -> None:
    num_rows, num_heads, head_dim = queries.shape
    check_shape("scratch.lse", scratch.lse, (None, num_heads, None))
    max_rows, _, max_splits = scratch.lse.shape
    check_shape("scratch.partial", scratch.partial, (max_rows, num_heads, max_splits, head_dim))
    check_shape("scratch.num_done", scratch.num_done, (max_rows * num_heads,))
    check_dtype("scratch.partial", scratch.partial, torch.float32)
    check_dtype("scratch.lse", scratch.lse, torch.float32)
    check_dtype("scratch.num_done", scratch.num_done, torch.int32)
    if not (scratch.partial.is_contiguous() and scratch.lse.is_contiguous()):
        raise ValueError("the scratch of paged decode must be contiguous")
    if max_rows < num_rows or max_splits < num_splits:
        raise ValueError(
            f"the scratch has room for {max_rows} rows of {max_splits} splits, this batch needs {num_rows} of "
            f"{num_splits}: make it with decode_scratch() for the largest batch and context"
        )
