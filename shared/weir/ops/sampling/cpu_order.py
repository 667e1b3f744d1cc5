"""Orders the likeliest tokens of a row without looking at most of it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from weir.ops.sampling.cpu_scan import BLOCK, Floats
from weir.ops.simd.jit import kernel

Keys = npt.NDArray[np.uint64]

_ID_BITS = np.uint64(32)
_RADIX_BITS = 11
_FEW = 256  # fewer are sorted faster by comparison


@kernel
def collect_above(values: Floats, block_maxima: Floats, threshold: float, keys: Keys) -> int:
    """Writes a key for each logit of at least `threshold`; keys sort by falling logit, then by rising id."""
    bits = values.view(np.int32)
    count = 0
    for block in range(block_maxima.shape[0]):
        if block_maxima[block] < threshold:
            continue
        start = block * BLOCK
        for index in range(start, min(start + BLOCK, values.shape[0])):
            if values[index] >= threshold:
                # the bits of a float as an integer that rises with it; +0 and -0 are equal
                pattern = np.int64(bits[index])
                rank = pattern if pattern >= 0 else np.int64(-0x80000000) - pattern
                keys[count] = np.uint64(np.int64(0x7FFFFFFF) - rank) << _ID_BITS | np.uint64(index)
                count += 1
    return count


@kernel
def id_of(key: Any) -> Any:
    """The token of a key."""
    return np.int64(key & np.uint64(0xFFFFFFFF))


@kernel
def sort_keys(keys: Keys, count: int) -> Keys:
    """The first `count` keys of `keys[0]`, which are in the order of their ids, in rising order; `keys[1]` is scratch.

    Many are sorted by three stable passes over the digits of the logit, least significant first.
    """
    if count <= _FEW:
        keys[0, :count].sort()
        return keys[0, :count]
    source, target = keys[0, :count], keys[1, :count]
    ends = np.empty(1 << _RADIX_BITS, np.int64)
    digit_mask = np.uint64((1 << _RADIX_BITS) - 1)
    for shift in range(_ID_BITS, 64, _RADIX_BITS):
        ends[:] = 0
        for place in range(count):
            ends[np.int64(source[place] >> np.uint64(shift) & digit_mask)] += 1
        for digit in range(1, ends.shape[0]):
            ends[digit] += ends[digit - 1]
        for place in range(count - 1, -1, -1):
            bucket = np.int64(source[place] >> np.uint64(shift) & digit_mask)
            ends[bucket] -= 1
            target[ends[bucket]] = source[place]
        source, target = target, source
    return source


@kernel
def most_likely(values: Floats, block_maxima: Floats, count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` highest logits, highest first, of equal ones the lower id first."""
    count = min(count, values.shape[0])
    ids = np.empty(count, np.int64)
    if count == 0:
        return ids
    keys = np.empty((2, values.shape[0]), np.uint64)
    threshold = -np.inf
    if count <= block_maxima.shape[0]:
        threshold = np.float64(np.sort(block_maxima)[-count])
    ordered = sort_keys(keys, collect_above(values, block_maxima, threshold, keys[0]))
    for place in range(count):
        ids[place] = id_of(ordered[place])
    return ids


@kernel
def count_above(values: Floats, threshold: Any) -> int:
    """How many logits are higher."""
    count = 0
    for index in range(values.shape[0]):
        count += 1 if values[index] > threshold else 0
    return count
