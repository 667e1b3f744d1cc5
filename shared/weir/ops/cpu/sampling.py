"""Samples tokens from rows of logits on a CPU. Every result has the same bits on every machine and in every batch."""

from typing import Any

import numpy as np
import numpy.typing as npt

from weir.ops.cpu.sampling_scan import BLOCK, Floats, sum_exp
from weir.ops.simd.float import exp
from weir.ops.simd.jit import kernel

Keys = npt.NDArray[np.uint64]

_ID_BITS = np.uint64(32)
_RADIX_BITS = 11
_FEW = 64  # so many are sorted faster by insertion
_LEAST_Z = 88.0
"""e**-88 is 0 in float32: what is further below the most likely token is never sampled."""
_FIRST_MARGIN = 6.0
_BEFORE_EQUALS, _BEHIND_EQUALS = np.bool_(False), np.bool_(True)  # of Python's own each is a type of its own


@kernel
def sample_token(
    values: Floats,
    block_maxima: Floats,
    highest: Any,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    keys: Keys,
) -> Any:
    """One token of one row by inverting the cumulative distribution at `uniform` in [0, 1).

    Temperature, then the `top_k` most likely (0: all), of those the fewest that have `top_p` of the probability, of
    those the ones that are `min_p` times as likely as the most likely. Of equal logits the lower id is the likelier.
    `keys` [2, vocabulary] is scratch.
    """
    inverse = np.float32(1.0 / temperature)
    top_k = top_k if top_k < values.shape[0] else 0
    if top_k == 0 and top_p >= 1.0 and min_p <= 0.0:
        return _sample_any(values, highest, inverse, uniform, np.empty(block_maxima.shape[0], np.float64))
    wanted_mass = np.inf
    if top_k == 0 and top_p < 1.0:
        wanted_mass = top_p * sum_exp(values, highest, inverse, np.empty(block_maxima.shape[0], np.float64))
    # of the top k, those that are less likely than min_p belong to the mass of which top_p is a part
    least_p = min_p if top_k == 0 or top_p >= 1.0 else 0.0
    count = _collect(values, block_maxima, highest, temperature, top_k, wanted_mass, least_p, keys)
    ordered = sort_keys(keys, count)
    count = top_k if 0 < top_k < count else count
    cumulative = np.empty(count, np.float64)
    mass = 0.0
    for place in range(count):
        mass += np.float64(exp((values[id_of(ordered[place])] - highest) * inverse))
        cumulative[place] = mass
    if top_p < 1.0:
        if top_k > 0:
            wanted_mass = top_p * mass
        count = min(count, _place_in(cumulative, count, wanted_mass, _BEFORE_EQUALS) + 1)
    while count > 1 and np.float64(exp((values[id_of(ordered[count - 1])] - highest) * inverse)) < min_p:
        count -= 1
    mass = cumulative[count - 1]
    # rounding can carry the product up to the mass: then the last token that has any weight
    last = _place_in(cumulative, count, mass, _BEFORE_EQUALS)
    return id_of(ordered[min(_place_in(cumulative, count, uniform * mass, _BEHIND_EQUALS), last)])


@kernel
def _place_in(rising: npt.NDArray[np.float64], count: int, wanted: float, is_behind: Any) -> int:
    """Where `wanted` belongs among the first `count`: before those that equal it, or behind them."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if rising[middle] < wanted or (is_behind and rising[middle] == wanted):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _sample_any(values: Floats, highest: Any, inverse: Any, uniform: float, block_sums: npt.NDArray[np.float64]) -> int:
    """From all tokens, in the order of their ids."""
    target = uniform * sum_exp(values, highest, inverse, block_sums)
    last_block, before, passed = 0, 0.0, 0.0
    for block in range(block_sums.shape[0]):
        if block_sums[block] > 0.0:
            last_block, before = block, passed
            passed += block_sums[block]
            if passed > target:
                break
    token_id = 0
    start = last_block * BLOCK
    for index in range(start, min(start + BLOCK, values.shape[0])):
        weight = np.float64(exp((values[index] - highest) * inverse))
        if weight > 0.0:
            token_id = index
            before += weight
            if before > target:
                break
    return token_id


@kernel
def _collect(
    values: Floats,
    block_maxima: Floats,
    highest: Any,
    temperature: float,
    top_k: int,
    wanted_mass: float,
    min_p: float,
    keys: Keys,
) -> int:
    """Writes the keys of at least the tokens that can be sampled, and as few others as is easily seen, to `keys[0]`."""
    if 0 < top_k <= block_maxima.shape[0]:
        return collect_above(values, block_maxima, _nth_highest(block_maxima, top_k, keys), keys[0])
    inverse = np.float32(1.0 / temperature)
    least_z = min(_LEAST_Z, 1e-3 - np.log(min_p)) if min_p > 0.0 else _LEAST_Z
    margin = min(_FIRST_MARGIN, least_z)
    while True:
        threshold = np.float64(highest) - margin * 1.0001 * temperature
        count = collect_above(values, block_maxima, threshold, keys[0])
        if margin >= least_z or count == values.shape[0] or 0 < top_k <= count:
            return count
        mass = 0.0
        if wanted_mass < np.inf:
            for place in range(count):
                mass += np.float64(exp((values[id_of(keys[0, place])] - highest) * inverse))
        if mass >= wanted_mass:
            return count
        margin = min(2.0 * margin, least_z)


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
                keys[count] = _key_of(bits[index], index)
                count += 1
    return count


@kernel
def _nth_highest(values: Floats, number: int, keys: Keys) -> float:
    """The first for `number` 1. `keys` [2, at least as many] is scratch."""
    bits = values.view(np.int32)
    for index in range(values.shape[0]):
        keys[0, index] = _key_of(bits[index], index)
    ordered = sort_keys(keys, values.shape[0])
    return np.float64(values[id_of(ordered[number - 1])])


@kernel
def _key_of(bits: Any, index: int) -> Any:
    # the bits of a float as an integer that rises with it; +0 and -0 are equal
    pattern = np.int64(bits)
    rank = pattern if pattern >= 0 else np.int64(-0x80000000) - pattern
    return np.uint64(np.int64(0x7FFFFFFF) - rank) << _ID_BITS | np.uint64(index)


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
        for place in range(1, count):
            key, hole = keys[0, place], place
            while hole > 0 and keys[0, hole - 1] > key:
                keys[0, hole] = keys[0, hole - 1]
                hole -= 1
            keys[0, hole] = key
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
        threshold = _nth_highest(block_maxima, count, keys)
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


@kernel
def penalize(
    values: Floats,
    token_ids: npt.NDArray[np.int32],
    num_prompt_tokens: int,
    repetition: float,
    presence: float,
    frequency: float,
    counts: npt.NDArray[np.int32],
) -> None:
    """Changes the logits of the tokens of a history (prompt, then output) in place.

    `counts` [vocabulary] is scratch that is 0 before and afterwards.
    """
    for place in range(num_prompt_tokens, token_ids.shape[0]):
        counts[token_ids[place]] += 1
    for place in range(token_ids.shape[0]):
        token_id = token_ids[place]
        count = counts[token_id]
        if count < 0:
            continue
        value = np.float64(values[token_id])
        value = value / repetition if value > 0.0 else value * repetition
        if count > 0:
            value -= frequency * count + presence
        values[token_id] = np.float32(value)
        counts[token_id] = -1
    for place in range(token_ids.shape[0]):
        counts[token_ids[place]] = 0


@kernel
def uniform_of(seed: Any, index: Any) -> float:
    """In [0, 1): the first number of Philox4x64-10 with the key (seed, index), both uint64, as numpy's Generator.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    c0, c1, c2, c3 = np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    key0, key1 = seed, index
    for _ in range(10):
        high0, low0 = _multiply(np.uint64(0xD2E7470EE14C6C93), c0)
        high1, low1 = _multiply(np.uint64(0xCA5A826395121157), c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += np.uint64(0x9E3779B97F4A7C15)
        key1 += np.uint64(0xBB67AE8584CAA73B)
    return np.float64(c0 >> np.uint64(11)) * 2.0**-53


@kernel
def _multiply(a: Any, b: Any) -> Any:
    """The high and the low 64 bits of the product of two uint64."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    low = a_low * b_low
    middle = a_high * b_low + (low >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half), a * b
