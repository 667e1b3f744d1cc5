"""Rows of numbers to E4M3 with a scale a row: alone, and behind the gate of SwiGLU.

Bits are made and read by integer operations, the same on every GPU: below compute capability 8.9 the compiler knows no
E4M3, and on all others the result is what their own conversion gives.
"""

import torch
import triton
import triton.language as tl

from weir.ops.gpu.checks import check_dtype, check_rows, check_shape
from weir.ops.gpu.gated import activated
from weir.ops.head_dims import WIDEST_QUANTIZED_ROW
from weir.ops.reference import Activation
from weir.ops.reference_quantized import E4M3_MAX, LEAST_AMAX

_ELEMENTS_PER_WARP = 512
_GATE_BLOCK = 4096
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_SCALE_OF_MAX = tl.constexpr(1.0 / E4M3_MAX)
_LEAST_AMAX = tl.constexpr(LEAST_AMAX)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_STEPS_OF_SUBNORMALS = tl.constexpr(16384.0)
"""The sum of this and a number is rounded to multiples of 2**-9."""
_BITS_OF_STEPS = tl.constexpr(0x46800000)


@triton.jit
def to_e4m3(b_x):
    """uint8 of fp32 whose magnitude rounds to 448 or less: to the nearest, ties to even. Others become NaN."""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_magnitude = b_bits & 0x7FFFFFFF
    # three bits of mantissa are left of 23, and the exponent's bias of 127 becomes 7
    b_normal = ((b_magnitude + 0x7FFFF + ((b_magnitude >> 20) & 1)) >> 20) - (120 << 3)
    b_absolute = b_magnitude.to(tl.float32, bitcast=True)
    b_steps = (b_absolute + _STEPS_OF_SUBNORMALS).to(tl.uint32, bitcast=True)
    b_small = b_steps - _BITS_OF_STEPS
    b_code = tl.where(b_absolute < _SMALLEST_NORMAL, b_small, tl.minimum(b_normal, 0x7F))
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(b_codes):
    """fp16 of uint8, exactly: E4M3's bits stand 2**8 lower among fp16's."""
    b_wide = b_codes.to(tl.uint16)
    b_bits = ((b_wide & 0x7F) << 7) | ((b_wide & 0x80) << 8)
    b_x = b_bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((b_wide & 0x7F) == 0x7F, float("nan"), b_x).to(tl.float16)


@triton.jit
def store_quantized(b_row, p_out, p_scale, m_row):
    """One row in fp32, 0 outside m_row, and its scale."""
    b_amax = tl.maximum(tl.max(tl.abs(b_row), 0), _LEAST_AMAX)
    tl.store(p_scale, b_amax * _SCALE_OF_MAX)
    tl.store(p_out, to_e4m3(b_row * tl.div_rn(_E4M3_MAX, b_amax)), mask=m_row)


@triton.jit
def quantize_rows_kernel(p_rows, p_out, p_scales, stride_row, stride_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)
    m_column = o_column < WIDTH
    b_row = tl.load(p_rows + i_row * stride_row + o_column, mask=m_column, other=0.0).to(tl.float32)
    store_quantized(b_row, p_out + i_row * stride_out + o_column, p_scales + i_row, m_column)


@triton.jit
def load_gated(p_gate, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """activation(gate) * up in fp32, of BLOCK columns of a row from `first` on; 0 beyond WIDTH."""
    o_column = first + tl.arange(0, BLOCK)
    m_column = o_column < WIDTH
    b_gate = tl.load(p_gate + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + WIDTH + o_column, mask=m_column, other=0.0).to(tl.float32)
    return activated(b_gate, IS_GELU) * b_up


@triton.jit
def gated_quantize_kernel(
    p_gate_up,
    p_out,
    p_scales,
    stride_row,
    stride_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Program (row), which is computed twice, for its greatest magnitude and for itself: registers have no room."""
    i_row = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCK)
    p_gate = p_gate_up + i_row * stride_row
    b_most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        b_most = tl.maximum(b_most, tl.abs(load_gated(p_gate, first, WIDTH, BLOCK, IS_GELU)))
    b_amax = tl.maximum(tl.max(b_most, 0), _LEAST_AMAX)
    tl.store(p_scales + i_row, b_amax * _SCALE_OF_MAX)
    b_inverse = tl.div_rn(_E4M3_MAX, b_amax)
    for first in range(0, WIDTH, BLOCK):
        b_codes = to_e4m3(load_gated(p_gate, first, WIDTH, BLOCK, IS_GELU) * b_inverse)
        tl.store(p_out + i_row * stride_out + first + o_block, b_codes, mask=first + o_block < WIDTH)


def quantize_rows(rows: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """`rows` [rows, width] to `out`, E4M3 of the same shape, and `scales`, fp32 [rows]; meaning as
    `reference_quantized.quantize_rows`.

    Raises:
        ValueError: a shape, type or stride does not fit, or a row has more than 32,768 columns.
    """
    num_rows, width = rows.shape
    check_rows("rows", rows)
    check_quantized(out, scales, num_rows, width)
    if width > WIDEST_QUANTIZED_ROW:
        raise ValueError(
            f"rows have {width} columns, the kernel keeps a row in registers and takes {WIDEST_QUANTIZED_ROW}"
        )
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    quantize_rows_kernel[num_rows,](
        rows,
        out.view(torch.uint8),
        scales,
        rows.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_of_row(block),
    )


def gated_quantize(
    gate_up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, activation: Activation = "silu"
) -> None:
    """`gate_up` [rows, 2 * width] to `out`, E4M3 [rows, width], and `scales`, fp32 [rows]; meaning as
    `reference_quantized.gated_quantize`.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    num_rows, width = out.shape
    check_shape("gate_up", gate_up, (num_rows, 2 * width))
    check_rows("gate_up", gate_up)
    check_quantized(out, scales, num_rows, width)
    if num_rows == 0:
        return
    block = min(triton.next_power_of_2(width), _GATE_BLOCK)
    gated_quantize_kernel[num_rows,](
        gate_up,
        out.view(torch.uint8),
        scales,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        IS_GELU=activation == "gelu_tanh",
        num_warps=warps_of_row(block),
    )


def check_quantized(out: torch.Tensor, scales: torch.Tensor, num_rows: int, width: int) -> None:
    """What rows are quantized into."""
    check_shape("out", out, (num_rows, width))
    check_dtype("out", out, torch.float8_e4m3fn)
    check_rows("out", out)
    check_shape("scales", scales, (num_rows,))
    check_dtype("scales", scales, torch.float32)
    check_rows("scales", scales)


def warps_of_row(block: int) -> int:
    return min(max(block // _ELEMENTS_PER_WARP, 1), 16)
