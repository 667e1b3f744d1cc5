"""One pass over rows of logits: is every one a number, the highest of each block, sums of exponentials.

A row is read in blocks of BLOCK logits. Sums and maxima of a block are kept in LANES partial results, element i in
lane i modulo LANES, so that the order of additions does not depend on how wide the machine's vectors are. Loops are
written out here and in `sampling`: numba's `max`, `sum`, `sort` and `searchsorted` take it seconds to compile.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from weir.ops.simd.float import exp
from weir.ops.simd.jit import kernel

Floats = npt.NDArray[np.float32]

BLOCK = 256
LANES = 16
NOT_A_NUMBER = -1


def num_scan_blocks(num_tokens: int) -> int:
    """Of a row with so many logits."""
    return -(-num_tokens // BLOCK)


@kernel
def scan_rows(logits: Floats, block_maxima: Floats, highest: Floats, argmax: npt.NDArray[np.int32]) -> None:
    """Of each row [rows, vocabulary]: the maximum of each block [rows, blocks], the highest logit and its lowest id.

    `argmax` is NOT_A_NUMBER for a row with a NaN or an infinite logit.
    """
    maxima, doubts = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    num_tokens = logits.shape[1]
    for row in range(logits.shape[0]):
        values = logits[row]
        doubts[:] = np.float32(0.0)
        best = np.float32(-np.inf)
        best_block = 0
        for block in range(block_maxima.shape[1]):
            start = block * BLOCK
            stop = min(start + BLOCK, num_tokens)
            maximum = _block_maximum(values[start:stop], maxima, doubts)
            block_maxima[row, block] = maximum
            if maximum > best:
                best = maximum
                best_block = block
        highest[row] = best
        doubt = np.float32(0.0)
        for lane in range(LANES):
            doubt += doubts[lane]
        argmax[row] = _index_of(values, best, best_block * BLOCK) if doubt == 0 else NOT_A_NUMBER


@kernel
def _block_maximum(values: Floats, maxima: Floats, doubts: Floats) -> Any:
    """`doubts` become NaN with the first value that is NaN or infinite."""
    maxima[:] = np.float32(-np.inf)
    whole = values.shape[0] // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            value = values[start + lane]
            maxima[lane] = value if value > maxima[lane] else maxima[lane]
            doubts[lane] += value - value
    for lane in range(values.shape[0] - whole):
        value = values[whole + lane]
        maxima[lane] = value if value > maxima[lane] else maxima[lane]
        doubts[lane] += value - value
    maximum = maxima[0]
    for lane in range(1, LANES):
        maximum = maxima[lane] if maxima[lane] > maximum else maximum
    return maximum


@kernel
def _index_of(values: Floats, wanted: Any, start: int) -> int:
    for index in range(start, values.shape[0]):
        if values[index] == wanted:
            return index
    return start


@kernel
def sum_exp(values: Floats, highest: Any, inverse_temperature: Any, block_sums: npt.NDArray[np.float64]) -> float:
    """The sum of e**((x - highest) * inverse_temperature), and the part of each block in it."""
    lanes, weights = np.empty(LANES, np.float32), np.empty(BLOCK, np.float32)
    total = 0.0
    for block in range(block_sums.shape[0]):
        start = block * BLOCK
        count = min(BLOCK, values.shape[0] - start)
        for index in range(count):
            weights[index] = exp((values[start + index] - highest) * inverse_temperature)
        weights[count:] = np.float32(0.0)
        lanes[:] = np.float32(0.0)
        for group in range(0, BLOCK, LANES):
            for lane in range(LANES):
                lanes[lane] += weights[group + lane]
        block_sum = 0.0
        for lane in range(LANES):
            block_sum += np.float64(lanes[lane])
        block_sums[block] = block_sum
        total += block_sum
    return total
