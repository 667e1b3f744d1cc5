"""Cases of the kernels that read and write numbers of one byte, as `full_width` has them of the others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.cases.full_width import AttentionShape, KernelCase, kv_batch, relative_error
from weir.kv.geometry import PAGE_TOKENS
from weir.model.files.dummy import shape_named
from weir.model.triton.memory import LayerPages, layer_pages, page_shape
from weir.ops import reference, reference_quantized
from weir.ops.gpu import decode_work as work_list
from weir.ops.gpu import fp8_rows, rms_norm
from weir.ops.gpu import paged_decode as decode
from weir.ops.gpu.attention import DeviceScoring
from weir.ops.gpu.fp8_product import Fp8Product, choose_product

_E4M3_ERROR = 2.0**-4
"""Half a step of E4M3 beside the number: what is between two may be rounded to either."""


def _quantized(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(num_rows, width, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return values, torch.empty(num_rows, device=device)


def fp8_norm_case(num_rows: int, hidden: int, device: torch.device) -> KernelCase:
    """`error` is 0 where every number is the expected one or its neighbour."""
    rows, weight = (torch.randn(*shape, device=device).bfloat16() for shape in ((num_rows, hidden), (hidden,)))
    out, scales = _quantized(num_rows, hidden, device)
    run = partial(rms_norm.rms_norm, rows, weight, 1e-5, out, None, scales)
    expected = partial(reference_quantized.rms_norm_quantize, rows, weight, 1e-5)
    return _row_case("rms_norm to E4M3", run, out, scales, expected, rows.nbytes + out.nbytes)


def fp8_silu_case(num_rows: int, width: int, device: torch.device) -> KernelCase:
    """`error` as for `fp8_norm_case`."""
    gate_up = torch.randn(num_rows, 2 * width, device=device).bfloat16()
    out, scales = _quantized(num_rows, width, device)
    run = partial(fp8_rows.gated_quantize, gate_up, out, scales)
    expected = partial(reference_quantized.gated_quantize, gate_up)
    return _row_case("silu_mul to E4M3", run, out, scales, expected, gate_up.nbytes + out.nbytes)


def _row_case(
    op: str,
    run: Callable[[], None],
    out: torch.Tensor,
    scales: torch.Tensor,
    expected: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    num_bytes: int,
) -> KernelCase:
    def error() -> float:
        run()
        values, row_scales = expected()
        meant = values.float() * row_scales[:, None]
        difference = (out.float() * scales[:, None] - meant).abs()
        return float((difference - 2.1 * _E4M3_ERROR * meant.abs() - row_scales[:, None] / 256).clamp(min=0).max())

    return KernelCase(op, f"{len(out)} x {out.shape[1]}", num_bytes, 0, run, error)


def fp8_product_case(
    num_rows: int, num_out: int, num_in: int, device: torch.device, product: Fp8Product | None = None
) -> KernelCase:
    """By the product that the device gets, unless one is given."""
    rows, row_scales = reference_quantized.quantize_rows(torch.randn(num_rows, num_in, device=device))
    matrix, matrix_scales = reference_quantized.quantize_rows(torch.randn(num_out, num_in, device=device))
    out = torch.empty(num_rows, num_out, dtype=torch.bfloat16, device=device)
    operands = (rows, row_scales, matrix, matrix_scales, None)
    run = partial(product or choose_product(device), *operands, out)

    def error() -> float:
        run()
        return relative_error(out, reference_quantized.scaled_product(*operands, torch.float32))

    num_bytes = rows.nbytes + matrix.nbytes + out.nbytes
    return KernelCase(
        "E4M3 product", f"{num_rows} x {num_out} x {num_in}", num_bytes, 2 * num_rows * matrix.numel(), run, error
    )


def int8_decode_case(
    shape: AttentionShape, lengths: list[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> KernelCase:
    """`paged_decode` over keys and values in int8."""
    kv = kv_batch(shape, lengths, torch.float32, device)
    pages = _int8_pages(shape, kv.keys, kv.values)
    assert pages.scales is not None
    tiles, scale = work_list.decode_tiles(shape.head_dim, torch.int8), shape.head_dim**-0.5
    queries = torch.randn(len(lengths), shape.num_heads, shape.head_dim, device=device).to(dtype)
    out = torch.empty_like(queries)
    longest = max(lengths) + PAGE_TOKENS
    scratch = decode.decode_scratch(len(lengths), shape.num_heads, shape.head_dim, longest, tiles, device)
    ends = torch.tensor(lengths, device=device, dtype=torch.int32)
    work = work_list.decode_work(kv.block_tables, ends, tiles)
    run = partial(
        decode.paged_decode,
        queries,
        pages.keys,
        pages.values,
        work,
        DeviceScoring(scale),
        out,
        scratch,
        tiles,
        pages.scales,
    )
    keys = reference_quantized.widened(pages.keys, pages.scales.keys)
    values = reference_quantized.widened(pages.values, pages.scales.values)

    def error() -> float:
        run()
        return relative_error(out, reference.paged_decode(queries, keys, values, kv.block_tables, ends, scale))

    num_bytes = 2 * sum(lengths) * shape.num_kv_heads * (shape.head_dim + 4) + 2 * queries.nbytes
    num_flops = 4 * sum(lengths) * shape.num_heads * shape.head_dim
    return KernelCase("paged_decode, int8", f"{shape.name} {len(lengths)} rows", num_bytes, num_flops, run, error)


def _int8_pages(shape: AttentionShape, keys: torch.Tensor, values: torch.Tensor) -> LayerPages:
    config = replace(
        shape_named("tiny"), num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
    )
    memory = torch.zeros(page_shape(config, len(keys), torch.int8), dtype=torch.int8, device=keys.device)
    pages = layer_pages(memory, config)[0]
    assert pages.scales is not None
    for numbers, room, scales in ((keys, pages.keys, pages.scales.keys), (values, pages.values, pages.scales.values)):
        quantized, head_scales = reference_quantized.quantize_heads(numbers)
        room.copy_(quantized)
        scales.copy_(head_scales)
    return pages
