"""Linear layers in every instruction set that runs here, side by side, on one thread with weights in the cache.

Where AMX runs, how fast its products are with nothing around them stands beneath.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from benchmarks.kernels.linear import fastest_us, random_matrix
from weir.ops.cpu.linear import linear_range_in
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, WeightKind
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
    drivers = _drivers()
    speeds = tuple(speed for kind in WeightKind for speed in _speeds(drivers, kind, num_rows, seconds))
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


def _drivers() -> dict[str, Callable[..., None]]:
    return {one.value: linear_range_in(one) for one in available_instruction_sets()}


def _speeds(
    drivers: Mapping[str, Callable[..., None]], kind: WeightKind, row_counts: Sequence[int], seconds: float
) -> Iterator[SetSpeed]:
    matrix, random = random_matrix(kind, NUM_OUTPUTS, NUM_INPUTS), np.random.default_rng(0)
    num_blocks = NUM_OUTPUTS // BLOCK_OUTPUTS
    cases: dict[tuple[str, int], Callable[[], None]] = {}
    for (name, driver), num_rows in itertools.product(drivers.items(), row_counts):
        rows = quantize_rows(random.standard_normal((num_rows, NUM_INPUTS)).astype(np.float32))
        out = np.empty((num_rows, NUM_OUTPUTS), np.float32)
        cases[name, num_rows] = partial(driver, rows, matrix.data, int(kind), out, False, 0, num_blocks)
    for call in cases.values():
        call()  # the first one compiles
    fastest = fastest_us(*([call] for call in cases.values()), seconds=seconds)
    for (name, num_rows), call_us in zip(cases, fastest, strict=True):
        yield SetSpeed(name, kind, num_rows, num_rows * NUM_INPUTS * NUM_OUTPUTS / call_us / 1e3)


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
