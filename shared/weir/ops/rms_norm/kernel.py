"""RMSNorm (Zhang, Sennrich: "Root mean square layer normalization", 2019), with the residual sum before it."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    p_rows,
    p_residual,
    p_weight,
    p_out,
    epsilon,
    stride_row,
    stride_residual,
    stride_out,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + epsilon) * weight, a row a program, in fp32, rounded once.

    With a residual, x is rows + residual as rounded to the residual's type, which is stored there.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_hidden = tl.arange(0, BLOCK)
    m_hidden = o_hidden < HIDDEN
    b_x = tl.load(p_rows + i_row * stride_row + o_hidden, mask=m_hidden, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_sum = p_residual + i_row * stride_residual + o_hidden
        b_x += tl.load(p_sum, mask=m_hidden, other=0.0).to(tl.float32)
        b_sum = b_x.to(p_residual.dtype.element_ty)
        tl.store(p_sum, b_sum, mask=m_hidden)
        b_x = b_sum.to(tl.float32)
    b_weight = tl.load(p_weight + o_hidden, mask=m_hidden, other=0.0).to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / HIDDEN + epsilon)
    b_y = b_x * b_scale * b_weight
    tl.store(p_out + i_row * stride_out + o_hidden, b_y.to(p_out.dtype.element_ty), mask=m_hidden)
