"""All rows times one block of 16 outputs: few rows in tiles, many with weights that stay. As LLVM IR."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.cpu.linear_many import LEAST_ROWS, MOST_ROWS, has_many, many_function
from weir.ops.cpu.linear_pack import WeightKind
from weir.ops.cpu.linear_tile import BlockArguments, TileShape, tile_function, tile_shapes
from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import INT64
from weir.ops.simd.jit import simd
from weir.ops.simd.loops import Values, emit_loop


def most_tile_rows(instruction_set: InstructionSet) -> int:
    """Rows that one pass over a block takes: given so many, a block is one call."""
    if has_many(instruction_set):
        return MOST_ROWS
    return max(tile_shapes(kind, instruction_set)[0].num_rows for kind in WeightKind)


def make_block(kind: WeightKind, instruction_set: InstructionSet) -> Callable[..., Any]:
    """A function for kernels that takes `BlockArguments` in order, all int64; 1 in `is_added` adds to what is there."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _emit_block(builder, kind, instruction_set, BlockArguments(*values))
        return context.get_dummy_value()

    # numba wants every argument by name
    def block(
        typing_context: Any,
        weights: Any,
        num_groups: Any,
        rows: Any,
        row_stride: Any,
        num_rows: Any,
        out: Any,
        out_stride: Any,
        num_outputs: Any,
        is_added: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), codegen

    return simd(block)


def _emit_block(
    builder: ir.IRBuilder, kind: WeightKind, instruction_set: InstructionSet, arguments: BlockArguments
) -> None:
    if not has_many(instruction_set):
        _emit_tiles(builder, tile_shapes(kind, instruction_set), arguments)
        return
    are_many = builder.icmp_unsigned(">=", arguments.num_rows, ir.Constant(INT64, LEAST_ROWS))
    with builder.if_else(are_many) as (many, few):
        with many:
            _emit_passes(builder, many_function(builder.module, kind, instruction_set), arguments)
        with few:
            _emit_tiles(builder, tile_shapes(kind, instruction_set), arguments)


def _emit_passes(builder: ir.IRBuilder, function: ir.Function, arguments: BlockArguments) -> None:
    """Calls of at most MOST_ROWS rows."""
    most = ir.Constant(INT64, MOST_ROWS)

    def one_pass(first: ir.Value, _: Values) -> Values:
        left = builder.sub(arguments.num_rows, first)
        taken = builder.select(builder.icmp_unsigned("<", left, most), left, most)
        _emit_call(builder, function, replace(arguments, num_rows=taken), first)
        return []

    emit_loop(builder, ir.Constant(INT64, 0), arguments.num_rows, MOST_ROWS, [], one_pass)


def _emit_tiles(builder: ir.IRBuilder, shapes: list[TileShape], arguments: BlockArguments) -> None:
    """As many of the largest tiles as fit, then one of each smaller size that fits into the rows left."""

    def emit_at(shape: TileShape, row: ir.Value) -> None:
        _emit_call(builder, tile_function(builder.module, shape), arguments, row)

    largest, *smaller = shapes
    size = ir.Constant(INT64, largest.num_rows)
    with cgutils.for_range(builder, builder.udiv(arguments.num_rows, size), intp=INT64) as loop:
        emit_at(largest, builder.mul(loop.index, size))
    num_left = cgutils.alloca_once_value(builder, builder.urem(arguments.num_rows, size))
    for shape in smaller:
        left, taken = builder.load(num_left), ir.Constant(INT64, shape.num_rows)
        with builder.if_then(builder.icmp_unsigned(">=", left, taken)):
            emit_at(shape, builder.sub(arguments.num_rows, left))
            builder.store(builder.sub(left, taken), num_left)


def _emit_call(builder: ir.IRBuilder, function: ir.Function, arguments: BlockArguments, row: ir.Value) -> None:
    """From `row` on."""
    rows = builder.add(arguments.rows, builder.mul(row, arguments.row_stride))
    out = builder.add(arguments.out, builder.mul(row, arguments.out_stride))
    here = replace(arguments, rows=rows, out=out)
    builder.call(function, [getattr(here, field.name) for field in fields(here)])
