"""Greedy and temperature sampling in two passes: blocks of the vocabulary, then the rows.

Weights are fp64, as in `weir.model.sampler`: the same number on the host then samples the same token.
"""

import triton
import triton.language as tl


@triton.jit
def block_weights_kernel(
    p_logits,
    p_temperatures,
    p_block_max,
    p_block_token,
    p_block_sum,
    stride_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (row, block): the block's greatest logit, its lowest token id (-1: not all are finite), and the sum of
    exp((logit - block's greatest) / temperature); all [rows, blocks]."""
    i_row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    o_token = i_block * BLOCK + tl.arange(0, BLOCK)
    m_token = o_token < vocab_size
    b_logit = tl.load(p_logits + i_row * stride_row + o_token, mask=m_token, other=float("-inf"))
    b_is_finite = (tl.abs(b_logit) < float("inf")) | (m_token == 0)
    all_finite = tl.min(b_is_finite.to(tl.int32), 0)
    b_logit = tl.where(b_is_finite, b_logit, 0.0)
    block_max = tl.max(b_logit, 0)
    token = tl.min(tl.where(b_logit == block_max, o_token, vocab_size), 0)
    temperature = tl.load(p_temperatures + i_row)
    divisor = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    b_weight = tl.exp((b_logit.to(tl.float64) - block_max.to(tl.float64)) / divisor)
    o_block = i_row * tl.num_programs(1) + i_block
    tl.store(p_block_max + o_block, block_max)
    tl.store(p_block_token + o_block, tl.where(all_finite > 0, token, -1))
    tl.store(p_block_sum + o_block, tl.sum(tl.where(m_token, b_weight, 0.0), 0))


@triton.jit
def sample_token_kernel(
    p_logits,
    p_temperatures,
    p_uniforms,
    p_block_max,
    p_block_token,
    p_block_sum,
    p_token_ids,
    stride_row,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row): finds the block in which the cumulative distribution passes the uniform number, then the token."""
    i_row = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCKS)
    m_block = o_block < num_blocks
    p_first = i_row * num_blocks + o_block
    b_block_max = tl.load(p_block_max + p_first, mask=m_block, other=float("-inf"))
    b_block_token = tl.load(p_block_token + p_first, mask=m_block, other=vocab_size)
    row_max = tl.max(b_block_max, 0)
    token = tl.min(tl.where(b_block_max == row_max, b_block_token, vocab_size), 0)
    token = tl.where(tl.min(b_block_token, 0) < 0, -1, token)
    temperature = tl.load(p_temperatures + i_row)
    if (temperature > 0) & (token >= 0):
        divisor = temperature.to(tl.float64)
        row_max_wide = row_max.to(tl.float64)
        b_sum = tl.load(p_block_sum + p_first, mask=m_block, other=0.0)
        b_sum *= tl.exp((b_block_max.to(tl.float64) - row_max_wide) / divisor)
        b_end = tl.cumsum(b_sum, 0)  # [BLOCKS]
        total = tl.max(b_end, 0)
        target = tl.load(p_uniforms + i_row) * total
        # rounding can carry the product up to the total: not past the last block, and token, with any weight
        block = tl.minimum(tl.sum((b_end <= target).to(tl.int32), 0), tl.sum((b_end < total).to(tl.int32), 0))
        block = tl.minimum(block, num_blocks - 1)
        before = tl.sum(tl.where(o_block < block, b_sum, 0.0), 0)
        o_token = block * BLOCK + tl.arange(0, BLOCK)
        m_token = o_token < vocab_size
        b_logit = tl.load(p_logits + i_row * stride_row + o_token, mask=m_token, other=float("-inf"))
        b_weight = tl.exp((b_logit.to(tl.float64) - row_max_wide) / divisor)
        b_cumulative = tl.cumsum(b_weight, 0)
        block_total = tl.max(b_cumulative, 0)
        passed = tl.sum((before + b_cumulative <= target).to(tl.int32), 0)
        last = tl.sum((b_cumulative < block_total).to(tl.int32), 0)
        token = tl.minimum(block * BLOCK + tl.minimum(passed, last), vocab_size - 1)
    tl.store(p_token_ids + i_row, token)
