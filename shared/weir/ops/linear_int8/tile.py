"""The inner loop of a linear layer: some rows times one block of 16 outputs, as LLVM IR.

For every group g of 32 inputs in order, with exact integer sums and each operation rounded once to float32:

    total  = sum of integer weight * value over the group
    result = fma(float(total) * weight_scale[g], row_scale[g], result)
    result = fma(weight_minimum[g], row_scaled_sum[g], result)             4-bit weights only

These are the same operations for every tier, number of rows in the tile and kind of row tail, so results are equal to
the bit. Weights are loaded once a tile and used for all its rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.linear_int8.pack import BLOCK_OUTPUTS, WeightKind
from weir.ops.quantize.rows import CORRECTION_OFFSET, GROUP, RECORD_BYTES, SCALE_OFFSET, SCALED_SUM_OFFSET
from weir.ops.simd.features import KernelTier
from weir.ops.simd.float import FLOAT, INT32, INT64, emit_fma, emit_prefetch, vector_type
from weir.ops.simd.integer import (
    dot_product,
    emit_load_first,
    emit_load_half,
    emit_load_lanes,
    emit_load_splat,
    emit_nibbles,
    emit_store_first,
)
from weir.ops.simd.jit import simd

_QUADS = GROUP // 4
_QUAD_BYTES = BLOCK_OUTPUTS * 4


@dataclass(frozen=True, slots=True)
class TileShape:
    """`num_vectors` of a block's vectors are computed together, the others after them."""

    kind: WeightKind
    tier: KernelTier
    num_rows: int
    num_vectors: int
    prefetch_bytes: int


@dataclass(frozen=True, slots=True)
class TileArguments:
    """Addresses and strides in bytes (i64). Outputs from `num_outputs` on are padding and not written."""

    scales: ir.Value
    weights: ir.Value
    num_groups: ir.Value
    rows: ir.Value
    row_stride: ir.Value
    out: ir.Value
    out_stride: ir.Value
    num_outputs: ir.Value
    is_added: ir.Value


def make_tile(shape: TileShape) -> Callable[..., Any]:
    """A function for kernels that takes `TileArguments` in order, all int64; 1 in `is_added` adds to what is there."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _emit_tile(builder, shape, TileArguments(*values))
        return context.get_dummy_value()

    # numba wants every argument by name
    def tile(
        typing_context: Any,
        scales: Any,
        weights: Any,
        num_groups: Any,
        rows: Any,
        row_stride: Any,
        out: Any,
        out_stride: Any,
        num_outputs: Any,
        is_added: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), codegen

    tile.__name__ = f"tile_{shape.kind.name.lower()}_{shape.num_rows}_rows"
    return simd(tile)


def _emit_tile(builder: ir.IRBuilder, shape: TileShape, arguments: TileArguments) -> None:
    lanes = dot_product(shape.tier).width * shape.num_vectors
    with cgutils.for_range(builder, ir.Constant(INT64, BLOCK_OUTPUTS // lanes), intp=INT64) as part:
        first = builder.mul(part.index, ir.Constant(INT64, lanes))
        results = _emit_groups(builder, shape, arguments, first)
        _emit_results(builder, shape, arguments, first, results)


def _emit_groups(builder: ir.IRBuilder, shape: TileShape, arguments: TileArguments, first: ir.Value) -> list[list[Any]]:
    """Memory [rows][vectors] (which LLVM keeps in registers) with the sums over all groups, outputs from `first` on."""
    width = dot_product(shape.tier).width
    zero = ir.Constant(vector_type(width), [ir.Constant(FLOAT, 0.0)] * width)
    results = [
        [cgutils.alloca_once(builder, zero.type) for _ in range(shape.num_vectors)] for _ in range(shape.num_rows)
    ]
    for row_results in results:
        for result in row_results:
            builder.store(zero, result)
    is_4_bit = shape.kind is WeightKind.INT4
    scale_bytes = BLOCK_OUTPUTS * 2 * (2 if is_4_bit else 1)
    weight_bytes = BLOCK_OUTPUTS * GROUP * shape.kind // 8
    with cgutils.for_range(builder, arguments.num_groups, intp=INT64) as loop:

        def at(base: ir.Value, stride: int) -> ir.Value:
            return builder.add(base, builder.mul(loop.index, ir.Constant(INT64, stride)))

        scales = builder.add(at(arguments.scales, scale_bytes), builder.mul(first, ir.Constant(INT64, 2)))
        weights = builder.add(at(arguments.weights, weight_bytes), builder.mul(first, ir.Constant(INT64, 4)))
        rows = [
            builder.add(at(arguments.rows, RECORD_BYTES), builder.mul(arguments.row_stride, ir.Constant(INT64, row)))
            for row in range(shape.num_rows)
        ]
        _emit_group(builder, shape, scales, weights, rows, results)
    return results


def _emit_group(
    builder: ir.IRBuilder, shape: TileShape, scales: ir.Value, weights: ir.Value, rows: list[ir.Value], results: Any
) -> None:
    """One group of 32 inputs, all addresses at that group."""
    dot, is_8_bit = dot_product(shape.tier), shape.kind is WeightKind.INT8
    width, vectors = dot.width, range(shape.num_vectors)

    def offset(address: ir.Value, num_bytes: int) -> ir.Value:
        return builder.add(address, ir.Constant(INT64, num_bytes))

    totals = []
    for row in rows:
        first = emit_load_splat(builder, offset(row, CORRECTION_OFFSET), INT32, width) if is_8_bit else None
        totals.append([dot.start(builder, first) for _ in vectors])
    for quad, vector, values in _emit_quads(builder, shape, weights):
        prepared = dot.prepare(builder, values, is_8_bit)
        for row, row_totals in zip(rows, totals, strict=True):
            splat = emit_load_splat(builder, offset(row, 4 * quad), INT32, width)
            row_totals[vector] = dot.add(builder, row_totals[vector], prepared, splat)
    for vector in vectors:
        scale = emit_load_half(builder, offset(scales, 2 * width * vector), width, shape.tier)
        for row, row_totals, row_results in zip(rows, totals, results, strict=True):
            total = builder.sitofp(dot.finish(builder, row_totals[vector]), vector_type(width))
            row_scale = emit_load_splat(builder, offset(row, SCALE_OFFSET), FLOAT, width)
            result = emit_fma(builder, builder.fmul(total, scale), row_scale, builder.load(row_results[vector]))
            if not is_8_bit:
                minimum = emit_load_half(
                    builder, offset(scales, 2 * (BLOCK_OUTPUTS + width * vector)), width, shape.tier
                )
                scaled_sum = emit_load_splat(builder, offset(row, SCALED_SUM_OFFSET), FLOAT, width)
                result = emit_fma(builder, minimum, scaled_sum, result)
            builder.store(result, row_results[vector])


def _emit_quads(builder: ir.IRBuilder, shape: TileShape, weights: ir.Value) -> Iterator[tuple[int, int, ir.Value]]:
    """(quad of inputs, vector of outputs, weights), as they lie in memory."""
    width = dot_product(shape.tier).width
    for step in range(_QUADS * shape.kind // 8):
        for vector in range(shape.num_vectors):
            address = builder.add(weights, ir.Constant(INT64, _QUAD_BYTES * step + 4 * width * vector))
            if shape.prefetch_bytes and vector * width == 0:
                emit_prefetch(builder, builder.add(address, ir.Constant(INT64, shape.prefetch_bytes)))
            loaded = emit_load_lanes(builder, address, width, align=4 * width)
            if shape.kind is WeightKind.INT8:
                yield step, vector, loaded
            else:
                low, high = emit_nibbles(builder, loaded)
                yield 2 * step, vector, low
                yield 2 * step + 1, vector, high


def _emit_results(
    builder: ir.IRBuilder, shape: TileShape, arguments: TileArguments, first: ir.Value, results: list[list[Any]]
) -> None:
    """Writes them, or adds them to what is there."""
    width = dot_product(shape.tier).width
    is_added = builder.icmp_signed("!=", arguments.is_added, ir.Constant(INT64, 0))
    for row, row_results in enumerate(results):
        for vector, memory in enumerate(row_results):
            lane = builder.add(first, ir.Constant(INT64, width * vector))
            line = builder.add(arguments.out, builder.mul(arguments.out_stride, ir.Constant(INT64, row)))
            address = builder.add(line, builder.mul(lane, ir.Constant(INT64, 4)))
            num_left = builder.sub(arguments.num_outputs, lane)
            value = builder.load(memory)
            with builder.if_else(is_added) as (then, otherwise):
                with then:
                    there = emit_load_first(builder, address, width, num_left)
                    emit_store_first(builder, builder.fadd(there, value), address, num_left)
                with otherwise:
                    emit_store_first(builder, value, address, num_left)
