"""AMX as LLVM IR: eight tiles, registers of at most 16 rows of 64 bytes, and exact products of signed bytes.

A tile is a number in an instruction, and its size belongs to the thread (`emit_configure`). A product adds to tile c
[m, n] of int32 the tile a [m, 4 k] of int8 times b [k, n, 4]: row i of b holds inputs 4 i … 4 i + 3 of n outputs, which
is the order in which `weir.ops.cpu.linear_pack` stores weights.

Source: Intel, "Architecture Instruction Set Extensions", chapter 3. This module needs neither numba nor a processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

TILE_ROWS = 16
TILE_ROW_BYTES = 64
NUM_TILES = 8
_CONFIG_BYTES, _ROW_BYTES_AT, _ROWS_AT = 64, 16, 48
_PALETTE = 1
_INT8, _INT16, _INT64 = (ir.IntType(bits) for bits in (8, 16, 64))
_POINTER = _INT8.as_pointer()


@dataclass(frozen=True, slots=True)
class TileSize:
    """`num_rows` i64 in 1 … 16: with 0 the whole configuration is refused."""

    num_rows: ir.Value
    row_bytes: int


def emit_configure(builder: ir.IRBuilder, tiles: Sequence[TileSize]) -> None:
    """Gives this thread's tiles their sizes, from tile 0 on; others have none. All become zero."""
    with builder.goto_entry_block():
        memory = builder.alloca(_INT8, _CONFIG_BYTES)
        memory.align = _CONFIG_BYTES
    fields = ir.ArrayType(_INT8, _CONFIG_BYTES)
    builder.store(ir.Constant(fields, None), builder.bitcast(memory, fields.as_pointer()))
    builder.store(ir.Constant(_INT8, _PALETTE), memory)
    for number, tile in enumerate(tiles):
        row_bytes = builder.gep(memory, [ir.Constant(_INT64, _ROW_BYTES_AT + 2 * number)])
        builder.store(ir.Constant(_INT16, tile.row_bytes), builder.bitcast(row_bytes, _INT16.as_pointer()))
        builder.store(
            builder.trunc(tile.num_rows, _INT8), builder.gep(memory, [ir.Constant(_INT64, _ROWS_AT + number)])
        )
    _emit_call(builder, "ldtilecfg", [memory])


def emit_release(builder: ir.IRBuilder) -> None:
    """This thread's tiles hold nothing any more: a switch of threads saves none, and the core may rest them."""
    _emit_call(builder, "tilerelease", [])


def emit_zero(builder: ir.IRBuilder, tile: int) -> None:
    """Every element of `tile` becomes 0."""
    _emit_call(builder, "tilezero", [_tile(tile)])


def emit_load_tile(builder: ir.IRBuilder, tile: int, address: ir.Value, stride: ir.Value) -> None:
    """Its rows, from an address on (i64), `stride` (i64) bytes apart. Not more than its size is read."""
    _emit_call(builder, "tileloadd64", [_tile(tile), builder.inttoptr(address, _POINTER), stride])


def emit_store_tile(builder: ir.IRBuilder, tile: int, address: ir.Value, stride: ir.Value) -> None:
    """The opposite of `emit_load_tile`."""
    _emit_call(builder, "tilestored64", [_tile(tile), builder.inttoptr(address, _POINTER), stride])


def emit_add_product(builder: ir.IRBuilder, total: int, left: int, right: int) -> None:
    """Tile `total` += `left` times `right`, three different ones, whose bytes are both signed."""
    _emit_call(builder, "tdpbssd", [_tile(total), _tile(left), _tile(right)])


def _tile(number: int) -> ir.Constant:
    if not 0 <= number < NUM_TILES:
        raise ValueError(f"tile {number}; there are 0 ... {NUM_TILES - 1}")
    return ir.Constant(_INT8, number)


def _emit_call(builder: ir.IRBuilder, name: str, arguments: list[ir.Value]) -> None:
    name = f"llvm.x86.{name}"
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = ir.Function(builder.module, kind, name)
    builder.call(function, arguments)
