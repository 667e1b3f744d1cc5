"""RMSNorm (Zhang, Sennrich: "Root mean square layer normalization", 2019), with the residual sum before it."""

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_rows, check_shape
from weir.ops.gpu.fp8_rows import check_quantized, store_quantized, warps_of_row

_MAX_HIDDEN = 32768


@triton.jit
def rms_norm_kernel(
    p_rows,
    p_residual,
    p_weight,
    p_out,
    p_scales,
    epsilon,
    stride_row,
    stride_residual,
    stride_out,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + epsilon) * weight, a row a program, in fp32, rounded once.

    With a residual, x is rows + residual as rounded to the residual's type, which is stored there. QUANTIZED: y is not
    rounded but quantized.
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
    p_y = p_out + i_row * stride_out + o_hidden
    if QUANTIZED:
        store_quantized(b_y, p_y, p_scales + i_row, m_hidden)
    else:
        tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=m_hidden)


def rms_norm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Writes `out` [rows, hidden] and adds `rows` to `residual`; meaning as `reference.rms_norm`.

    With `scales` fp32 [rows], `out` is E4M3 and meant as `reference_quantized.rms_norm_quantize`.

    `out` may be `rows`. Raises:
        ValueError: a shape or stride does not fit, or a row has more than 32,768 columns.
    """
    num_rows, hidden = rows.shape
    check_shape("weight", weight, (hidden,))
    check_rows("weight", weight)
    for name, tensor in (("rows", rows), ("out", out), ("residual", rows if residual is None else residual)):
        check_shape(name, tensor, rows.shape)
        check_rows(name, tensor)
    if hidden > _MAX_HIDDEN:
        raise ValueError(f"rows have {hidden} columns, the kernel keeps a row in registers and takes {_MAX_HIDDEN}")
    if scales is not None:
        check_quantized(out, scales, num_rows, hidden)
    if num_rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[num_rows,](
        rows,
        rows if residual is None else residual,
        weight,
        out if scales is None else out.view(torch.uint8),
        rows if scales is None else scales,
        epsilon,
        rows.stride(0),
        rows.stride(0) if residual is None else residual.stride(0),
        out.stride(0),
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        QUANTIZED=scales is not None,
        num_warps=warps_of_row(block),
    )
