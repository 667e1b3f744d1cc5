"""Flash attention (Dao: "FlashAttention-2", 2023) of ragged chunks over pages.

The rows of a tile are queries x the query heads of one key head, so that its keys and values are read once for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.gpu.attention import DeviceScoring, attend_pages, query_heads_per_kv_head
from weir.ops.gpu.checks import check_dtype, check_kv_pages, check_kv_scales, check_rows, check_shape
from weir.ops.reference_quantized import KvScales


@triton.jit
def load_tile(p_tile, p_first_rows):
    """Its sequence, the first query of that one's chunk, and the chunk's first row and rows in the flat batch."""
    i_sequence = tl.load(p_tile).to(tl.int64)
    first_query = tl.load(p_tile + 1)
    first_row = tl.load(p_first_rows + i_sequence)
    return i_sequence, first_query, first_row, tl.load(p_first_rows + i_sequence + 1) - first_row


# a table as wide as the longest sequence must not compile the kernel anew
@triton.jit(do_not_specialize=["stride_table"])
def paged_prefill_kernel(
    p_queries,
    p_keys,
    p_values,
    p_tables,
    p_first_rows,
    p_ends,
    p_tiles,
    p_out,
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
    stride_table,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Program (key head, tile) computes BLOCK_M // GROUP queries of one sequence's chunk for GROUP query heads.

    Blocks of keys begin at multiples of BLOCK_N from position 0, never from the chunk's: a position's result does not
    depend on how its prompt was cut.

        positions  0 ....... full_end .... last        [0, full_end): seen by every query of the tile
                   |-- unmasked --|-- masked --|

    With a window all blocks are masked, from the first one that a query of the tile sees. A tile of a sequence without
    rows does nothing: a list of tiles may be filled up with them.
    """
    i_kv_head = tl.program_id(0).to(tl.int64)
    i_sequence, first_query, first_row, num_rows = load_tile(p_tiles + 2 * tl.program_id(1), p_first_rows)
    if num_rows == 0:
        return
    end = tl.load(p_ends + i_sequence)
    first_position = end - num_rows + first_query
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    o_query = o_m // GROUP
    o_row = (first_row + first_query + o_query).to(tl.int64)
    o_head = i_kv_head * GROUP + o_m % GROUP
    m_row = (o_query < BLOCK_Q) & (first_query + o_query < num_rows)
    m_q = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
    p_q = p_queries + (o_row * stride_query_row + o_head * stride_query_head)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)  # [BLOCK_M, BLOCK_D]

    p_table = p_tables + i_sequence * stride_table
    p_k = p_keys + i_kv_head * stride_kv_head
    p_v = p_values + i_kv_head * stride_kv_head
    p_ks = p_key_scales + i_kv_head * stride_scale_head
    p_vs = p_value_scales + i_kv_head * stride_scale_head
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = tl.minimum(first_position + BLOCK_Q, end)
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    first_masked = full_end
    if HAS_WINDOW:
        full_end, first_masked = 0, tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N
    for first in range(0, full_end, BLOCK_N):
        b_max, b_sum, b_acc = attend_pages(
            b_q, p_k, p_v, p_ks, p_vs, p_table, first + o_n, None, None, b_max, b_sum, b_acc, scale_log2, cap_factor,
            stride_page, stride_token, stride_scale_page, HEAD_DIM, BLOCK_D, PAGE, False, False, IS_CAPPED, IS_INT8
        )  # fmt: skip
    for first in range(first_masked, last, BLOCK_N):
        m_n = first + o_n < end
        m_s = (first + o_n)[None, :] <= (first_position + o_query)[:, None]
        if HAS_WINDOW:
            m_s = m_s & ((first + o_n)[None, :] > (first_position + o_query - window)[:, None])
        b_max, b_sum, b_acc = attend_pages(
            b_q, p_k, p_v, p_ks, p_vs, p_table, first + o_n, m_n, m_s, b_max, b_sum, b_acc, scale_log2, cap_factor,
            stride_page, stride_token, stride_scale_page, HEAD_DIM, BLOCK_D, PAGE, True, HAS_WINDOW, IS_CAPPED, IS_INT8
        )  # fmt: skip
    p_o = p_out + (o_row * stride_out_row + o_head * stride_out_head)[:, None] + o_d[None, :]
    tl.store(p_o, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_q)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the work is cut: functions of the model's shape and type, never of the batch (see DecodeTiles)."""

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int

    def queries_per_tile(self, num_heads: int, num_kv_heads: int) -> int:
        """A tile's rows are queries x the query heads of one key head."""
        return self.block_rows // (num_heads // num_kv_heads)


def prefill_tiles(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, compute_capability: int
) -> PrefillTiles:
    """`compute_capability` is 80, 90, 100: how many registers a tile costs depends on the matrix instructions."""
    block_rows, block_tokens, num_warps, num_stages = 128, 64, 8, 3
    if dtype == torch.float32:
        block_rows, block_tokens, num_warps, num_stages = 32, 32, 4, 2
    elif head_dim > 128:
        block_rows, block_tokens = 64, 32
    elif compute_capability == 90 and head_dim > 64:  # what an H200 was fastest with, ADR 105
        block_rows, num_warps, num_stages = 64, 4, 2
    elif 90 <= compute_capability < 120:  # 12.x has 99 KB of shared memory, too little for five stages
        num_stages = 5  # a page's keys lie at a loaded address, which halves the stages: two blocks on their way
    elif head_dim > 64:
        block_tokens = 32
    group = num_heads // num_kv_heads
    return PrefillTiles(max(block_rows, triton.next_power_of_2(group)), block_tokens, num_warps, num_stages)


def tiles_of(chunk_lengths: Sequence[int], ends: Sequence[int], queries_per_tile: int) -> list[tuple[int, int]]:
    """(sequence, first query of its chunk) of each tile, those that see most first: the last to start are short."""
    tiles = [
        (sequence, first)
        for sequence, num_queries in enumerate(chunk_lengths)
        for first in range(0, num_queries, queries_per_tile)
    ]
    return sorted(tiles, key=lambda tile: chunk_lengths[tile[0]] - ends[tile[0]] - tile[1])


def paged_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    first_rows: torch.Tensor,
    ends: torch.Tensor,
    tile_list: torch.Tensor,
    scoring: DeviceScoring,
    out: torch.Tensor,
    tiles: PrefillTiles,
    scales: KvScales | None = None,
) -> None:
    """Writes the rows of `out` [rows, heads, head_dim] that sequences have; shapes and meaning as
    `reference.paged_prefill`. With `scales` keys and values are int8.

    All index tensors are int32; `tile_list` [tiles, 2] comes from `tiles_of`. Ends must not pass the tables' width:
    they live on the device and are not checked. A position's result depends on its own sequence only, and not on how
    the sequence was cut into chunks.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    group = query_heads_per_kv_head(queries, keys)
    check_kv_pages(keys, values)
    found = check_kv_scales(keys, scales)
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    check_shape("out", out, queries.shape)
    check_rows("out", out)
    num_sequences = block_tables.shape[0]
    check_shape("block_tables", block_tables, (num_sequences, None))
    check_rows("block_tables", block_tables)
    check_shape("first_rows", first_rows, (num_sequences + 1,))
    check_shape("ends", ends, (num_sequences,))
    check_shape("tile_list", tile_list, (None, 2))
    for name, index in (("block_tables", block_tables), ("first_rows", first_rows), ("ends", ends)):
        check_dtype(name, index, torch.int32)
    check_dtype("tile_list", tile_list, torch.int32)
    if not tile_list.is_contiguous():
        raise ValueError("tile_list must be contiguous")
    if tile_list.shape[0] == 0:
        return
    paged_prefill_kernel[num_kv_heads, tile_list.shape[0]](
        queries,
        keys,
        values,
        block_tables,
        first_rows,
        ends,
        tile_list,
        out,
        found.keys,
        found.values,
        *scoring.numbers,
        *queries.stride()[:2],
        *keys.stride()[:3],
        *found.keys.stride()[:2],
        block_tables.stride(0),
        *out.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tiles.block_rows,
        BLOCK_N=tiles.block_tokens,
        PAGE=PAGE_TOKENS,
        IS_INT8=scales is not None,
        **scoring.flags,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
