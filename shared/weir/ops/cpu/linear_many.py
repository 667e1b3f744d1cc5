"""Many rows times one block of 16 outputs, as LLVM IR: a group's weights stay in registers while all rows pass.

Weights are unpacked once a group instead of once a tile of rows. The rows' sums lie in the first cache between groups,
where loading and storing them takes no turn of the ports that multiply. The operations of a row and their order are
those of `weir.ops.cpu.linear_tile`, but for one that is left out: with 4 bits a sum of products starts at 1.5 * 2**23,
so that its bits, read as a float, are 1.5 * 2**23 + total, and

    fma(1.5 * 2**23 + total, scale, -1.5 * 2**23 * scale)  =  float(total) * scale, rounded once

for a float16 scale times 1.5 * 2**23 is exact in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba.core import cgutils

from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, SCALES_BYTES, WeightKind, group_bytes
from weir.ops.cpu.linear_tile import BlockArguments, at, block_function, emit_result, emit_scales, offset
from weir.ops.cpu.quantized_rows import CORRECTION_OFFSET, GROUP, RECORD_BYTES, SCALE_OFFSET, SCALED_SUM_OFFSET
from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import FLOAT, INT32, INT64, emit_constant, emit_fma, emit_load, emit_store, vector_type
from weir.ops.simd.integer import (
    DotProduct,
    dot_product,
    emit_int_constant,
    emit_load_lanes,
    emit_load_splat,
    emit_prefetch_for_write,
    int_vector,
)
from weir.ops.simd.loops import Values, emit_loop

MOST_ROWS = 32
"""Of a call: their records and sums stay in the first cache."""
LEAST_ROWS = 12
_ROWS_AT_ONCE = 4
_QUAD_BYTES = BLOCK_OUTPUTS * 4
_LINE_BYTES = 64
_FLOAT_START, _START_BITS = 12582912.0, 0x4B400000


def has_many(instruction_set: InstructionSet) -> bool:
    """Where it pays: 16 outputs a vector, and registers for a group's weights beside the sums."""
    return instruction_set is InstructionSet.AVX512_VNNI


def many_function(module: ir.Module, kind: WeightKind, instruction_set: InstructionSet) -> ir.Function:
    """Of `BlockArguments`, for 1 to MOST_ROWS rows."""

    def emit(builder: ir.IRBuilder, arguments: BlockArguments) -> None:
        _emit_many(builder, kind, instruction_set, arguments)

    return block_function(module, ("weir_many", kind, instruction_set), emit)


@dataclass(frozen=True, slots=True)
class _Group:
    """What every row meets: unpacked weights by quad, scales; of 4-bit weights minima and -1.5 * 2**23 * scales."""

    weights: list[tuple[ir.Value, ...]]
    scale: ir.Value
    minimum: ir.Value | None
    shift: ir.Value | None


def _emit_many(
    builder: ir.IRBuilder, kind: WeightKind, instruction_set: InstructionSet, arguments: BlockArguments
) -> None:
    dot, zero_index = dot_product(instruction_set, kind), ir.Constant(INT64, 0)
    zero = emit_constant(vector_type(dot.width), 0.0)
    sums = builder.ptrtoint(cgutils.alloca_once(builder, zero.type, size=MOST_ROWS), INT64)
    with cgutils.for_range(builder, arguments.num_rows, intp=INT64) as loop:
        emit_store(builder, zero, at(builder, sums, loop.index, _LINE_BYTES))
        emit_prefetch_for_write(builder, builder.add(arguments.out, builder.mul(loop.index, arguments.out_stride)))
    with cgutils.for_range(builder, arguments.num_groups, intp=INT64) as loop:
        address = at(builder, arguments.weights, loop.index, group_bytes(kind))
        group = _emit_unpack(builder, kind, instruction_set, address)
        records = at(builder, arguments.rows, loop.index, RECORD_BYTES)

        def rows_body(count: int) -> Callable[[ir.Value, Values], Values]:
            def body(row: ir.Value, _: Values) -> Values:
                first = builder.add(records, builder.mul(row, arguments.row_stride))
                places = [builder.add(first, builder.mul(arguments.row_stride, INT64(n))) for n in range(count)]
                _emit_rows(builder, dot, group, places, at(builder, sums, row, _LINE_BYTES))
                return []

            return body

        whole = builder.and_(arguments.num_rows, ir.Constant(INT64, -_ROWS_AT_ONCE))
        emit_loop(builder, zero_index, whole, _ROWS_AT_ONCE, [], rows_body(_ROWS_AT_ONCE))
        emit_loop(builder, whole, arguments.num_rows, 1, [], rows_body(1))
    with cgutils.for_range(builder, arguments.num_rows, intp=INT64) as loop:
        value = emit_load(builder, at(builder, sums, loop.index, _LINE_BYTES), dot.width)
        emit_result(builder, arguments, loop.index, zero_index, value)


def _emit_unpack(builder: ir.IRBuilder, kind: WeightKind, instruction_set: InstructionSet, group: ir.Value) -> _Group:
    dot = dot_product(instruction_set, kind)
    weights: list[tuple[ir.Value, ...]] = []
    for line in range(GROUP * kind // 8 // 4):
        address = offset(builder, group, SCALES_BYTES + line * _QUAD_BYTES)
        weights += dot.prepare(builder, emit_load_lanes(builder, address, dot.width, _LINE_BYTES))
    scale, minimum = emit_scales(builder, kind, instruction_set, group, ir.Constant(INT64, 0))
    shift = None if minimum is None else builder.fmul(scale, emit_constant(scale.type, -_FLOAT_START))
    return _Group(weights, scale, minimum, shift)


def _emit_rows(builder: ir.IRBuilder, dot: DotProduct, group: _Group, records: list[ir.Value], sums: ir.Value) -> None:
    """Adds a group's part to the sums of neighbouring rows."""
    width = dot.width
    start = emit_int_constant(int_vector(width), _START_BITS)
    firsts = [
        start
        if group.shift is not None
        else emit_load_splat(builder, offset(builder, record, CORRECTION_OFFSET), INT32, width)
        for record in records
    ]
    totals = [dot.start(builder, first) for first in firsts]
    for quad, weights in enumerate(group.weights):
        for number, record in enumerate(records):
            splat = emit_load_splat(builder, offset(builder, record, 4 * quad), INT32, width)
            totals[number] = dot.add(builder, totals[number], weights, splat)
    for number, (record, first) in enumerate(zip(records, firsts, strict=True)):
        total = dot.finish(builder, totals[number], first)
        place = offset(builder, sums, number * _LINE_BYTES)
        row_scale = emit_load_splat(builder, offset(builder, record, SCALE_OFFSET), FLOAT, width)
        if group.shift is None:
            scaled = builder.fmul(builder.sitofp(total, vector_type(width)), group.scale)
        else:
            scaled = emit_fma(builder, builder.bitcast(total, vector_type(width)), group.scale, group.shift)
        result = emit_fma(builder, scaled, row_scale, emit_load(builder, place, width))
        if group.minimum is not None:
            scaled_sum = emit_load_splat(builder, offset(builder, record, SCALED_SUM_OFFSET), FLOAT, width)
            result = emit_fma(builder, group.minimum, scaled_sum, result)
        emit_store(builder, result, place)
