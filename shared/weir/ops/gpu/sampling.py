"""Greedy and temperature sampling in two passes: blocks of the vocabulary, then the rows.

Weights are as in `weir.model.sampler`: the same number on the host then samples the same token. The uniform number of
each row is made on the host (`philox_uniforms`); rows with filters go on in `weir.ops.gpu.sampling_filters`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_dtype, check_rows, check_shape

NOT_A_NUMBER = -1
"""The token of a row with a NaN or infinite logit."""
_BLOCK = 1024

Words = npt.NDArray[np.uint64]

_FEW = 8
"""So many numbers are made faster one by one."""
_PHILOX_ROUNDS = 10
_PHILOX_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
_PHILOX_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_HALF, _LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)


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


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Room for the blocks' results, each [rows, blocks]: greatest logit (fp32), its token (int32), weight (fp64)."""

    block_max: torch.Tensor
    block_token: torch.Tensor
    block_sum: torch.Tensor


def sampling_scratch(max_rows: int, vocab_size: int, device: torch.device) -> SamplingScratch:
    shape = (max_rows, triton.cdiv(vocab_size, _BLOCK))
    return SamplingScratch(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float64, device=device),
    )


def philox_uniforms(seeds: Words, output_indices: Words) -> npt.NDArray[np.float64]:
    """In [0, 1), [rows]: the first number of numpy's Philox4x64-10 keyed by both (Salmon et al., 2011).

    Any machine makes the same number for the same token; `weir.ops.cpu.sampling.uniform_of` is the same, compiled.
    """
    key = np.stack([seeds, output_indices])  # [2, rows]
    if len(seeds) <= _FEW:
        return np.array([np.random.Generator(np.random.Philox(key=each)).random() for each in key.T], np.float64)
    even, odd = np.zeros((2, 2, len(seeds)), np.uint64)  # words 0 and 2 of the counter, and 1 and 3
    even[0] = 1
    for _ in range(_PHILOX_ROUNDS):
        high, low = _multiply(_PHILOX_FACTORS, even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key += _PHILOX_WEYL
    uniforms: npt.NDArray[np.float64] = (even[0] >> np.uint64(11)) * 2.0**-53
    return uniforms


def _multiply(factors: Words, words: Words) -> tuple[Words, Words]:
    """The high and the low 64 bits of the products."""
    factors_high, factors_low = factors >> _HALF, factors & _LOW_HALF
    words_high, words_low = words >> _HALF, words & _LOW_HALF
    middle = factors_high * words_low + (factors_low * words_low >> _HALF)
    other = factors_low * words_high + (middle & _LOW_HALF)
    return factors_high * words_high + (middle >> _HALF) + (other >> _HALF), factors * words


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    token_ids: torch.Tensor,
    scratch: SamplingScratch,
) -> None:
    """Writes `token_ids` int32 [rows]; shapes and meaning as `reference.sample`.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    num_rows, vocab_size = logits.shape
    check_dtype("logits", logits, torch.float32)
    check_rows("logits", logits)
    for name, tensor, dtype in (
        ("temperatures", temperatures, torch.float32),
        ("uniforms", uniforms, torch.float64),
        ("token_ids", token_ids, torch.int32),
    ):
        check_shape(name, tensor, (num_rows,))
        check_dtype(name, tensor, dtype)
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    check_shape("scratch.block_max", scratch.block_max, (None, num_blocks))
    if scratch.block_max.shape[0] < num_rows:
        raise ValueError(f"the scratch has room for {scratch.block_max.shape[0]} rows, this batch needs {num_rows}")
    if num_rows == 0:
        return
    block_weights_kernel[num_rows, num_blocks](
        logits,
        temperatures,
        scratch.block_max,
        scratch.block_token,
        scratch.block_sum,
        logits.stride(0),
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    sample_token_kernel[num_rows,](
        logits,
        temperatures,
        uniforms,
        scratch.block_max,
        scratch.block_token,
        scratch.block_sum,
        token_ids,
        logits.stride(0),
        vocab_size,
        num_blocks,
        BLOCK=_BLOCK,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=4,
    )
