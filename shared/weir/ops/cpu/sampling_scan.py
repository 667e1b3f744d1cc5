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
def scan_allowed(
    values: Floats, words: npt.NDArray[np.uint32], masked: Any, kept: Floats, block_maxima: Floats
) -> tuple[Any, int]:
    """A row [vocabulary] with `masked` for each token whose bit (i % 32 of word i // 32) is 0, in `kept`, which may be
    `values`, and the maximum of each block of that.

    Returns the highest logit and its lowest id, or NOT_A_NUMBER: what `scan_rows` finds, for less.
    """
    maxima, doubts = np.empty(LANES, np.float32), np.zeros(LANES, np.float32)
    best, best_block = np.float32(-np.inf), 0
    for block in range(block_maxima.shape[0]):
        start, first_word = block * BLOCK, block * (BLOCK // 32)
        stop, last_word = min(start + BLOCK, values.shape[0]), min(first_word + BLOCK // 32, words.shape[0])
        some = np.uint32(0)
        for place in range(first_word, last_word):
            some |= words[place]
        if some == np.uint32(0):
            kept[start:stop] = masked
            maximum = masked
        else:
            kept[start:stop] = values[start:stop]
            for place in range(first_word, last_word):
                _mask_word(kept[place * 32 : min(place * 32 + 32, stop)], words[place], masked)
            maximum = _block_maximum(kept[start:stop], maxima, doubts)
        block_maxima[block] = maximum
        if maximum > best:
            best = maximum
            best_block = block
    doubt = np.float32(0.0)
    for lane in range(LANES):
        doubt += doubts[lane]
    return best, (_index_of(kept, best, best_block * BLOCK) if doubt == 0 else NOT_A_NUMBER)


@kernel
def _mask_word(values: Floats, word: Any, masked: Any) -> None:
    """Of at most 32 logits; most words leave all of them, or none."""
    if word == np.uint32(0):
        values[:] = masked
    elif word != np.uint32(0xFFFFFFFF):
        for index in range(values.shape[0]):
            values[index] = values[index] if (word >> np.uint32(index)) & np.uint32(1) else masked


@kernel
def only_allowed(words: npt.NDArray[np.uint32]) -> int:
    """The one token whose bit is set; -1: there are more, or none."""
    found = -1
    for place in range(words.shape[0]):
        word = words[place]
        if word == np.uint32(0):
            continue
        if found >= 0 or word & (word - np.uint32(1)) != np.uint32(0):
            return -1
        bit = 0
        while word >> np.uint32(bit) != np.uint32(1):
            bit += 1
        found = place * 32 + bit
    return found


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
