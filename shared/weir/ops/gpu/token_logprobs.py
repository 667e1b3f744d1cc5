"""Log-probabilities of one token a row, its rank, and the most likely tokens beside it."""

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_dtype, check_rows, check_shape
from weir.ops.gpu.weights import MAX_VOCAB_SIZE, WEIGHT_UNIT, weight_of

_BLOCK = 2048


# a row of results is as long as the most tokens that were asked for
@triton.jit(do_not_specialize=["stride_out"])
def token_logprobs_kernel(
    p_logits,
    p_rows,
    p_token_ids,
    p_num_tops,
    p_out,
    stride_row,
    stride_out,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (entry of p_rows). Each of the most likely tokens is found by a pass over the row."""
    i_entry = tl.program_id(0)
    p_row = p_logits + tl.load(p_rows + i_entry).to(tl.int64) * stride_row
    p_entry = p_out + i_entry.to(tl.int64) * stride_out
    chosen = tl.load(p_row + tl.maximum(tl.load(p_token_ids + i_entry), 0))
    num_top = tl.load(p_num_tops + i_entry)
    b_highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        b_highest = tl.maximum(b_highest, tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf")))
    highest = tl.max(b_highest, 0)
    b_weight = tl.zeros([BLOCK], tl.int64)
    b_above = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        m_token = o_token < vocab_size
        b_logit = tl.where(m_token, tl.load(p_row + o_token, mask=m_token, other=0.0), highest)
        b_weight += tl.where(m_token, weight_of(b_logit, highest, 1.0), 0)
        b_above += (m_token & (b_logit > chosen)).to(tl.int32)
    log_total = highest.to(tl.float64) + tl.log(tl.sum(b_weight, 0).to(tl.float64) * WEIGHT_UNIT)
    tl.store(p_entry, chosen.to(tl.float64) - log_total)
    tl.store(p_entry + 1, (1 + tl.sum(b_above, 0)).to(tl.float64))

    last = tl.full([], float("inf"), tl.float32)
    last_token = tl.full([], -1, tl.int32)
    for place in range(num_top):
        b_best = tl.full([BLOCK], float("-inf"), tl.float32)
        b_best_token = tl.full([BLOCK], 2147483647, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            o_token = first + tl.arange(0, BLOCK)
            m_token = o_token < vocab_size
            b_logit = tl.load(p_row + o_token, mask=m_token, other=float("-inf"))
            m_left = m_token & ((b_logit < last) | ((b_logit == last) & (o_token > last_token)))
            m_better = m_left & (b_logit > b_best)  # of equal ones the first, which has the lower id
            b_best = tl.where(m_better, b_logit, b_best)
            b_best_token = tl.where(m_better, o_token, b_best_token)
        last = tl.max(b_best, 0)
        last_token = tl.min(tl.where(b_best == last, b_best_token, 2147483647), 0)
        tl.store(p_entry + 2 + 2 * place, last_token.to(tl.float64))
        tl.store(p_entry + 3 + 2 * place, last.to(tl.float64) - log_total)


def num_columns_of(num_top: int) -> int:
    """Of `out`, for at most so many of the most likely tokens."""
    return 2 + 2 * num_top


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_tops: torch.Tensor, out: torch.Tensor
) -> None:
    """Of entry i: the token `token_ids[i]` and the `num_tops[i]` most likely ones of row `rows[i]` of `logits`.

    Writes `out` fp64 [entries, columns]: log-probability, rank, then token id and log-probability in turn, most likely
    first, of equal logits the lower id; what is behind is left. `logits` fp32 [rows, vocabulary], all finite; the
    others int32 [entries]. No `num_tops` passes the vocabulary or the columns.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    check_dtype("logits", logits, torch.float32)
    check_rows("logits", logits)
    if logits.shape[1] > MAX_VOCAB_SIZE:
        raise ValueError(f"logits have {logits.shape[1]} columns, sums of weights have room for {MAX_VOCAB_SIZE}")
    count = len(rows)
    for name, tensor in (("rows", rows), ("token_ids", token_ids), ("num_tops", num_tops)):
        check_shape(name, tensor, (count,))
        check_dtype(name, tensor, torch.int32)
    check_shape("out", out, (count, None))
    check_dtype("out", out, torch.float64)
    check_rows("out", out)
    if count == 0:
        return
    token_logprobs_kernel[count,](
        logits,
        rows,
        token_ids,
        num_tops,
        out,
        logits.stride(0),
        out.stride(0),
        logits.shape[1],
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
