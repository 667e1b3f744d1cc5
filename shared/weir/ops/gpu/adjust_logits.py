"""What changes logits before sampling: bias, penalties for tokens that were there before, and tokens that must not be
sampled. Only the logits of named tokens are read and written."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_dtype, check_rows, check_shape

MASKED = -3e38
"""The logit of a token that may not be sampled. Finite: should all be masked, one is sampled still."""
_BLOCK = 1024


@triton.jit
def adjust_logits_kernel(
    p_logits,
    p_counts,
    p_rows,
    p_bias_firsts,
    p_bias_tokens,
    p_biases,
    p_history_firsts,
    p_output_firsts,
    p_history,
    p_penalties,
    p_mask_firsts,
    p_masked,
    masked_logit,
    stride_row,
    stride_counts,
    BLOCK: tl.constexpr,
):
    """Program (entry of p_rows): bias, then penalties, then the mask. A row's counts are 0 before and afterwards."""
    i_entry = tl.program_id(0)
    i_row = tl.load(p_rows + i_entry).to(tl.int64)
    p_row = p_logits + i_row * stride_row
    p_count = p_counts + i_entry.to(tl.int64) * stride_counts
    o_block = tl.arange(0, BLOCK)

    end = tl.load(p_bias_firsts + i_entry + 1)
    for first in range(tl.load(p_bias_firsts + i_entry), end, BLOCK):
        m_entry = first + o_block < end
        b_token = tl.load(p_bias_tokens + first + o_block, mask=m_entry, other=0)
        b_bias = tl.load(p_biases + first + o_block, mask=m_entry, other=0.0)
        b_logit = tl.load(p_row + b_token, mask=m_entry, other=0.0)
        tl.store(p_row + b_token, b_logit + b_bias, mask=m_entry)
    tl.debug_barrier()  # what other threads of this program have written is read below

    start = tl.load(p_history_firsts + i_entry)
    end = tl.load(p_history_firsts + i_entry + 1)
    repetition = tl.load(p_penalties + 3 * i_entry)
    presence = tl.load(p_penalties + 3 * i_entry + 1)
    frequency = tl.load(p_penalties + 3 * i_entry + 2)
    for first in range(tl.load(p_output_firsts + i_entry), end, BLOCK):
        m_entry = first + o_block < end
        b_token = tl.load(p_history + first + o_block, mask=m_entry, other=0)
        tl.atomic_add(p_count + b_token, 1, mask=m_entry)
    tl.debug_barrier()
    for first in range(start, end, BLOCK):
        m_entry = first + o_block < end
        b_token = tl.load(p_history + first + o_block, mask=m_entry, other=0)
        # of the places of a token one finds the count, whichever it is: the others find -1
        b_count = tl.atomic_xchg(p_count + b_token, -1, mask=m_entry)
        m_found = m_entry & (b_count >= 0)
        b_logit = tl.load(p_row + b_token, mask=m_found, other=0.0).to(tl.float64)
        b_logit = tl.where(b_logit > 0, b_logit / repetition, b_logit * repetition)
        b_penalty = frequency * b_count.to(tl.float64) + presence
        b_logit = tl.where(b_count > 0, b_logit - b_penalty, b_logit)
        tl.store(p_row + b_token, b_logit.to(tl.float32), mask=m_found)
    tl.debug_barrier()
    for first in range(start, end, BLOCK):
        m_entry = first + o_block < end
        b_token = tl.load(p_history + first + o_block, mask=m_entry, other=0)
        tl.store(p_count + b_token, 0, mask=m_entry)

    end = tl.load(p_mask_firsts + i_entry + 1)
    for first in range(tl.load(p_mask_firsts + i_entry), end, BLOCK):
        m_entry = first + o_block < end
        b_token = tl.load(p_masked + first + o_block, mask=m_entry, other=0)
        b_logit = tl.load(p_row + b_token, mask=m_entry, other=0.0)
        # one that is no number stays so, and is found
        b_masked = tl.where(tl.abs(b_logit) < float("inf"), masked_logit, b_logit)
        tl.store(p_row + b_token, b_masked, mask=m_entry)


@dataclass(frozen=True, slots=True)
class AdjustIndex:
    """Of each row that is adjusted, what belongs to it in three lists: entry i of `rows` has `bias_tokens` and `biases`
    [bias_firsts[i], bias_firsts[i + 1]), no token twice; `history` [history_firsts[i], history_firsts[i + 1]), of which
    the tokens from output_firsts[i] on are its output; and `masked` [mask_firsts[i], mask_firsts[i + 1]).

    All int32, but for `biases` fp32 and `penalties` fp64 [entries, 3]: repetition, presence, frequency.
    """

    rows: torch.Tensor
    bias_firsts: torch.Tensor
    bias_tokens: torch.Tensor
    biases: torch.Tensor
    history_firsts: torch.Tensor
    output_firsts: torch.Tensor
    history: torch.Tensor
    penalties: torch.Tensor
    mask_firsts: torch.Tensor
    masked: torch.Tensor


def adjust_logits(logits: torch.Tensor, index: AdjustIndex, counts: torch.Tensor) -> None:
    """Changes `logits` fp32 [rows, vocabulary] in place, as `weir.model.sampler` does on the host.

    `counts` int32 [at least as many rows as `index` has, vocabulary] is 0 before and afterwards. Token ids live on the
    device and are not checked.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    count = len(index.rows)
    check_dtype("logits", logits, torch.float32)
    check_rows("logits", logits)
    check_shape("counts", counts, (None, logits.shape[1]))
    check_dtype("counts", counts, torch.int32)
    if len(counts) < count:
        raise ValueError(f"counts have {len(counts)} rows, {count} are adjusted")
    for name, tensor, size in (
        ("bias_firsts", index.bias_firsts, count + 1),
        ("history_firsts", index.history_firsts, count + 1),
        ("output_firsts", index.output_firsts, count),
        ("mask_firsts", index.mask_firsts, count + 1),
        ("bias_tokens", index.bias_tokens, len(index.biases)),
    ):
        check_shape(name, tensor, (size,))
        check_dtype(name, tensor, torch.int32)
    check_dtype("biases", index.biases, torch.float32)
    check_shape("penalties", index.penalties, (count, 3))
    check_dtype("penalties", index.penalties, torch.float64)
    if count == 0:
        return
    adjust_logits_kernel[count,](
        logits,
        counts,
        index.rows,
        index.bias_firsts,
        index.bias_tokens,
        index.biases,
        index.history_firsts,
        index.output_firsts,
        index.history,
        index.penalties,
        index.mask_firsts,
        index.masked,
        MASKED,
        logits.stride(0),
        counts.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
