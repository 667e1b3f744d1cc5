"""Tiles of 16 rows times blocks of 16 outputs, as LLVM IR: AMX tiles multiply, vectors scale and add.

    for each block, its weights as signed bytes [groups][8, 16, 4]
        for each 16 rows
            for each group of 32 inputs: a tile of weights [8, 16, 4], one of rows [16, 32], one of totals [16, 16]

A block's weights are laid out as signed bytes once for all rows: 4-bit ones are as they are, 8-bit ones lose the 128
that is added to them where they are stored. So totals are those of `weir.ops.cpu.linear_tile` without a correction;
they are exact, and what is done with them is done in its order: the bits are the same. The 16 rows' sums stay in
registers through all groups. Totals reach vectors through the first cache, two groups after they were asked for.
"""

from llvmlite import ir
from numba.core import cgutils

from weir.ops.cpu.linear_many import emit_prefetches
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, SCALES_BYTES, WeightKind, group_bytes
from weir.ops.cpu.linear_tile import (
    BlockArguments,
    at,
    block_function,
    emit_group_added,
    emit_result,
    emit_scales,
    from_row,
    offset,
)
from weir.ops.cpu.quantized_rows import GROUP, RECORD_BYTES
from weir.ops.simd.amx import (
    TILE_ROW_BYTES,
    TILE_ROWS,
    TileSize,
    emit_add_product,
    emit_configure,
    emit_load_tile,
    emit_store_tile,
    emit_zero,
)
from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import INT64, emit_constant, emit_store, vector_type
from weir.ops.simd.integer import (
    emit_int_constant,
    emit_load_lanes,
    emit_nibbles,
    emit_prefetch_for_write,
    int_vector,
)
from weir.ops.simd.loops import Values, emit_index, emit_loop

MOST_AMX_ROWS = 128
"""Of a call: they share a block's unpacked weights, and their records stay in the second cache."""
_LANES = BLOCK_OUTPUTS
_LINE_BYTES = 64
_TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
_QUADS = GROUP // 4
_UNPACKED_BYTES = GROUP * BLOCK_OUTPUTS
_STORED_128 = -0x7F7F7F80  # 0x80 in every byte: turns integer + 128 into a signed byte
_VECTORS = InstructionSet.AMX.vectors
_TOTALS, _ROWS, _WEIGHTS = range(3)
_AHEAD = 2
_NUM_TURNS = 4
"""A group's totals lie in the buffer of its number modulo this, a power of two above `_AHEAD`."""


def emit_configure_tiles(builder: ir.IRBuilder) -> None:
    """For calls of `amx_function`, of this thread, until `emit_release`."""
    sizes = (TILE_ROWS, TILE_ROW_BYTES), (TILE_ROWS, GROUP), (_QUADS, TILE_ROW_BYTES)  # by the tiles' numbers
    emit_configure(builder, [TileSize(emit_index(num_rows), row_bytes) for num_rows, row_bytes in sizes])


def amx_function(module: ir.Module, kind: WeightKind) -> ir.Function:
    """Of `BlockArguments`, for one block and 16, 32, … MOST_AMX_ROWS rows. Tiles must be configured."""

    def emit(builder: ir.IRBuilder, arguments: BlockArguments) -> None:
        unpacked = _emit_unpacked(builder, kind, arguments)

        def body(row: ir.Value, _: Values) -> Values:
            _AmxTile(builder, kind, from_row(builder, arguments, row), unpacked).emit()
            return []

        emit_loop(builder, emit_index(0), arguments.num_rows, TILE_ROWS, [], body)

    return block_function(module, ("weir_amx", kind), emit)


def _emit_unpacked(builder: ir.IRBuilder, kind: WeightKind, arguments: BlockArguments) -> ir.Value:
    """Where a block's weights now lie as signed bytes [groups][8, 16, 4], until the function returns."""
    lines = builder.alloca(int_vector(_LANES), builder.mul(arguments.num_groups, emit_index(_QUADS)))
    lines.align = _LINE_BYTES
    unpacked = builder.ptrtoint(lines, INT64)
    block_bytes = builder.mul(arguments.num_groups, emit_index(group_bytes(kind)))
    with cgutils.for_range(builder, arguments.num_groups, intp=INT64) as loop:
        group = at(builder, arguments.weights, loop.index, group_bytes(kind))
        emit_prefetches(builder, kind, builder.add(group, block_bytes))
        to, quads = at(builder, unpacked, loop.index, _UNPACKED_BYTES), 0
        for address in range(SCALES_BYTES, group_bytes(kind), _LINE_BYTES):
            stored = emit_load_lanes(builder, offset(builder, group, address), _LANES, _LINE_BYTES)
            if kind is WeightKind.INT4:
                parts = [*emit_nibbles(builder, stored)]
            else:
                parts = [builder.xor(stored, emit_int_constant(stored.type, _STORED_128))]
            for part in parts:
                emit_store(builder, part, offset(builder, to, quads * _LINE_BYTES))
                quads += 1
    return unpacked


class _AmxTile:
    """Emits 16 rows times a block, whose weights are also at `unpacked`."""

    def __init__(self, builder: ir.IRBuilder, kind: WeightKind, arguments: BlockArguments, unpacked: ir.Value) -> None:
        self._builder, self._kind, self._arguments, self._unpacked = builder, kind, arguments, unpacked
        lines = cgutils.alloca_once(builder, int_vector(_LANES), size=_NUM_TURNS * TILE_ROWS)
        lines.align = _LINE_BYTES
        self._totals = builder.ptrtoint(lines, INT64)

    def emit(self) -> None:
        builder, arguments = self._builder, self._arguments
        for row in range(TILE_ROWS):
            emit_prefetch_for_write(builder, at(builder, arguments.out, arguments.out_stride, row))
        for group in range(_AHEAD):
            self._emit_multiply_if_there(emit_index(group))
        zeros = [emit_constant(vector_type(_LANES), 0.0)] * TILE_ROWS

        def body(group: ir.Value, sums: Values) -> Values:
            self._emit_multiply_if_there(builder.add(group, emit_index(_AHEAD)))
            return self._emit_added(group, sums)

        for row, value in enumerate(emit_loop(builder, emit_index(0), arguments.num_groups, 1, zeros, body)):
            emit_result(builder, arguments, emit_index(row), emit_index(0), value)

    def _emit_multiply_if_there(self, group: ir.Value) -> None:
        """Totals of a group, unless it is behind the last."""
        builder, arguments = self._builder, self._arguments
        with builder.if_then(builder.icmp_signed("<", group, arguments.num_groups), likely=True):
            line = emit_index(_LINE_BYTES)
            emit_load_tile(builder, _WEIGHTS, at(builder, self._unpacked, group, _UNPACKED_BYTES), line)
            emit_load_tile(builder, _ROWS, at(builder, arguments.rows, group, RECORD_BYTES), arguments.row_stride)
            emit_zero(builder, _TOTALS)
            emit_add_product(builder, _TOTALS, _ROWS, _WEIGHTS)
            emit_store_tile(builder, _TOTALS, self._totals_of(group), line)

    def _emit_added(self, group: ir.Value, sums: Values) -> Values:
        """The sums after one more group, whose totals are there."""
        builder, arguments = self._builder, self._arguments
        place = at(builder, arguments.weights, group, group_bytes(self._kind))
        scales = emit_scales(builder, self._kind, _VECTORS, place, emit_index(0))
        records, totals = at(builder, arguments.rows, group, RECORD_BYTES), self._totals_of(group)
        results = []
        for row, value in enumerate(sums):
            pointer = builder.inttoptr(offset(builder, totals, row * _LINE_BYTES), int_vector(_LANES).as_pointer())
            total = builder.load(pointer, align=_LINE_BYTES)
            record = at(builder, records, arguments.row_stride, row)
            results.append(emit_group_added(builder, total, *scales, record, value))
        return results

    def _totals_of(self, group: ir.Value) -> ir.Value:
        turn = self._builder.and_(group, emit_index(_NUM_TURNS - 1))
        return at(self._builder, self._totals, turn, _TILE_BYTES)
