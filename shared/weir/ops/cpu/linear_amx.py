"""16 rows and more times one or two blocks of 16 outputs, as LLVM IR: AMX tiles multiply, vectors scale and add.

    for each group of 32 inputs: two tiles of weights [8, 16, 4], two of rows [16, 32], four of totals [16, 16]

A group's weights are laid out as signed bytes once for all rows: 4-bit ones are as they are, 8-bit ones lose the 128
that is added to them where they are stored. So totals are those of `weir.ops.cpu.linear_tile` without a correction;
they are exact, and what is done with them is done in its order: the bits are the same.

Totals of one group are computed while those of the group before are scaled and added: tiles and vectors are different
parts of a core, and the way from a tile to a vector leads through the first cache.
"""

from llvmlite import ir
from numba.core import cgutils

from weir.ops.cpu.linear_many import MOST_ROWS, PAIR, emit_prefetches
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, SCALES_BYTES, WeightKind, group_bytes
from weir.ops.cpu.linear_tile import (
    BlockArguments,
    at,
    block_function,
    emit_group_added,
    emit_result,
    emit_scales,
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
from weir.ops.simd.float import INT64, emit_constant, emit_load, emit_store, vector_type
from weir.ops.simd.integer import (
    emit_int_constant,
    emit_load_lanes,
    emit_nibbles,
    emit_prefetch_for_write,
    int_vector,
)
from weir.ops.simd.loops import emit_index

LEAST_AMX_ROWS = TILE_ROWS
"""From here on instead of vectors: a tile's rows. Not measured, see ADR 0053."""
_LANES = BLOCK_OUTPUTS
_LINE_BYTES = 64
_QUADS = GROUP // 4
_STORED_128 = -0x7F7F7F80  # 0x80 in every byte: turns integer + 128 into a signed byte
_VECTORS = InstructionSet.AMX.vectors
_NUM_HALVES = MOST_ROWS // TILE_ROWS


def _totals_tile(half: int, block: int) -> int:
    return PAIR * half + block


def _rows_tile(half: int) -> int:
    return PAIR * _NUM_HALVES + half


def _weights_tile(block: int) -> int:
    return PAIR * _NUM_HALVES + _NUM_HALVES + block


def emit_configure_tiles(builder: ir.IRBuilder, num_rows: ir.Value) -> None:
    """For calls of `amx_function` with `num_rows` (i64), of this thread, until `emit_release`."""
    rows = [_rows_of_half(builder, num_rows, half) for half in range(_NUM_HALVES)]
    totals = [TileSize(rows[half], TILE_ROW_BYTES) for half in range(_NUM_HALVES) for _ in range(PAIR)]
    records = [TileSize(num, GROUP) for num in rows]
    weights = [TileSize(emit_index(_QUADS), TILE_ROW_BYTES)] * PAIR
    emit_configure(builder, [*totals, *records, *weights])


def _rows_of_half(builder: ir.IRBuilder, num_rows: ir.Value, half: int) -> ir.Value:
    """At least 1, at most 16."""
    value = builder.sub(num_rows, emit_index(half * TILE_ROWS))
    for predicate, bound in ((">", 1), ("<", TILE_ROWS)):
        value = builder.select(builder.icmp_signed(predicate, value, emit_index(bound)), value, emit_index(bound))
    return value


def amx_function(module: ir.Module, kind: WeightKind, num_blocks: int) -> ir.Function:
    """Of `BlockArguments`, for 1 to MOST_ROWS rows and one or two neighbouring blocks. Tiles must be configured."""

    def emit(builder: ir.IRBuilder, arguments: BlockArguments) -> None:
        _AmxProduct(builder, kind, num_blocks, arguments).emit()

    return block_function(module, ("weir_amx", kind, num_blocks), emit)


class _AmxProduct:
    """Emits one function. Lines of 64 bytes [rows][blocks] are sums over groups, and twice a group's totals."""

    def __init__(self, builder: ir.IRBuilder, kind: WeightKind, num_blocks: int, arguments: BlockArguments) -> None:
        self._builder, self._kind, self._num_blocks, self._arguments = builder, kind, num_blocks, arguments
        self._line_stride = num_blocks * _LINE_BYTES
        self._block_bytes = builder.mul(arguments.num_groups, emit_index(group_bytes(kind)))
        self._sums = self._allocate(MOST_ROWS * num_blocks)
        self._totals = self._allocate(2 * MOST_ROWS * num_blocks)
        self._weights = self._allocate(_QUADS * num_blocks)

    def emit(self) -> None:
        builder, arguments = self._builder, self._arguments
        zero = emit_constant(vector_type(_LANES), 0.0)
        with cgutils.for_range(builder, arguments.num_rows, intp=INT64) as loop:
            emit_prefetch_for_write(builder, builder.add(arguments.out, builder.mul(loop.index, arguments.out_stride)))
            for block in range(self._num_blocks):
                emit_store(builder, zero, self._line(self._sums, loop.index, block))
        with cgutils.for_range(builder, builder.add(arguments.num_groups, emit_index(1)), intp=INT64) as loop:
            with builder.if_then(builder.icmp_signed("<", loop.index, arguments.num_groups), likely=True):
                self._emit_multiply(loop.index)
            with builder.if_then(builder.icmp_signed(">", loop.index, emit_index(0)), likely=True):
                self._emit_add(builder.sub(loop.index, emit_index(1)))
        with cgutils.for_range(builder, arguments.num_rows, intp=INT64) as loop:
            for block in range(self._num_blocks):
                value = emit_load(builder, self._line(self._sums, loop.index, block), _LANES)
                emit_result(builder, arguments, loop.index, emit_index(block * BLOCK_OUTPUTS), value)

    def _emit_multiply(self, group: ir.Value) -> None:
        """Totals of a group, all rows and blocks."""
        builder, arguments = self._builder, self._arguments
        line = emit_index(_LINE_BYTES)
        for block in range(self._num_blocks):
            place = self._group_at(group, block)
            emit_prefetches(
                builder, self._kind, builder.add(place, builder.mul(self._block_bytes, emit_index(self._num_blocks)))
            )
            unpacked = offset(builder, self._weights, block * _QUADS * _LINE_BYTES)
            self._emit_unpacked(place, unpacked)
            emit_load_tile(builder, _weights_tile(block), unpacked, line)
        records = at(builder, arguments.rows, group, RECORD_BYTES)
        self._emit_half(0, records, group)
        for half in range(1, _NUM_HALVES):
            first = emit_index(half * TILE_ROWS)
            with builder.if_then(builder.icmp_signed(">", arguments.num_rows, first)):
                self._emit_half(half, builder.add(records, builder.mul(first, arguments.row_stride)), group)

    def _emit_half(self, half: int, records: ir.Value, group: ir.Value) -> None:
        """Totals of up to 16 rows, whose records of the group are at `records`."""
        builder = self._builder
        emit_load_tile(builder, _rows_tile(half), records, self._arguments.row_stride)
        for block in range(self._num_blocks):
            emit_zero(builder, _totals_tile(half, block))
            emit_add_product(builder, _totals_tile(half, block), _rows_tile(half), _weights_tile(block))
        for block in range(self._num_blocks):
            place = self._line(self._totals_of(group), emit_index(half * TILE_ROWS), block)
            emit_store_tile(builder, _totals_tile(half, block), place, emit_index(self._line_stride))

    def _emit_unpacked(self, group: ir.Value, to: ir.Value) -> None:
        """Lays a group's weights out as signed bytes [8, 16, 4]."""
        builder, quads = self._builder, 0
        for address in range(SCALES_BYTES, group_bytes(self._kind), _LINE_BYTES):
            stored = emit_load_lanes(builder, offset(builder, group, address), _LANES, _LINE_BYTES)
            if self._kind is WeightKind.INT4:
                parts = [*emit_nibbles(builder, stored)]
            else:
                parts = [builder.xor(stored, emit_int_constant(stored.type, _STORED_128))]
            for part in parts:
                emit_store(builder, part, offset(builder, to, quads * _LINE_BYTES))
                quads += 1

    def _emit_add(self, group: ir.Value) -> None:
        """Scales a group's totals and adds them to the sums."""
        builder, arguments = self._builder, self._arguments
        scales = [
            emit_scales(builder, self._kind, _VECTORS, self._group_at(group, block), emit_index(0))
            for block in range(self._num_blocks)
        ]
        records, totals = at(builder, arguments.rows, group, RECORD_BYTES), self._totals_of(group)
        with cgutils.for_range(builder, arguments.num_rows, intp=INT64) as loop:
            record = builder.add(records, builder.mul(loop.index, arguments.row_stride))
            places = [self._line(self._sums, loop.index, block) for block in range(self._num_blocks)]
            results = [
                emit_group_added(
                    builder,
                    self._emit_load_total(self._line(totals, loop.index, block)),
                    *scales[block],
                    record,
                    emit_load(builder, place, _LANES),
                )
                for block, place in enumerate(places)
            ]
            # after both: what is loaded of a record then serves twice
            for place, result in zip(places, results, strict=True):
                emit_store(builder, result, place)

    def _emit_load_total(self, address: ir.Value) -> ir.Value:
        pointer = self._builder.inttoptr(address, int_vector(_LANES).as_pointer())
        return self._builder.load(pointer, align=_LINE_BYTES)

    def _allocate(self, num_lines: int) -> ir.Value:
        return self._builder.ptrtoint(cgutils.alloca_once(self._builder, int_vector(_LANES), size=num_lines), INT64)

    def _line(self, lines: ir.Value, row: ir.Value, block: int) -> ir.Value:
        return offset(self._builder, at(self._builder, lines, row, self._line_stride), block * _LINE_BYTES)

    def _totals_of(self, group: ir.Value) -> ir.Value:
        """Two groups take turns."""
        turn = self._builder.and_(group, emit_index(1))
        return at(self._builder, self._totals, turn, MOST_ROWS * self._line_stride)

    def _group_at(self, group: ir.Value, block: int) -> ir.Value:
        first = at(self._builder, self._arguments.weights, group, group_bytes(self._kind))
        return self._builder.add(first, self._builder.mul(self._block_bytes, emit_index(block)))
