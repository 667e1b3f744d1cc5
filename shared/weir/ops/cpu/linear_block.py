"""All rows times blocks of 16 outputs, as LLVM IR: few rows in tiles, more with weights that stay, many by AMX."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.cpu.linear_amx import MOST_AMX_ROWS, amx_function, emit_configure_tiles
from weir.ops.cpu.linear_many import LEAST_ROWS, MOST_ROWS, PAIR, has_many, many_function
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, WeightKind, group_bytes
from weir.ops.cpu.linear_tile import BlockArguments, TileShape, at, from_row, tile_function, tile_shapes
from weir.ops.simd.amx import TILE_ROWS, emit_release
from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import FLOAT_BYTES, INT64
from weir.ops.simd.jit import simd
from weir.ops.simd.loops import Values, emit_index, emit_loop


def most_tile_rows(instruction_set: InstructionSet) -> int:
    """Rows that one call of `make_blocks`' function takes at most."""
    if instruction_set is InstructionSet.AMX:
        return MOST_AMX_ROWS
    if has_many(instruction_set.vectors):
        return MOST_ROWS
    return max(tile_shapes(kind, instruction_set)[0].num_rows for kind in WeightKind)


def make_blocks(kind: WeightKind, instruction_set: InstructionSet) -> Callable[..., Any]:
    """A function for kernels: `num_blocks` neighbouring blocks, then `BlockArguments` of the first, in order.

    All are int64; there are at most `most_tile_rows` rows, and 1 in `is_added` adds to what is there.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        num_blocks, *arguments = values
        here = BlockArguments(*arguments)
        if instruction_set is InstructionSet.AMX:
            _emit_blocks_amx(builder, kind, num_blocks, here)
        else:
            _emit_blocks(builder, kind, instruction_set, num_blocks, here)
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
    def emit_tiles() -> None:
        shapes = tile_shapes(kind, instruction_set)
        every = _BlockRange(emit_index(0), num_blocks, 1)
        _emit_each(builder, kind, arguments, every, lambda block: _emit_tiles(builder, shapes, block))

    def emit_many() -> None:
        _emit_pairs(builder, kind, num_blocks, arguments, partial(many_function, builder.module, kind, instruction_set))

    if has_many(instruction_set):
        _emit_by_rows(builder, arguments, LEAST_ROWS, emit_many, emit_tiles)
    else:
        emit_tiles()


def _emit_blocks_amx(builder: ir.IRBuilder, kind: WeightKind, num_blocks: ir.Value, arguments: BlockArguments) -> None:
    """Whole tiles of rows by AMX, those that are left by vectors."""
    in_tiles = builder.and_(arguments.num_rows, emit_index(-TILE_ROWS))
    left = builder.sub(arguments.num_rows, in_tiles)
    with builder.if_then(builder.icmp_signed(">", in_tiles, emit_index(0))):
        emit_configure_tiles(builder)
        function = amx_function(builder.module, kind)
        every = _BlockRange(emit_index(0), num_blocks, 1)
        _emit_each(builder, kind, replace(arguments, num_rows=in_tiles), every, partial(_emit_call, builder, function))
        emit_release(builder)
    with builder.if_then(builder.icmp_signed(">", left, emit_index(0))):
        behind = replace(from_row(builder, arguments, in_tiles), num_rows=left)
        _emit_blocks(builder, kind, InstructionSet.AMX.vectors, num_blocks, behind)


def _emit_pairs(
    builder: ir.IRBuilder,
    kind: WeightKind,
    num_blocks: ir.Value,
    arguments: BlockArguments,
    function_of: Callable[[int], ir.Function],
) -> None:
    """Calls `function_of` PAIR blocks and, for one that is left, of 1."""
    in_pairs = builder.and_(num_blocks, emit_index(-PAIR))
    for blocks in (_BlockRange(emit_index(0), in_pairs, PAIR), _BlockRange(in_pairs, num_blocks, 1)):
        function = function_of(blocks.step)
        _emit_each(builder, kind, arguments, blocks, partial(_emit_call, builder, function))


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """first, first + step, … below last."""

    first: ir.Value
    last: ir.Value
    step: int


def _emit_each(
    builder: ir.IRBuilder,
    kind: WeightKind,
    arguments: BlockArguments,
    blocks: _BlockRange,
    emit: Callable[[BlockArguments], None],
) -> None:
    """`emit` from each block on; `arguments` are those of block 0."""
    block_bytes = builder.mul(arguments.num_groups, emit_index(group_bytes(kind)))

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

    emit_loop(builder, blocks.first, blocks.last, blocks.step, [], body)


def _emit_by_rows(
    builder: ir.IRBuilder,
    arguments: BlockArguments,
    least: int,
    emit_many: Callable[[], None],
    emit_few: Callable[[], None],
) -> None:
    """`emit_many` for `least` rows or more."""
    with builder.if_else(builder.icmp_unsigned(">=", arguments.num_rows, emit_index(least))) as (many, few):
        with many:
            emit_many()
        with few:
            emit_few()


def _emit_tiles(builder: ir.IRBuilder, shapes: list[TileShape], arguments: BlockArguments) -> None:
    """As many of the largest tiles as fit, then one of each smaller size that fits into the rows left."""

    def emit_at(shape: TileShape, row: ir.Value) -> None:
        _emit_call(builder, tile_function(builder.module, shape), from_row(builder, arguments, row))

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


def _emit_call(builder: ir.IRBuilder, function: ir.Function, arguments: BlockArguments) -> None:
    builder.call(function, [getattr(arguments, field.name) for field in fields(arguments)])
