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
from weir.ops.simd.float import (
    FLOAT,
    INT32,
    INT64,
    emit_constant,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_store,
    vector_type,
)
from weir.ops.simd.integer import (
    DotProduct,
    dot_product,
    emit_int_constant,
    emit_load_lanes,
    emit_load_splat,
    emit_prefetch_for_write,
    int_vector,
)
from weir.ops.simd.loops import Values, emit_index, emit_loop

MOST_ROWS = 32
"""Of a call: their records and sums stay in the first cache."""
LEAST_ROWS = 5
"""From here on faster than tiles, of which 4 rows are the largest."""
PAIR = 2
"""Blocks that rows meet at once: what is loaded of a row serves twice. 16 registers of weights, 8 of sums."""
_ROWS_AT_ONCE = 4
_QUAD_BYTES = BLOCK_OUTPUTS * 4
_LINE_BYTES = 64
_FLOAT_START, _START_BITS = 12582912.0, 0x4B400000


def has_many(instruction_set: InstructionSet) -> bool:
    """Where it pays: 16 outputs a vector, and registers for a group's weights beside the sums."""
    return instruction_set is InstructionSet.AVX512_VNNI


def many_function(module: ir.Module, kind: WeightKind, instruction_set: InstructionSet, num_blocks: int) -> ir.Function:
    """Of `BlockArguments`, for 1 to MOST_ROWS rows and this many neighbouring blocks."""

    def emit(builder: ir.IRBuilder, arguments: BlockArguments) -> None:
        _emit_many(builder, kind, instruction_set, num_blocks, arguments)

    return block_function(module, ("weir_many", kind, instruction_set, num_blocks), emit)


@dataclass(frozen=True, slots=True)
class _Group:
    """What every row meets: unpacked weights by quad, scales; of 4-bit weights minima and -1.5 * 2**23 * scales."""

    weights: list[tuple[ir.Value, ...]]
    scale: ir.Value
    minimum: ir.Value | None
    shift: ir.Value | None


def _emit_many(
    builder: ir.IRBuilder,
    kind: WeightKind,
    instruction_set: InstructionSet,
    num_blocks: int,
    arguments: BlockArguments,
) -> None:
    dot, num_rows, row_stride = dot_product(instruction_set, kind), arguments.num_rows, arguments.row_stride
    zero = emit_constant(vector_type(dot.width), 0.0)
    sums = builder.ptrtoint(cgutils.alloca_once(builder, zero.type, size=MOST_ROWS * num_blocks), INT64)

    def sum_of(row: ir.Value, block: int) -> ir.Value:
        return offset(builder, at(builder, sums, row, num_blocks * _LINE_BYTES), block * _LINE_BYTES)

    with cgutils.for_range(builder, num_rows, intp=INT64) as loop:
        emit_prefetch_for_write(builder, builder.add(arguments.out, builder.mul(loop.index, arguments.out_stride)))
        for block in range(num_blocks):
            emit_store(builder, zero, sum_of(loop.index, block))
    with cgutils.for_range(builder, arguments.num_groups, intp=INT64) as loop:
        first = at(builder, arguments.weights, loop.index, group_bytes(kind))
        block_bytes = builder.mul(arguments.num_groups, emit_index(group_bytes(kind)))
        places = [builder.add(first, builder.mul(block_bytes, emit_index(block))) for block in range(num_blocks)]
        for place in places:
            emit_prefetches(builder, kind, builder.add(place, builder.mul(block_bytes, emit_index(num_blocks))))
        groups = [_emit_unpacked(builder, kind, instruction_set, place) for place in places]
        records = at(builder, arguments.rows, loop.index, RECORD_BYTES)

        def meet(count: int) -> Callable[[ir.Value, Values], Values]:
            def body(row: ir.Value, _: Values) -> Values:
                numbers = [builder.add(row, emit_index(number)) for number in range(count)]
                rows = [builder.add(records, builder.mul(number, row_stride)) for number in numbers]
                row_sums = [[sum_of(number, block) for block in range(num_blocks)] for number in numbers]
                _emit_rows(builder, dot, groups, rows, row_sums)
                return []

            return body

        whole = builder.and_(num_rows, emit_index(-_ROWS_AT_ONCE))
        emit_loop(builder, emit_index(0), whole, _ROWS_AT_ONCE, [], meet(_ROWS_AT_ONCE))
        emit_loop(builder, whole, num_rows, 1, [], meet(1))
    with cgutils.for_range(builder, num_rows, intp=INT64) as loop:
        for block in range(num_blocks):
            value = emit_load(builder, sum_of(loop.index, block), dot.width)
            emit_result(builder, arguments, loop.index, emit_index(block * BLOCK_OUTPUTS), value)


def emit_prefetches(builder: ir.IRBuilder, kind: WeightKind, group: ir.Value) -> None:
    """Of the blocks after these: by themselves caches fetch ahead along one stream, and these are as many as blocks,
    each as short as a block."""
    for line in range(0, group_bytes(kind), _LINE_BYTES):
        emit_prefetch(builder, offset(builder, group, line))


def _emit_unpacked(builder: ir.IRBuilder, kind: WeightKind, instruction_set: InstructionSet, group: ir.Value) -> _Group:
    dot = dot_product(instruction_set, kind)
    weights: list[tuple[ir.Value, ...]] = []
    for address in range(SCALES_BYTES, group_bytes(kind), _QUAD_BYTES):
        stored = emit_load_lanes(builder, offset(builder, group, address), dot.width, _LINE_BYTES)
        weights += dot.prepare(builder, stored)
    scale, minimum = emit_scales(builder, kind, instruction_set, group, emit_index(0))
    shift = None if minimum is None else builder.fmul(scale, emit_constant(scale.type, -_FLOAT_START))
    return _Group(weights, scale, minimum, shift)


def _emit_rows(
    builder: ir.IRBuilder, dot: DotProduct, groups: list[_Group], records: list[ir.Value], sums: list[list[ir.Value]]
) -> None:
    """Adds what a group of each block gives to the sums [rows][blocks] of some rows."""
    width, starts_as_float = dot.width, groups[0].shift is not None

    def splat(record: ir.Value, num_bytes: int, element: ir.Type) -> ir.Value:
        return emit_load_splat(builder, offset(builder, record, num_bytes), element, width)

    def first_of(record: ir.Value) -> ir.Value:
        start_bits = emit_int_constant(int_vector(width), _START_BITS)
        return start_bits if starts_as_float else splat(record, CORRECTION_OFFSET, INT32)

    firsts = [first_of(record) for record in records]
    totals = [[dot.start(builder, first) for _ in groups] for first in firsts]
    for quad in range(GROUP // 4):
        for record, row_totals in zip(records, totals, strict=True):
            values = splat(record, 4 * quad, INT32)
            for block, group in enumerate(groups):
                row_totals[block] = dot.add(builder, row_totals[block], group.weights[quad], values)
    for record, first, row_totals, row_sums in zip(records, firsts, totals, sums, strict=True):
        row_scale = splat(record, SCALE_OFFSET, FLOAT)
        for group, total, place in zip(groups, row_totals, row_sums, strict=True):
            value = dot.finish(builder, total, first)
            if group.shift is None:
                scaled = builder.fmul(builder.sitofp(value, vector_type(width)), group.scale)
            else:
                scaled = emit_fma(builder, builder.bitcast(value, vector_type(width)), group.scale, group.shift)
            result = emit_fma(builder, scaled, row_scale, emit_load(builder, place, width))
            if group.minimum is not None:
                result = emit_fma(builder, group.minimum, splat(record, SCALED_SUM_OFFSET, FLOAT), result)
            emit_store(builder, result, place)
