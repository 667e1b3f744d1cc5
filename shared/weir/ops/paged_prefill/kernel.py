"""Flash attention (Dao: "FlashAttention-2", 2023) of ragged chunks over pages.

The rows of a tile are queries x the query heads of one key head, so that its keys and values are read once for all.
"""

import triton
import triton.language as tl

from weir.ops.attention_block import attend_block, load_page_rows


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
    scale_log2,
    stride_query_row,
    stride_query_head,
    stride_page,
    stride_kv_head,
    stride_token,
    stride_table,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program (key head, tile) computes BLOCK_M // GROUP queries of one sequence's chunk for GROUP query heads.

    Blocks of keys begin at multiples of BLOCK_N from position 0, never from the chunk's: a position's result does not
    depend on how its prompt was cut.

        positions  0 ....... full_end .... last        [0, full_end): seen by every query of the tile
                   |-- unmasked --|-- masked --|
    """
    i_kv_head = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    i_sequence = tl.load(p_tiles + 2 * i_tile).to(tl.int64)
    first_query = tl.load(p_tiles + 2 * i_tile + 1)
    first_row = tl.load(p_first_rows + i_sequence)
    num_rows = tl.load(p_first_rows + i_sequence + 1) - first_row
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
    b_position = first_position + o_query  # [BLOCK_M]

    p_table = p_tables + i_sequence * stride_table
    p_k = p_keys + i_kv_head * stride_kv_head
    p_v = p_values + i_kv_head * stride_kv_head
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    last = tl.minimum(first_position + BLOCK_Q, end)
    for first in range(0, full_end, BLOCK_N):
        b_k = load_page_rows(p_k, p_table, first + o_n, None, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, False)
        b_v = load_page_rows(p_v, p_table, first + o_n, None, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, False)
        b_max, b_sum, b_acc = attend_block(b_q, b_k, b_v, b_max, b_sum, b_acc, None, scale_log2, False)
    for first in range(full_end, last, BLOCK_N):
        m_n = first + o_n < end
        b_k = load_page_rows(p_k, p_table, first + o_n, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, True)
        b_v = load_page_rows(p_v, p_table, first + o_n, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, True)
        m_s = (first + o_n)[None, :] <= b_position[:, None]
        b_max, b_sum, b_acc = attend_block(b_q, b_k, b_v, b_max, b_sum, b_acc, m_s, scale_log2, True)

    p_o = p_out + (o_row * stride_out_row + o_head * stride_out_head)[:, None] + o_d[None, :]
    tl.store(p_o, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_q)
