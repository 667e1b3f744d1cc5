"""The gate of SwiGLU and of GeGLU (Shazeer: "GLU variants improve transformer", 2020)."""

import math

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_rows, check_shape
from weir.ops.reference import Activation

_BLOCK = 1024
_GELU_LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi))
_GELU_CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)


@triton.jit
def activated(b_gate, IS_GELU: tl.constexpr):
    """SiLU; or GELU as tanh approximates it, 0.5 x (1 + tanh(u)), which is x sigmoid(2 u)."""
    if IS_GELU:
        return b_gate * tl.sigmoid(b_gate * (_GELU_LINEAR + _GELU_CUBIC * b_gate * b_gate))
    return b_gate * tl.sigmoid(b_gate)


@triton.jit
def gated_kernel(
    p_gate_up,
    p_out,
    stride_row,
    stride_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Program (row, block of columns): activation(gate) * up, in fp32, rounded once."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < WIDTH
    p_gate = p_gate_up + i_row * stride_row + o_column
    b_gate = tl.load(p_gate, mask=m_column, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + WIDTH, mask=m_column, other=0.0).to(tl.float32)
    b_out = activated(b_gate, IS_GELU) * b_up
    tl.store(p_out + i_row * stride_out + o_column, b_out.to(p_out.dtype.element_ty), mask=m_column)


def gated(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
    """`gate_up` [rows, 2 * width] to `out` [rows, width]; meaning as `reference.gated`.

    Raises:
        ValueError: a shape or stride does not fit.
    """
    num_rows, width = out.shape
    check_shape("gate_up", gate_up, (num_rows, 2 * width))
    check_rows("gate_up", gate_up)
    check_rows("out", out)
    if num_rows == 0:
        return
    gated_kernel[num_rows, triton.cdiv(width, _BLOCK)](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=_BLOCK,
        IS_GELU=activation == "gelu_tanh",
        num_warps=4,
    )
