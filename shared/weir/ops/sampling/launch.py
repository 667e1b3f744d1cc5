"""Launches greedy and temperature sampling on a GPU (or in Triton's interpreter).

On the host: the uniform number of each row (`philox_uniform`), and rows that ask for more than a
temperature (top-k, top-p, min-p, penalties, a bias, log-probabilities), whose logits go to `weir.model.sampler`.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton

from weir.ops.checks import check_dtype, check_rows, check_shape
from weir.ops.sampling.kernel import block_weights_kernel, sample_token_kernel

_BLOCK = 1024


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


def philox_uniform(seed: int, output_index: int) -> float:
    """In [0, 1): the first number of numpy's Philox4x64-10 keyed by both (Salmon et al., 2011).

    Any machine makes the same number for the same token; `weir.ops.sampling.cpu.uniform_of` is the same, compiled.
    """
    key = np.array([seed, output_index], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


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
