"""All rows times blocks of 16 outputs, as LLVM IR: few rows in tiles, many with weights that stay."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.cpu.linear_many import LEAST_ROWS, MOST_ROWS, PAIR, has_many, many_function
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, WeightKind, group_bytes
from weir.ops.cpu.linear_tile import BlockArguments, TileShape, at, tile_function, tile_shapes
from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import FLOAT_BYTES, INT64
from weir.ops.simd.jit import simd
from weir.ops.simd.loops import Values, emit_index, emit_loop


def most_tile_rows(instruction_set: InstructionSet) -> int:
    """Rows that one pass over a block takes."""
    if has_many(instruction_set):
        return MOST_ROWS
    return max(tile_shapes(kind, instruction_set)[0].num_rows for kind in WeightKind)


def make_blocks(kind: WeightKind, instruction_set: InstructionSet) -> Callable[..., Any]:
    """A function for kernels: `num_blocks` neighbouring blocks, then `BlockArguments` of the first, in order.

    All are int64; 1 in `is_added` adds to what is there.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        num_blocks, *arguments = values
        _emit_blocks(builder, kind, instruction_set, num_blocks, BlockArguments(*arguments))
        return context.get_dummy_value()

    # numba wants every argument by name
    def blocks(
        typing_context: Any,
        num_blocks: Any,
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
        return types.void(*[types.int64] * 10), codegen

    return simd(blocks)


def _emit_blocks(
    builder: ir.IRBuilder,
    kind: WeightKind,
    instruction_set: InstructionSet,
    num_blocks: ir.Value,
    arguments: BlockArguments,
) -> None:
    block_bytes = builder.mul(arguments.num_groups, emit_index(group_bytes(kind)))

    def emit_each(first: ir.Value, last: ir.Value, step: int, emit: Callable[[BlockArguments], None]) -> None:
        def body(block: ir.Value, _: Values) -> Values:
            emit(
                replace(
                    arguments,
                    weights=builder.add(arguments.weights, builder.mul(block, block_bytes)),
                    out=at(builder, arguments.out, block, BLOCK_OUTPUTS * FLOAT_BYTES),
                    num_outputs=builder.sub(arguments.num_outputs, builder.mul(block, emit_index(BLOCK_OUTPUTS))),
                )
            )
            return []

        emit_loop(builder, first, last, step, [], body)

    def emit_tiles(here: BlockArguments) -> None:
        _emit_tiles(builder, tile_shapes(kind, instruction_set), here)

    if not has_many(instruction_set):
        emit_each(emit_index(0), num_blocks, 1, emit_tiles)
        return
    pair, one = (many_function(builder.module, kind, instruction_set, number) for number in (PAIR, 1))
    in_pairs = builder.and_(num_blocks, emit_index(-PAIR))
    are_many = builder.icmp_unsigned(">=", arguments.num_rows, emit_index(LEAST_ROWS))
    with builder.if_else(are_many) as (many, few):
        with many:
            emit_each(emit_index(0), in_pairs, PAIR, lambda here: _emit_passes(builder, pair, here))
            emit_each(in_pairs, num_blocks, 1, lambda here: _emit_passes(builder, one, here))
        with few:
            emit_each(emit_index(0), num_blocks, 1, emit_tiles)


def _emit_passes(builder: ir.IRBuilder, function: ir.Function, arguments: BlockArguments) -> None:
    """Calls of at most MOST_ROWS rows."""
    most = emit_index(MOST_ROWS)

    def one_pass(first: ir.Value, _: Values) -> Values:
        left = builder.sub(arguments.num_rows, first)
        taken = builder.select(builder.icmp_unsigned("<", left, most), left, most)
        _emit_call(builder, function, replace(arguments, num_rows=taken), first)
        return []

    emit_loop(builder, emit_index(0), arguments.num_rows, MOST_ROWS, [], one_pass)


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
