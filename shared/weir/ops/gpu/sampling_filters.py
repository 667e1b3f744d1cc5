"""Sampling from the most likely tokens: top-k, top-p, min-p, and the draw among what they leave.

No row is sorted. What is wanted of the tokens, most likely first (of equal logits the lower id first), is the place
where their count or their weight reaches a number, and that is found by halving the range of logits: a dozen passes
over the row. All sums are whole numbers (`weir.ops.gpu.weights`), so a row's token depends on nothing but the row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_dtype, check_rows, check_shape
from weir.ops.gpu.weights import MAX_VOCAB_SIZE, exp_of, weight_of

_BLOCK = 2048


@triton.jit
def _sorted_place(
    p_row,
    vocab_size,
    highest,
    inverse,
    low,
    wanted,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest logit down to which the tokens are `wanted` (COUNTS), or weigh it, and what is above it: how many
    tokens, and their weight. `low` is a logit of the row, and the tokens down to it are enough."""
    top = highest
    num_above = tl.full([], 0, tl.int64)
    weight_above = tl.full([], 0, tl.int64)
    while low < top:
        middle = low + (top - low) * 0.5
        middle = tl.where(middle > low, middle, top)  # low and top may be neighbours
        b_least = tl.full([BLOCK], float("inf"), tl.float32)  # of [middle, top]
        b_greatest = tl.full([BLOCK], float("-inf"), tl.float32)  # of [low, middle)
        b_count = tl.zeros([BLOCK], tl.int64)
        b_weight = tl.zeros([BLOCK], tl.int64)
        for first in range(0, vocab_size, BLOCK):
            o_token = first + tl.arange(0, BLOCK)
            b_logit = tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf"))
            m_upper = (b_logit >= middle) & (b_logit <= top)
            m_lower = (b_logit >= low) & (b_logit < middle)
            b_least = tl.minimum(b_least, tl.where(m_upper, b_logit, float("inf")))
            b_greatest = tl.maximum(b_greatest, tl.where(m_lower, b_logit, float("-inf")))
            b_count += m_upper.to(tl.int64)
            b_weight += tl.where(m_upper, weight_of(tl.where(m_upper, b_logit, highest), highest, inverse), 0)
        num_upper = num_above + tl.sum(b_count, 0)
        weight_upper = weight_above + tl.sum(b_weight, 0)
        if COUNTS:
            is_enough = num_upper >= wanted
        else:
            is_enough = weight_upper >= wanted
        low = tl.where(is_enough, tl.min(b_least, 0), low)
        top = tl.where(is_enough, top, tl.max(b_greatest, 0))
        num_above = tl.where(is_enough, num_above, num_upper)
        weight_above = tl.where(is_enough, weight_above, weight_upper)
    return low, num_above, weight_above


@triton.jit
def _row_extent(p_row, vocab_size, inverse, min_p, BLOCK: tl.constexpr):
    """The highest logit; of the tokens that weigh something, and `min_p` of the highest at least: the lowest logit, and
    their count and weight."""
    b_highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        b_highest = tl.maximum(b_highest, tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf")))
    highest = tl.max(b_highest, 0)
    b_lowest = tl.full([BLOCK], float("inf"), tl.float32)
    b_count = tl.zeros([BLOCK], tl.int64)
    b_weight = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        m_token = o_token < vocab_size
        b_logit = tl.load(p_row + o_token, mask=m_token, other=0.0)
        b_relative = exp_of((tl.where(m_token, b_logit, highest) - highest) * inverse)
        b_units = weight_of(tl.where(m_token, b_logit, highest), highest, inverse)
        m_kept = m_token & (b_units > 0) & (b_relative.to(tl.float64) >= min_p)
        b_lowest = tl.minimum(b_lowest, tl.where(m_kept, b_logit, float("inf")))
        b_count += m_kept.to(tl.int64)
        b_weight += tl.where(m_kept, b_units, 0)
    return highest, tl.min(b_lowest, 0), tl.sum(b_count, 0), tl.sum(b_weight, 0)


@triton.jit
def _nth_of_equals(p_row, vocab_size, logit, number, BLOCK: tl.constexpr):
    """Of the tokens with that logit the one that `number` with lower ids come before."""
    token = tl.full([], 0, tl.int32)
    num_before = tl.full([], 0, tl.int64)
    for first in range(0, vocab_size, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        b_logit = tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf"))
        b_is_equal = (b_logit == logit).to(tl.int32)
        b_before = num_before + tl.cumsum(b_is_equal, 0) - b_is_equal
        m_found = (b_is_equal > 0) & (b_before == number)
        token = tl.maximum(token, tl.max(tl.where(m_found, o_token, 0), 0))
        num_before += tl.sum(b_is_equal, 0)
    return token


@triton.jit
def sample_filtered_kernel(
    p_logits,
    p_rows,
    p_inverse_temperatures,
    p_top_ks,
    p_top_ps,
    p_min_ps,
    p_uniforms,
    p_token_ids,
    stride_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (entry of p_rows). A row whose token is negative already is left as it is."""
    i_entry = tl.program_id(0)
    i_row = tl.load(p_rows + i_entry).to(tl.int64)
    if tl.load(p_token_ids + i_row) < 0:
        return
    p_row = p_logits + i_row * stride_row
    inverse = tl.load(p_inverse_temperatures + i_entry)
    top_k = tl.load(p_top_ks + i_entry).to(tl.int64)
    top_p = tl.load(p_top_ps + i_entry)
    min_p = tl.load(p_min_ps + i_entry)
    highest, least, num_tokens, weight = _row_extent(p_row, vocab_size, inverse, min_p * 0.0, BLOCK)
    low = least
    if (top_k > 0) & (top_k < num_tokens):
        low, num_above, weight_above = _sorted_place(p_row, vocab_size, highest, inverse, least, top_k, True, BLOCK)
        weight = weight_above + (top_k - num_above) * weight_of(low, highest, inverse)
    if top_p < 1.0:
        wanted = tl.maximum((top_p * weight.to(tl.float64)).to(tl.int64), 1)
        low, num_above, weight_above = _sorted_place(p_row, vocab_size, highest, inverse, low, wanted, False, BLOCK)
        unit = weight_of(low, highest, inverse)
        weight = weight_above + (wanted - weight_above + unit - 1) // unit * unit
    if min_p > 0.0:
        _, least, num_tokens, weight_kept = _row_extent(p_row, vocab_size, inverse, min_p, BLOCK)
        weight = tl.where(least > low, weight_kept, weight)
        low = tl.maximum(least, low)
    # the first place at which the sum passes the product; rounding can carry the product up to the sum of all
    wanted = tl.minimum((tl.load(p_uniforms + i_row) * weight.to(tl.float64)).to(tl.int64) + 1, weight)
    low, num_above, weight_above = _sorted_place(p_row, vocab_size, highest, inverse, low, wanted, False, BLOCK)
    number = (wanted - weight_above - 1) // weight_of(low, highest, inverse)
    tl.store(p_token_ids + i_row, _nth_of_equals(p_row, vocab_size, low, number, BLOCK))


@dataclass(frozen=True, slots=True)
class FilterIndex:
    """Of each row with a filter, which is not greedy: `rows` int32, its number; 1 / temperature fp32; `top_ks` int32
    (0: all), `top_ps` and `min_ps` fp64."""

    rows: torch.Tensor
    inverse_temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor


def sample_filtered(logits: torch.Tensor, index: FilterIndex, uniforms: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Writes the tokens of the rows of `index`, as `weir.ops.cpu.sampling.sample_token` draws them, into `token_ids`.

    `logits` fp32 [rows, vocabulary], all finite; `uniforms` fp64 and `token_ids` int32, both [rows]. A row whose token
    id is negative keeps it.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    num_rows, vocab_size = logits.shape
    check_dtype("logits", logits, torch.float32)
    check_rows("logits", logits)
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"logits have {vocab_size} columns, sums of weights have room for {MAX_VOCAB_SIZE}")
    count = len(index.rows)
    for name, tensor, size, dtype in (
        ("rows", index.rows, count, torch.int32),
        ("inverse_temperatures", index.inverse_temperatures, count, torch.float32),
        ("top_ks", index.top_ks, count, torch.int32),
        ("top_ps", index.top_ps, count, torch.float64),
        ("min_ps", index.min_ps, count, torch.float64),
        ("uniforms", uniforms, num_rows, torch.float64),
        ("token_ids", token_ids, num_rows, torch.int32),
    ):
        check_shape(name, tensor, (size,))
        check_dtype(name, tensor, dtype)
    if count == 0:
        return
    sample_filtered_kernel[count,](
        logits,
        index.rows,
        index.inverse_temperatures,
        index.top_ks,
        index.top_ps,
        index.min_ps,
        uniforms,
        token_ids,
        logits.stride(0),
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
