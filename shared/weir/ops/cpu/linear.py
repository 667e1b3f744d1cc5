"""Linear layers on CPUs: quantized rows times packed weights.

`linear_range` serves one thread inside another kernel; `linear` spreads the blocks over numba's threads. Any split of
the blocks gives the same bits.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from weir.ops.cpu.linear_block import make_blocks, most_tile_rows
from weir.ops.cpu.linear_many import LEAST_ROWS, PAIR, has_many
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, SCALES_BYTES, PackedMatrix, WeightKind
from weir.ops.cpu.quantized_rows import GROUP, RECORD_BYTES, row_bytes
from weir.ops.simd.features import InstructionSet, instruction_set
from weir.ops.simd.jit import kernel, parallel_kernel

_SPAN_BYTES = 128 << 10
_TILE_ROWS = most_tile_rows(instruction_set())
_HAS_PAIRS = has_many(instruction_set().vectors)
_int4_blocks = make_blocks(WeightKind.INT4, instruction_set())
_int8_blocks = make_blocks(WeightKind.INT8, instruction_set())


@kernel
def linear_range(
    rows: NDArray[np.uint8],
    weights: NDArray[np.uint8],
    bits: int,
    out: NDArray[np.float32],
    is_added: Any,
    first_block: int,
    last_block: int,
) -> None:
    """Columns [16 * first_block, 16 * last_block) of `out` = rows @ weights.T, or of `out` += that if `is_added`.

    `rows` uint8 [m, row_bytes], `weights` `PackedMatrix.data`, `bits` its kind (4 or 8), `out` float32 [m, outputs],
    all contiguous; nothing is checked here.
    """
    num_rows, num_outputs = out.shape
    num_groups = rows.shape[1] // RECORD_BYTES
    block_bytes = num_groups * (SCALES_BYTES + GROUP * BLOCK_OUTPUTS // 8 * bits)
    # Several blocks for one tile of rows before the next tile: memory is read in long runs, and the other tiles find
    # the blocks in the second cache. Whole pairs, which are faster than single blocks.
    span = max(1, _SPAN_BYTES // (PAIR * block_bytes)) * PAIR
    row_stride, out_stride = rows.shape[1], num_outputs * 4
    added = 1 if is_added else 0
    for start in range(first_block, last_block, span):
        count = min(span, last_block - start)
        blocks_at = weights.ctypes.data + start * block_bytes
        left = num_outputs - start * BLOCK_OUTPUTS
        for row in range(0, num_rows, _TILE_ROWS):
            taken = min(_TILE_ROWS, num_rows - row)
            rows_at = rows.ctypes.data + row * row_stride
            out_at = out.ctypes.data + row * out_stride + start * (BLOCK_OUTPUTS * 4)
            if bits == 4:
                _int4_blocks(count, blocks_at, num_groups, rows_at, row_stride, taken, out_at, out_stride, left, added)
            else:
                _int8_blocks(count, blocks_at, num_groups, rows_at, row_stride, taken, out_at, out_stride, left, added)


def linear_range_in(chosen: InstructionSet) -> Callable[..., None]:
    """`linear_range` in another instruction set than this process', to measure it."""
    function: Any = linear_range
    names = {
        "_TILE_ROWS": most_tile_rows(chosen),
        "_int4_blocks": make_blocks(WeightKind.INT4, chosen),
        "_int8_blocks": make_blocks(WeightKind.INT8, chosen),
    }
    # A copy with other globals: a closure over intrinsics would be compiled anew at every start, also where it serves.
    # And compiled without the cache on disk, whose key does not know what they emit.
    copy = FunctionType(function.py_func.__code__, function.py_func.__globals__ | names)
    compiled: Callable[..., None] = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(copy)
    return compiled


@kernel
def share_start(num_blocks: int, share: int, num_shares: int, num_rows: int) -> int:
    """The first block of a share, `num_blocks` for the one behind the last. Where rows meet pairs of blocks, no cut
    goes through one; elsewhere whole pairs would only make shares less even."""
    unit = PAIR if _HAS_PAIRS and num_rows >= LEAST_ROWS else 1
    num_units = (num_blocks + unit - 1) // unit
    return min(num_blocks, num_units * share // num_shares * unit)


@parallel_kernel
def _linear_threads(
    rows: NDArray[np.uint8],
    weights: NDArray[np.uint8],
    bits: int,
    out: NDArray[np.float32],
    is_added: bool,
    # numba.get_num_threads() in here would keep the kernel out of the cache
    num_threads: int,
) -> None:
    num_blocks = (out.shape[1] + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    num_rows = out.shape[0]
    for thread in numba.prange(num_threads):
        first = share_start(num_blocks, thread, num_threads, num_rows)
        last = share_start(num_blocks, thread + 1, num_threads, num_rows)
        linear_range(rows, weights, bits, out, is_added, first, last)


def linear(
    rows: NDArray[np.uint8], matrix: PackedMatrix, out: NDArray[np.float32] | None = None, *, is_added: bool = False
) -> NDArray[np.float32]:
    """rows @ matrix.T in float32 [m, outputs], on numba's threads; with `is_added`, `out` += that.

    Raises:
        ValueError: `rows` are not quantized rows of the matrix' inputs, or `out` is no contiguous float32 [m, outputs].
    """
    expected = row_bytes(matrix.num_inputs)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != expected or not rows.flags.c_contiguous:
        raise ValueError(
            f"rows are {rows.dtype} {rows.shape}; quantized rows of {matrix.num_inputs} inputs are contiguous uint8 "
            f"[rows, {expected}]"
        )
    shape = (rows.shape[0], matrix.num_outputs)
    if out is None:
        out = (np.zeros if is_added else np.empty)(shape, dtype=np.float32)
    elif out.dtype != np.float32 or out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {out.shape}; expected contiguous float32 {shape}")
    _linear_threads(rows, matrix.data, int(matrix.kind), out, is_added, numba.get_num_threads())
    return out
