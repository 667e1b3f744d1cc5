"""Linear layers in every instruction set that runs here, side by side, on one thread with weights in the cache.

Where AMX runs it has two lines: as it serves, and with tiles for any number of rows, which tells from how many on they
pay; and beneath, how fast its products are with nothing around them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.cpu.linear_block import make_blocks, most_tile_rows
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, PackedMatrix, WeightKind, block_bytes, pack_q4_1, pack_q8_0
from weir.ops.cpu.quantize import quantize_rows
from weir.ops.cpu.quantized_rows import GROUP
from weir.ops.simd.amx import (
    NUM_TILES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TileSize,
    emit_add_product,
    emit_configure,
    emit_release,
    emit_zero,
)
from weir.ops.simd.features import InstructionSet, available_instruction_sets
from weir.ops.simd.jit import simd

NUM_INPUTS, NUM_OUTPUTS = 576, 3072
NUM_ROWS = (1, 4, 8, 12, 16, 20, 24, 32, 128)
SECONDS = 4.0
NUM_PRODUCTS = 100_000
_LEAST_ROUNDS = 3
_SPAN_BYTES = 128 << 10
_TOTALS, _LEFT, _RIGHT = 4, (4, 5), (6, 7)


@dataclass(frozen=True, slots=True)
class SetSpeed:
    """Multiply-adds a second of a layer of 576 inputs and 3072 outputs, the fastest of some rounds."""

    name: str
    kind: WeightKind
    num_rows: int
    gmac_s: float


@dataclass(frozen=True, slots=True)
class InstructionSetReport:
    """`tiles_gmac_s`: of products of tiles alone, by how many inputs they have. Empty without AMX."""

    speeds: tuple[SetSpeed, ...]
    tiles_gmac_s: dict[int, float]


def measure(
    num_rows: Sequence[int] = NUM_ROWS, seconds: float = SECONDS, num_products: int = NUM_PRODUCTS
) -> InstructionSetReport:
    """For `seconds` a kind of weights; compiles for ten more."""
    speeds = tuple(speed for kind in WeightKind for speed in _speeds(kind, num_rows, seconds))
    inputs = (GROUP, TILE_ROW_BYTES) if InstructionSet.AMX in available_instruction_sets() else ()
    return InstructionSetReport(speeds, {number: _tiles_gmac_s(number, num_products) for number in inputs})


def as_lines(report: InstructionSetReport) -> list[str]:
    """A table in plain text: a line a kind and set."""
    num_rows = dict.fromkeys(speed.num_rows for speed in report.speeds)
    lines = [f"{'GMAC/s, rows:':>30} " + " ".join(f"{rows:5}" for rows in num_rows)]
    for (kind, name), speeds in itertools.groupby(report.speeds, lambda speed: (speed.kind, speed.name)):
        layer = f"{NUM_INPUTS} to {NUM_OUTPUTS} {kind}b {name}"
        lines.append(f"{layer:>30} " + " ".join(f"{speed.gmac_s:5.0f}" for speed in speeds))
    lines += [f"products of tiles alone, {inputs} inputs: {speed:.0f}" for inputs, speed in report.tiles_gmac_s.items()]
    return lines


def _speeds(kind: WeightKind, row_counts: Sequence[int], seconds: float) -> Iterator[SetSpeed]:
    matrix, random = _matrix(kind), np.random.default_rng(0)
    drivers: dict[str, Any] = {one.value: _driver(kind, one) for one in available_instruction_sets()}
    if InstructionSet.AMX in drivers:
        drivers["amx, any rows"] = _driver(kind, InstructionSet.AMX, least_amx_rows=1)
    cases: dict[tuple[str, int], Callable[[], None]] = {}
    for (name, driver), num_rows in itertools.product(drivers.items(), row_counts):
        rows = quantize_rows(random.standard_normal((num_rows, NUM_INPUTS)).astype(np.float32))
        cases[name, num_rows] = partial(driver, rows, matrix.data, np.empty((num_rows, NUM_OUTPUTS), np.float32))
    for (name, num_rows), fastest_s in _fastest(cases, seconds).items():
        yield SetSpeed(name, kind, num_rows, num_rows * NUM_INPUTS * NUM_OUTPUTS / fastest_s / 1e9)


def _fastest(cases: dict[tuple[str, int], Callable[[], None]], seconds: float) -> dict[tuple[str, int], float]:
    """Seconds of each call, the fastest of some rounds; they take turns."""
    fastest = dict.fromkeys(cases, float("inf"))
    for call in cases.values():
        call()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        rounds += 1
        for case, call in cases.items():
            start = time.perf_counter()
            call()
            fastest[case] = min(fastest[case], time.perf_counter() - start)
    return fastest


def _matrix(kind: WeightKind) -> PackedMatrix:
    random, shape = np.random.default_rng(1), (NUM_OUTPUTS, NUM_INPUTS)
    scales = random.uniform(0.01, 0.02, (NUM_OUTPUTS, NUM_INPUTS // GROUP)).astype(np.float16)
    if kind is WeightKind.INT8:
        return pack_q8_0(random.integers(-127, 128, shape).astype(np.int8), scales)
    return pack_q4_1(random.integers(0, 16, shape).astype(np.uint8), scales, -8 * scales)


def _driver(kind: WeightKind, instruction_set: InstructionSet, **options: int) -> Any:
    """Takes rows, packed weights and results, in the order in which `weir.ops.cpu.linear_range` has them."""
    blocks, block_size = make_blocks(kind, instruction_set, **options), block_bytes(kind, NUM_INPUTS)
    span, tile_rows = max(1, _SPAN_BYTES // block_size), most_tile_rows(instruction_set)
    num_groups, num_blocks = NUM_INPUTS // GROUP, NUM_OUTPUTS // BLOCK_OUTPUTS

    def run(rows: Any, data: Any, out: Any) -> None:
        num_rows, row_stride, out_stride = len(rows), rows.shape[1], 4 * NUM_OUTPUTS
        for start in range(0, num_blocks, span):
            for row in range(0, num_rows, tile_rows):
                blocks(
                    min(span, num_blocks - start),
                    data.ctypes.data + start * block_size,
                    num_groups,
                    rows.ctypes.data + row * row_stride,
                    row_stride,
                    min(tile_rows, num_rows - row),
                    out.ctypes.data + row * out_stride + start * 4 * BLOCK_OUTPUTS,
                    out_stride,
                    NUM_OUTPUTS - start * BLOCK_OUTPUTS,
                    0,
                )

    # not through the cache on disk, whose key does not know for which instruction set `blocks` emits code
    return numba.njit(nogil=True)(run)


def _tiles_gmac_s(num_inputs: int, num_products: int) -> float:
    """Four sums of products [16, inputs] times [inputs, 16] run on, on one thread."""
    products = _make_products(num_inputs)

    def loop(count: int) -> None:
        products(count)

    run: Callable[[int], None] = numba.njit(loop)
    run(1)
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        run(num_products)
        seconds.append(time.perf_counter() - start)
    return _TOTALS * num_products * TILE_ROWS * TILE_ROWS * num_inputs / min(seconds) / 1e9


def _make_products(num_inputs: int) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        sixteen = ir.Constant(ir.IntType(64), TILE_ROWS)
        totals, left = TileSize(sixteen, 64), TileSize(sixteen, num_inputs)
        right = TileSize(ir.Constant(ir.IntType(64), num_inputs // 4), 64)
        emit_configure(builder, [totals] * _TOTALS + [left] * len(_LEFT) + [right] * len(_RIGHT))
        for tile in range(NUM_TILES):
            emit_zero(builder, tile)
        with cgutils.for_range(builder, values[0], intp=ir.IntType(64)):
            for total, (left_tile, right_tile) in enumerate(itertools.product(_LEFT, _RIGHT)):
                emit_add_product(builder, total, left_tile, right_tile)
        emit_release(builder)
        return context.get_dummy_value()

    def products(typing_context: Any, count: Any) -> Any:
        return types.void(types.int64), codegen

    return simd(products)
