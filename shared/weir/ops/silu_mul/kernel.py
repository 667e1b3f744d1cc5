"""The gate of SwiGLU (Shazeer: "GLU variants improve transformer", 2020)."""

import triton
import triton.language as tl


@triton.jit
def silu_mul_kernel(
    p_gate_up,
    p_out,
    stride_row,
    stride_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of columns): gate * sigmoid(gate) * up, in fp32, rounded once."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < WIDTH
    p_gate = p_gate_up + i_row * stride_row + o_column
    b_gate = tl.load(p_gate, mask=m_column, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + WIDTH, mask=m_column, other=0.0).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_out + i_row * stride_out + o_column, b_out.to(p_out.dtype.element_ty), mask=m_column)
