"""What the ops on numbers of one byte compute, in plain torch: what their kernels are compared with.

E4M3 (Micikevicius et al.: "FP8 formats for deep learning", 2022) has 4 bits of exponent, 3 of mantissa and no infinity;
its greatest number is 448. A row of numbers is kept as E4M3, or as int8, with one fp32 scale.
"""

import torch

from weir.ops import reference

E4M3_MAX = 448.0
INT8_MAX = 127.0
LEAST_AMAX = 1e-12
"""Stands for the greatest magnitude of a row that has none: its scale must not be 0."""


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [rows, width] and the fp32 scales [rows] that they are to be multiplied by, each row's greatest magnitude
    becoming 448. Rounded to the nearest, ties to even; a row with a NaN is NaN."""
    values = rows.float()
    amax = values.abs().amax(-1).clamp(min=LEAST_AMAX)
    return (values * (E4M3_MAX / amax)[:, None]).to(torch.float8_e4m3fn), amax * (1 / E4M3_MAX)


def rms_norm_quantize(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rms_norm`, its result quantized without being rounded to the rows' type first."""
    summed = reference.rms_sum(rows, residual)
    return quantize_rows(reference.rms_norm(summed, weight.float(), epsilon))


def silu_mul_quantize(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.silu_mul`, its result quantized without being rounded to the rows' type first."""
    return quantize_rows(reference.silu_mul(gate_up.float()))


def scaled_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    matrix: torch.Tensor,
    matrix_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`rows` E4M3 [rows, in] times `matrix` E4M3 [out, in], in fp32, times the scales of both [rows], [out], plus `bias`
    [out]; rounded once to `dtype`."""
    product = rows.float() @ matrix.float().t()
    product = product * row_scales[:, None] * matrix_scales[None, :]
    return (product if bias is None else product + bias.float()).to(dtype)


def quantize_heads(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., head_dim] and the fp32 scales [...] that they are to be multiplied by, the greatest magnitude of each
    head of a token becoming 127. Rounded to the nearest, ties to even."""
    values = heads.float()
    scales = values.abs().amax(-1).clamp(min=LEAST_AMAX) / INT8_MAX
    return (values / scales[..., None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales
