"""A linear layer whose rows do not depend on the batch, in place of the library's product.

A library chooses tiles, and whether sums along the inputs are split, by the number of rows; so the bits of a row change
with its batch. Here tiles follow from the matrix alone, and sums go along the inputs from the first to the last. Why
that is enough: He et al., "Defeating nondeterminism in LLM inference", Thinking Machines Lab, 2025.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_aligned, check_dtype, check_rows, check_shape

_WIDE_OUTPUTS = 8192
"""From here on tiles of 128 outputs are enough programs for all multiprocessors."""


# one row, or a multiple of 16, must not compile the kernel anew: another variant might add otherwise
@triton.jit(do_not_specialize=["num_rows"])
def exact_linear_kernel(
    p_rows,
    p_matrix,
    p_bias,
    p_out,
    num_rows,
    num_outputs,
    num_inputs,
    stride_row,
    stride_matrix,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program (tile of rows, tile of outputs): sums in fp32, block by block of inputs, the bias last, rounded once.

    Programs of the same outputs follow one another, so that the matrix is read from memory once. Rows beyond the batch
    are computed as 0 and not stored: the tile is never smaller.
    """
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m = (o_m < num_rows)[:, None]
    m_n = (o_n < num_outputs)[None, :]
    p_x = p_rows + o_m.to(tl.int64)[:, None] * stride_row + o_k[None, :]  # [BLOCK_M, BLOCK_K]
    p_w = p_matrix + o_n.to(tl.int64)[None, :] * stride_matrix + o_k[:, None]  # [BLOCK_K, BLOCK_N]
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        if IS_EVEN_K:
            b_x = tl.load(p_x + first, mask=m_m, other=0.0)
            b_w = tl.load(p_w + first, mask=m_n, other=0.0)
        else:
            m_k = first + o_k < num_inputs
            b_x = tl.load(p_x + first, mask=m_m & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + first, mask=m_n & m_k[:, None], other=0.0)
        b_sum = tl.dot(b_x, b_w, b_sum, input_precision="ieee")
    if HAS_BIAS:
        b_sum += tl.load(p_bias + o_n, mask=o_n < num_outputs, other=0.0).to(tl.float32)[None, :]
    p_o = p_out + o_m.to(tl.int64)[:, None] * stride_out + o_n[None, :]
    tl.store(p_o, b_sum.to(p_out.dtype.element_ty), mask=m_m & m_n)


@dataclass(frozen=True, slots=True)
class ExactTiles:
    """How a product is cut. Other sizes may round otherwise, so none depends on the number of rows, or on a timing."""

    block_rows: int
    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int


def exact_tiles(num_outputs: int, dtype: torch.dtype) -> ExactTiles:
    """Of a matrix [num_outputs, inputs]."""
    if dtype == torch.float32:
        return ExactTiles(32, 32, 32, num_warps=4, num_stages=3)
    if num_outputs >= _WIDE_OUTPUTS:
        return ExactTiles(64, 128, 64, num_warps=8, num_stages=3)
    return ExactTiles(64, 32, 64, num_warps=4, num_stages=6)


def exact_linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Writes `out` [rows, outputs], of the rows' type or fp32; meaning as `reference.linear`.

    `rows` [rows, inputs], `matrix` [outputs, inputs] and `bias` [outputs] are of one type. A row of `out` is the same
    to the bit in every batch and at every place in it.

    Raises:
        ValueError: a shape, type, stride or address does not fit.
    """
    num_rows, num_inputs = rows.shape
    num_outputs = len(matrix)
    check_shape("matrix", matrix, (None, num_inputs))
    check_shape("out", out, (num_rows, num_outputs))
    check_dtype("matrix", matrix, rows.dtype)
    check_dtype("out", out, rows.dtype, torch.float32)
    if bias is not None:
        check_shape("bias", bias, (num_outputs,))
        check_dtype("bias", bias, rows.dtype)
    for name, tensor in (("rows", rows), ("matrix", matrix), ("out", out), ("bias", rows if bias is None else bias)):
        check_rows(name, tensor)
        check_aligned(name, tensor)
    if num_rows == 0:
        return
    tiles = exact_tiles(num_outputs, rows.dtype)
    exact_linear_kernel[triton.cdiv(num_rows, tiles.block_rows), triton.cdiv(num_outputs, tiles.block_outputs)](
        rows,
        matrix,
        rows if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        rows.stride(0),
        matrix.stride(0),
        out.stride(0),
        BLOCK_M=tiles.block_rows,
        BLOCK_N=tiles.block_outputs,
        BLOCK_K=tiles.block_inputs,
        IS_EVEN_K=num_inputs % tiles.block_inputs == 0,
        HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
