"""Products of E4M3 rows and matrices with a scale a row: by the library, and by a kernel for GPUs that have none.

The kernel widens both to fp16 as it reads them, which is exact, and adds up in fp32.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from weir.ops import reference_quantized
from weir.ops.gpu.checks import check_dtype, check_rows, check_shape
from weir.ops.gpu.fp8_rows import from_e4m3

_LEAST_CAPABILITY = (8, 9)
"""From here on matrix instructions take E4M3."""
_PROBE_ROWS, _PROBE_OUT, _PROBE_IN = 5, 48, 64
_PROBE_ERROR = 0.02  # of the greatest value; bf16 has 8 bits
_FEW_ROWS = 16
_log = logging.getLogger(__name__)


class Fp8Product(Protocol):
    """Writes `out` [rows, out]; shapes and meaning as `reference_quantized.scaled_product`."""

    def __call__(
        self,
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        matrix: torch.Tensor,
        matrix_scales: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """How the kernel cuts its work. Sums are in the order of the columns, whatever the tiles."""

    block_rows: int
    block_out: int
    block_in: int
    num_warps: int
    num_stages: int


def product_tiles(num_rows: int) -> ProductTiles:
    """A few rows wait for the matrix, so it is read by many programs; more wait for products."""
    if num_rows <= _FEW_ROWS:
        return ProductTiles(block_rows=16, block_out=32, block_in=128, num_warps=4, num_stages=4)
    return ProductTiles(block_rows=64, block_out=128, block_in=64, num_warps=8, num_stages=3)


@triton.jit
def fp8_product_kernel(
    p_rows,
    p_row_scales,
    p_matrix,
    p_matrix_scales,
    p_bias,
    p_out,
    num_rows,
    stride_row,
    stride_matrix,
    stride_out,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program (block of outputs, block of rows)."""
    o_out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    o_row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_in = tl.arange(0, BLOCK_IN)
    m_out = o_out < NUM_OUT
    m_row = o_row < num_rows
    p_r = p_rows + o_row.to(tl.int64)[:, None] * stride_row + o_in[None, :]
    p_m = p_matrix + o_out.to(tl.int64)[:, None] * stride_matrix + o_in[None, :]
    b_acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for first in range(0, NUM_IN, BLOCK_IN):
        m_in = first + o_in < NUM_IN
        b_r = tl.load(p_r + first, mask=m_row[:, None] & m_in[None, :], other=0)  # [BLOCK_ROWS, BLOCK_IN]
        b_m = tl.load(p_m + first, mask=m_out[:, None] & m_in[None, :], other=0)  # [BLOCK_OUT, BLOCK_IN]
        b_acc = tl.dot(from_e4m3(b_r), tl.trans(from_e4m3(b_m)), b_acc)
    b_row_scale = tl.load(p_row_scales + o_row, mask=m_row, other=0.0)
    b_out_scale = tl.load(p_matrix_scales + o_out, mask=m_out, other=0.0)
    b_acc = b_acc * b_row_scale[:, None] * b_out_scale[None, :]
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_out, mask=m_out, other=0.0).to(tl.float32)[None, :]
    p_o = p_out + o_row.to(tl.int64)[:, None] * stride_out + o_out[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_out[None, :])


def fp8_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    matrix: torch.Tensor,
    matrix_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """An `Fp8Product` of every GPU. Raises ValueError: a shape, type or stride does not fit."""
    num_rows, num_in = rows.shape
    num_out = matrix.shape[0]
    check_shape("matrix", matrix, (num_out, num_in))
    check_shape("out", out, (num_rows, num_out))
    check_shape("row_scales", row_scales, (num_rows,))
    check_shape("matrix_scales", matrix_scales, (num_out,))
    if bias is not None:
        check_shape("bias", bias, (num_out,))
    for name, tensor in (("rows", rows), ("matrix", matrix)):
        check_dtype(name, tensor, torch.float8_e4m3fn)
    for name, tensor in (("row_scales", row_scales), ("matrix_scales", matrix_scales)):
        check_dtype(name, tensor, torch.float32)
    for name, tensor in (("rows", rows), ("matrix", matrix), ("out", out)):
        check_rows(name, tensor)
    if num_rows == 0:
        return
    tiles = product_tiles(num_rows)
    fp8_product_kernel[triton.cdiv(num_out, tiles.block_out), triton.cdiv(num_rows, tiles.block_rows)](
        rows.view(torch.uint8),
        row_scales,
        matrix.view(torch.uint8),
        matrix_scales,
        row_scales if bias is None else bias,
        out,
        num_rows,
        rows.stride(0),
        matrix.stride(0),
        out.stride(0),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def library_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    matrix: torch.Tensor,
    matrix_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """An `Fp8Product` by PyTorch, which writes bf16 only, and rounds again where there is a bias."""
    torch._scaled_mm(
        rows, matrix.t(), scale_a=row_scales[:, None], scale_b=matrix_scales[None, :], out_dtype=out.dtype, out=out
    )
    if bias is not None:
        out.add_(bias)


def choose_product(device: torch.device, library: Fp8Product = library_product) -> Fp8Product:
    """The library's where the device has matrix instructions for E4M3 and a small product by it is right; else the
    kernel. Which row-wise scales PyTorch takes on which GPU has changed from version to version: it is tried."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return fp8_product
    problem = problem_of(library, device)
    if problem:
        _log.warning("PyTorch %s multiplies no E4M3 here, a kernel does: %s", torch.__version__, problem)
        return fp8_product
    return library


def problem_of(product: Fp8Product, device: torch.device) -> str:
    """What is wrong with a small product; empty if nothing is."""
    generator = torch.Generator().manual_seed(0)
    operands = [
        reference_quantized.quantize_rows(torch.randn(count, _PROBE_IN, generator=generator))
        for count in (_PROBE_ROWS, _PROBE_OUT)
    ]
    rows, row_scales, matrix, matrix_scales = (tensor for pair in operands for tensor in pair)
    bias = torch.randn(_PROBE_OUT, generator=generator).bfloat16()
    expected = reference_quantized.scaled_product(rows, row_scales, matrix, matrix_scales, bias, torch.float32)
    out = torch.empty(_PROBE_ROWS, _PROBE_OUT, dtype=torch.bfloat16, device=device)
    try:
        rows, row_scales, matrix, matrix_scales, bias = (
            tensor.to(device) for tensor in (rows, row_scales, matrix, matrix_scales, bias)
        )
        product(rows, row_scales, matrix, matrix_scales, bias, out)
        found = out.float().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
    difference = float((found - expected).abs().max() / expected.abs().max())
    return "" if difference <= _PROBE_ERROR else f"a small product is {difference:.1%} off"
