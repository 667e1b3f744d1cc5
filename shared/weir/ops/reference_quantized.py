"""What the ops on numbers of one byte compute, in plain torch: what their kernels are compared with.

E4M3 (Micikevicius et al.: "FP8 formats for deep learning", 2022) has 4 bits of exponent, 3 of mantissa and no infinity;
its greatest number is 448. A row of numbers is kept as E4M3, or as int8, with one fp32 scale.
"""

from dataclasses import dataclass

import torch

from weir.kv.geometry import PAGE_TOKENS
from weir.ops import reference

E4M3_MAX = 448.0
INT8_MAX = 127.0
LEAST_AMAX = 1e-12
"""Stands for the greatest magnitude of a row that has none: its scale must not be 0."""


@dataclass(frozen=True, slots=True)
class KvScales:
    """Of keys and values in int8: fp32 [pages, kv heads, PAGE_TOKENS] each, views of any stride but of the same one."""

    keys: torch.Tensor
    values: torch.Tensor


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [rows, width] and the fp32 scales [rows] that they are to be multiplied by, each row's greatest magnitude
    becoming 448. Rounded to the nearest, ties to even; a row with a NaN is NaN."""
    values = rows.float()
    amax = values.abs().amax(-1).clamp(min=LEAST_AMAX)
    return (values * _divided(E4M3_MAX, amax)[:, None]).to(torch.float8_e4m3fn), amax * (1 / E4M3_MAX)


def rms_norm_quantize(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rms_norm`, its result quantized without being rounded to the rows' type first."""
    summed = reference.rms_sum(rows, residual)
    return quantize_rows(reference.rms_norm(summed, weight.float(), epsilon))


def gated_quantize(
    gate_up: torch.Tensor, activation: reference.Activation = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.gated`, its result quantized without being rounded to the rows' type first."""
    return quantize_rows(reference.gated(gate_up.float(), activation))


def scaled_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    matrix: torch.Tensor,
    matrix_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`rows` E4M3 [rows, in] times `matrix` E4M3 [out, in], in fp32, times the scales of both [rows] and [out],
    plus `bias` [out]; rounded once to `dtype`."""
    product = rows.float() @ matrix.float().t()
    product = product * row_scales[:, None] * matrix_scales[None, :]
    return (product if bias is None else product + bias.float()).to(dtype)


def quantize_heads(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., head_dim] and the fp32 scales [...] that they are to be multiplied by, the greatest magnitude of each
    head of a token becoming 127. Rounded to the nearest, ties to even."""
    values = heads.float()
    amax = values.abs().amax(-1).clamp(min=LEAST_AMAX)
    return (values * _divided(INT8_MAX, amax)[..., None]).round().to(torch.int8), amax * (1 / INT8_MAX)


def widened(pages: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 of int8 keys or values [..., head_dim] and their scales [...]."""
    return pages.float() * scales[..., None]


def rotary_kv_write(
    query_key_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KvScales,
    norms: reference.HeadNorms | None = None,
) -> None:
    """`reference.rotary_kv_write` into int8 pages; keys are quantized as they are in fp32, not rounded before."""
    num_kv_heads = keys.shape[1]
    num_heads = query_key_value.shape[1] - 2 * num_kv_heads
    row_cos, row_sin = cos[positions.long()][:, None], sin[positions.long()][:, None]
    queries, new_keys, new_values = torch.split(query_key_value, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    normed_queries, normed_keys = reference.norm_heads(queries, new_keys, norms)
    rotated = reference.rotate(normed_keys.float(), row_cos, row_sin)
    queries.copy_(reference.rotate(normed_queries, row_cos, row_sin))
    kept = slot_mapping >= 0
    page_ids, offsets = slot_mapping[kept].long() // PAGE_TOKENS, slot_mapping[kept].long() % PAGE_TOKENS
    for heads, pages, page_scales in ((rotated, keys, scales.keys), (new_values, values, scales.values)):
        quantized, head_scales = quantize_heads(heads[kept])
        pages[page_ids, :, offsets] = quantized
        page_scales[page_ids, :, offsets] = head_scales


def _divided(number: float, by: torch.Tensor) -> torch.Tensor:
    """Rounded once: PyTorch divides a Python number by a reciprocal, which it rounds too."""
    return torch.full_like(by, number) / by
