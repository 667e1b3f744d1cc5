"""The inner loops of a linear layer: all rows times one block of 16 outputs, as LLVM IR.

For every group g of 32 inputs in order, with exact integer sums and each operation rounded once to float32:

    total  = sum of integer weight * value over the group
    result = fma(float(total) * weight_scale[g], row_scale[g], result)
    result = fma(weight_minimum[g], row_scaled_sum[g], result)             4-bit weights only

These are the same operations for every instruction set and every row of a batch, so results are equal to the bit. Rows
are taken in tiles: weights are loaded once a tile and used for all its rows, whose sums stay in registers.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, SCALES_BYTES, WeightKind, group_bytes
from weir.ops.cpu.quantized_rows import CORRECTION_OFFSET, GROUP, RECORD_BYTES, SCALE_OFFSET, SCALED_SUM_OFFSET
from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import FLOAT, INT32, INT64, emit_fma, emit_load, emit_prefetch, vector_type
from weir.ops.simd.integer import (
    dot_product,
    emit_load_first,
    emit_load_half,
    emit_load_lanes,
    emit_load_splat,
    emit_opaque,
    emit_prefetch_for_write,
    emit_store_first,
)

_QUADS = GROUP // 4
_QUAD_BYTES = BLOCK_OUTPUTS * 4
_PREFETCH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TileShape:
    """`num_vectors` of a block's vectors are computed together, the others after them.

    A group is `num_rounds` of a loop. In one round, which LLVM may order as it likes, the sums of a larger tile do not
    stay in the 16 registers of AVX2.
    """

    kind: WeightKind
    instruction_set: InstructionSet
    num_rows: int
    num_vectors: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class BlockArguments:
    """Addresses and strides in bytes (i64). Outputs from `num_outputs` on are padding and not written."""

    weights: ir.Value
    num_groups: ir.Value
    rows: ir.Value
    row_stride: ir.Value
    num_rows: ir.Value
    out: ir.Value
    out_stride: ir.Value
    num_outputs: ir.Value
    is_added: ir.Value


def tile_shapes(kind: WeightKind, instruction_set: InstructionSet) -> list[TileShape]:
    """The tiles for a batch, largest first; one of each but the first makes any remainder. Measured, see ADR 0005."""
    if instruction_set is InstructionSet.AVX512_VNNI:
        tiles = [(4, 1, 1), (3, 1, 1), (2, 1, 1), (1, 1, 1)]
    elif instruction_set is InstructionSet.PORTABLE:
        tiles = [(4, 1, 2), (2, 1, 2), (1, 1, 2)]
    elif instruction_set is InstructionSet.AVX2 and kind is WeightKind.INT8:
        tiles = [(4, 1, 8), (3, 1, 8), (2, 2, 4), (1, 2, 1)]
    else:
        tiles = [(4, 2, 4), (3, 2, 1), (2, 2, 1), (1, 2, 1)]
    return [TileShape(kind, instruction_set, *tile) for tile in tiles]


def tile_function(module: ir.Module, shape: TileShape) -> ir.Function:
    """A function of its own for each tile: inlined into one, they would compete for registers."""

    def emit(builder: ir.IRBuilder, arguments: BlockArguments) -> None:
        _emit_tile(builder, shape, arguments)

    return block_function(module, ("weir_tile", *astuple(shape)), emit)


def block_function(
    module: ir.Module, key: tuple[object, ...], emit: Callable[[ir.IRBuilder, BlockArguments], None]
) -> ir.Function:
    """Of `BlockArguments`, under this key: one name for one code, also across the modules that numba links."""
    name = "_".join(str(value) for value in key)
    if name in module.globals:
        return module.globals[name]
    parameters = [INT64] * len(fields(BlockArguments))
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit(builder, BlockArguments(*function.args))
    builder.ret_void()
    return function


def _emit_tile(builder: ir.IRBuilder, shape: TileShape, arguments: BlockArguments) -> None:
    lanes = dot_product(shape.instruction_set, shape.kind).width * shape.num_vectors
    for row in range(shape.num_rows):
        # results go to a line that no cache holds yet: it is there when the sums are
        emit_prefetch_for_write(builder, at(builder, arguments.out, arguments.out_stride, row))
    with cgutils.for_range(builder, ir.Constant(INT64, BLOCK_OUTPUTS // lanes), intp=INT64) as part:
        first = builder.mul(part.index, ir.Constant(INT64, lanes))
        results = _emit_groups(builder, shape, arguments, first)
        _emit_results(builder, shape, arguments, first, results)


def _emit_groups(
    builder: ir.IRBuilder, shape: TileShape, arguments: BlockArguments, first: ir.Value
) -> list[list[Any]]:
    """Memory [rows][vectors] (which LLVM keeps in registers) with the sums over all groups, outputs from `first` on."""
    width = dot_product(shape.instruction_set, shape.kind).width
    zero = ir.Constant(vector_type(width), [ir.Constant(FLOAT, 0.0)] * width)
    results = [
        [cgutils.alloca_once(builder, zero.type) for _ in range(shape.num_vectors)] for _ in range(shape.num_rows)
    ]
    for row_results in results:
        for result in row_results:
            builder.store(zero, result)
    with cgutils.for_range(builder, arguments.num_groups, intp=INT64) as loop:
        group = at(builder, arguments.weights, loop.index, group_bytes(shape.kind))
        first_row = at(builder, arguments.rows, loop.index, RECORD_BYTES)
        rows = [at(builder, first_row, arguments.row_stride, row) for row in range(shape.num_rows)]
        _emit_group(builder, shape, group, first, rows, results)
    return results


def _emit_group(
    builder: ir.IRBuilder, shape: TileShape, group: ir.Value, first_output: ir.Value, rows: list[ir.Value], results: Any
) -> None:
    """One group of 32 inputs, outputs from `first_output` on; `group` and `rows` are where its weights and rows are."""
    dot, is_8_bit = dot_product(shape.instruction_set, shape.kind), shape.kind is WeightKind.INT8
    width, vectors = dot.width, range(shape.num_vectors)
    firsts = [
        emit_load_splat(builder, offset(builder, row, CORRECTION_OFFSET), INT32, width) if is_8_bit else None
        for row in rows
    ]
    totals = [[_allocate(builder, dot.start(builder, first)) for _ in vectors] for first in firsts]
    weights = at(builder, offset(builder, group, SCALES_BYTES), first_output, 4)
    num_steps = _QUADS * shape.kind // 8
    steps_a_round = num_steps // shape.num_rounds
    step_inputs = GROUP // num_steps
    num_rounds = ir.Constant(INT64, shape.num_rounds)
    is_loop = shape.num_rounds > 1
    with cgutils.for_range(builder, emit_opaque(builder, num_rounds) if is_loop else num_rounds, intp=INT64) as loop:
        number = emit_opaque(builder, loop.index) if is_loop else loop.index
        round_rows = [at(builder, row, number, steps_a_round * step_inputs) for row in rows]
        round_weights = at(builder, weights, number, steps_a_round * _QUAD_BYTES)
        for step in range(steps_a_round):
            step_rows = [offset(builder, row, step * step_inputs) for row in round_rows]
            _emit_step(builder, shape, offset(builder, round_weights, step * _QUAD_BYTES), step_rows, totals)
    for vector in vectors:
        output = offset(builder, first_output, width * vector)
        scale, minimum = emit_scales(builder, shape.kind, shape.instruction_set, group, output)
        for row, first, row_totals, row_results in zip(rows, firsts, totals, results, strict=True):
            total = dot.finish(builder, tuple(builder.load(part) for part in row_totals[vector]), first)
            result = builder.load(row_results[vector])
            builder.store(emit_group_added(builder, total, scale, minimum, row, result), row_results[vector])


def emit_group_added(
    builder: ir.IRBuilder,
    total: ir.Value,
    scale: ir.Value,
    minimum: ir.Value | None,
    record: ir.Value,
    result: ir.Value,
) -> ir.Value:
    """`result` after one more group, whose products of integers are `total` and whose row's record is at `record`."""
    width = total.type.count
    scaled = builder.fmul(builder.sitofp(total, vector_type(width)), scale)
    row_scale = emit_load_splat(builder, offset(builder, record, SCALE_OFFSET), FLOAT, width)
    result = emit_fma(builder, scaled, row_scale, result)
    if minimum is None:
        return result
    scaled_sum = emit_load_splat(builder, offset(builder, record, SCALED_SUM_OFFSET), FLOAT, width)
    return emit_fma(builder, minimum, scaled_sum, result)


def emit_scales(
    builder: ir.IRBuilder, kind: WeightKind, instruction_set: InstructionSet, group: ir.Value, output: ir.Value
) -> tuple[ir.Value, ir.Value | None]:
    """Scales of a vector of outputs from `output` on, and minima where the kind has them."""
    width = dot_product(instruction_set, kind).width
    if kind is WeightKind.INT8:
        return emit_load(builder, at(builder, group, output, 4), width), None
    minima = offset(builder, group, 2 * BLOCK_OUTPUTS)
    scale, minimum = (
        emit_load_half(builder, at(builder, base, output, 2), width, instruction_set) for base in (group, minima)
    )
    return scale, minimum


def _emit_step(builder: ir.IRBuilder, shape: TileShape, weights: ir.Value, rows: list[ir.Value], totals: Any) -> None:
    """64 bytes of weights: one quad of inputs, or two of 4 bits."""
    dot = dot_product(shape.instruction_set, shape.kind)
    emit_prefetch(builder, offset(builder, weights, _PREFETCH_BYTES))
    parts = [
        dot.prepare(
            builder,
            emit_load_lanes(builder, offset(builder, weights, 4 * dot.width * vector), dot.width, 4 * dot.width),
        )
        for vector in range(shape.num_vectors)
    ]
    for quad in range(8 // shape.kind):
        for row, row_totals in zip(rows, totals, strict=True):
            splat = emit_load_splat(builder, offset(builder, row, 4 * quad), INT32, dot.width)
            for quads, memory in zip(parts, row_totals, strict=True):
                total = tuple(builder.load(part) for part in memory)
                for part, value in zip(memory, dot.add(builder, total, quads[quad], splat), strict=True):
                    builder.store(value, part)


def at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stride: int) -> ir.Value:
    """address + index * stride."""
    return builder.add(address, builder.mul(index, ir.Constant(INT64, stride)))


def offset(builder: ir.IRBuilder, address: ir.Value, num_bytes: int) -> ir.Value:
    """address + num_bytes."""
    return builder.add(address, ir.Constant(INT64, num_bytes))


def from_row(builder: ir.IRBuilder, arguments: BlockArguments, row: ir.Value) -> BlockArguments:
    """Of the rows from `row` on; `num_rows` stays what it is."""
    return replace(
        arguments,
        rows=builder.add(arguments.rows, builder.mul(row, arguments.row_stride)),
        out=builder.add(arguments.out, builder.mul(row, arguments.out_stride)),
    )


def _allocate(builder: ir.IRBuilder, values: tuple[ir.Value, ...]) -> list[ir.Value]:
    """Stack memory that LLVM turns into registers."""
    memory = [cgutils.alloca_once(builder, value.type) for value in values]
    for part, value in zip(memory, values, strict=True):
        builder.store(value, part)
    return memory


def _emit_results(
    builder: ir.IRBuilder, shape: TileShape, arguments: BlockArguments, first: ir.Value, results: list[list[Any]]
) -> None:
    width = dot_product(shape.instruction_set, shape.kind).width
    for row, row_results in enumerate(results):
        for vector, memory in enumerate(row_results):
            lane = builder.add(first, ir.Constant(INT64, width * vector))
            emit_result(builder, arguments, ir.Constant(INT64, row), lane, builder.load(memory))


def emit_result(
    builder: ir.IRBuilder, arguments: BlockArguments, row: ir.Value, lane: ir.Value, value: ir.Value
) -> None:
    """Writes a row's outputs from `lane` on, or adds them to what is there."""
    width = value.type.count
    line = builder.add(arguments.out, builder.mul(arguments.out_stride, row))
    address = builder.add(line, builder.mul(lane, ir.Constant(INT64, 4)))
    num_left = builder.sub(arguments.num_outputs, lane)
    with builder.if_else(builder.icmp_signed("!=", arguments.is_added, ir.Constant(INT64, 0))) as (then, otherwise):
        with then:
            there = emit_load_first(builder, address, width, num_left)
            emit_store_first(builder, builder.fadd(there, value), address, num_left)
        with otherwise:
            emit_store_first(builder, value, address, num_left)
