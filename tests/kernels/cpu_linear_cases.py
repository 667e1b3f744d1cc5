"""Matrices, rows and expected products for the tests of the CPU's linear layers."""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from tests.kernels.whole_ops import dequantized

from weir.ops.cpu.linear_block import make_blocks, most_tile_rows
from weir.ops.cpu.linear_pack import (
    PackedMatrix,
    WeightKind,
    block_bytes,
    pack_q4_1,
    pack_q8_0,
)
from weir.ops.cpu.quantized_rows import GROUP, empty_rows, num_groups_of, records_of
from weir.ops.simd.features import InstructionSet, available_instruction_sets

INSTRUCTION_SETS = available_instruction_sets()
KINDS = tuple(WeightKind)


def make_rows(values: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantized rows of `values` [m, k] and `scales` [m, k / 32], written without the kernels under test."""
    num_rows, num_inputs = values.shape
    rows = empty_rows(num_rows, num_inputs)
    records = records_of(rows)
    records["values"] = values.reshape(num_rows, -1, GROUP)
    sums = records["values"].astype(np.int32).sum(axis=-1)
    records["scale"] = scales
    records["scaled_sum"] = scales * sums.astype(np.float32)
    records["correction"] = -128 * sums
    return rows


def make_matrix(
    kind: WeightKind,
    quants: NDArray[np.integer],
    scales: NDArray[np.floating],
    minima: NDArray[np.floating],
) -> tuple[PackedMatrix, NDArray[np.float64]]:
    """The packed matrix and what it stands for; 8-bit ones ignore `minima`."""
    grouped = quants.astype(np.float64).reshape(*scales.shape, GROUP) * scales[..., None].astype(np.float64)
    if kind is WeightKind.INT8:
        return pack_q8_0(quants.astype(np.int8), scales), grouped.reshape(quants.shape)
    matrix = pack_q4_1(quants.astype(np.uint8), scales, minima)
    return matrix, (grouped + minima[..., None].astype(np.float64)).reshape(quants.shape)


def random_quants(random: np.random.Generator, kind: WeightKind, shape: tuple[int, int]) -> NDArray[np.integer]:
    """All values that weights of a kind can have."""
    return random.integers(0, 16, shape) if kind is WeightKind.INT4 else random.integers(-127, 128, shape)


def random_case(
    random: np.random.Generator, kind: WeightKind, num_rows: int, num_outputs: int, num_inputs: int
) -> tuple[NDArray[np.uint8], PackedMatrix, NDArray[np.float64], NDArray[np.float64]]:
    """Rows, matrix, and both as floats: scales over some orders of magnitude, as real models have them."""
    groups = num_groups_of(num_inputs)
    scales = (10.0 ** random.uniform(-3, 0, (num_outputs, groups))).astype(np.float16)
    minima = (scales.astype(np.float32) * random.uniform(-9, -5, scales.shape)).astype(np.float16)
    quants = random_quants(random, kind, (num_outputs, num_inputs))
    matrix, weights = make_matrix(kind, quants, scales, minima)
    values = random.integers(-127, 128, (num_rows, num_inputs)).astype(np.int8)
    row_scales = (10.0 ** random.uniform(-3, 2, (num_rows, groups))).astype(np.float32)
    rows = make_rows(values, row_scales)
    return rows, matrix, dequantized(rows), weights


class LinearLayers:
    """Both kinds of linear layer in one instruction set, whichever `weir.ops` has chosen for this process."""

    def __init__(self, instruction_set: InstructionSet) -> None:
        most_rows = most_tile_rows(instruction_set)
        self._drivers = {kind: _driver(make_blocks(kind, instruction_set), most_rows) for kind in KINDS}

    def __call__(
        self, rows: NDArray[np.uint8], matrix: PackedMatrix, out: NDArray[np.float32] | None = None, added: int = 0
    ) -> NDArray[np.float32]:
        if out is None:
            out = np.full((len(rows), matrix.num_outputs), np.nan, dtype=np.float32)
        stride = block_bytes(matrix.kind, matrix.num_inputs)
        self._drivers[matrix.kind](rows, matrix.data, out, num_groups_of(matrix.num_inputs), stride, added)
        return out


def _driver(blocks: Any, most_rows: int) -> Any:
    def run(
        rows: NDArray[np.uint8],
        data: NDArray[np.uint8],
        out: NDArray[np.float32],
        num_groups: int,
        stride: int,
        added: int,
    ) -> None:
        num_rows, num_outputs = out.shape
        for first in range(0, num_rows, most_rows):
            blocks(
                data.size // stride,
                data.ctypes.data,
                num_groups,
                rows.ctypes.data + first * rows.shape[1],
                rows.shape[1],
                min(most_rows, num_rows - first),
                out.ctypes.data + first * 4 * num_outputs,
                4 * num_outputs,
                num_outputs,
                added,
            )

    # not through the cache on disk, whose key does not know for which instruction set `blocks` emits code
    return numba.njit(nogil=True)(run)
