"""The K quantizations of GGUF written out once more, value by value, after `dequantize_row_*` of ggml-quants.c.

The gguf library reads them and cannot write them, so tests write random blocks.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

BLOCK = 256

Bytes = npt.NDArray[np.uint8]


def random_blocks(kind: str, num_blocks: int, seed: int) -> Bytes:
    """`[num_blocks, bytes]`: random but for the half-precision scales, which keep the values below about 1."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    for first, last in pairwise(SCALE_BYTES[kind]):
        scales = rng.uniform(0.1, 1.0, (num_blocks, 1)) * LARGEST_SCALE[kind]
        blocks[:, first:last] = scales.astype("<f2").view(np.uint8)
    return blocks


def values_of(kind: str, blocks: Bytes) -> npt.NDArray[np.float32]:
    """`[num_blocks, 256]`."""
    return np.array([DECODERS[kind](block) for block in blocks], dtype=np.float32)


def _half(block: Bytes, offset: int) -> float:
    return float(block[offset : offset + 2].view("<f2")[0])


def _scale_and_minimum(index: int, packed: list[int]) -> tuple[int, int]:
    """`get_scale_min_k4`: eight pairs of six bits in twelve bytes."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    scale = (packed[index + 4] & 0xF) | ((packed[index - 4] >> 6) << 4)
    return scale, (packed[index + 4] >> 4) | ((packed[index] >> 6) << 4)


def _q4_k(block: Bytes) -> list[float]:
    return _with_minima(block, low_bits=block[16:144].tolist(), high_bits=[0] * 32)


def _q5_k(block: Bytes) -> list[float]:
    return _with_minima(block, low_bits=block[48:176].tolist(), high_bits=block[16:48].tolist())


def _with_minima(block: Bytes, low_bits: list[int], high_bits: list[int]) -> list[float]:
    scale, minimum = _half(block, 0), _half(block, 2)
    packed = block[4:16].tolist()
    values = []
    for group in range(8):
        factor, shift = _scale_and_minimum(group, packed)
        for place in range(32):
            byte = low_bits[group // 2 * 32 + place]
            quant = (byte >> 4 if group % 2 else byte & 0xF) + 16 * ((high_bits[place] >> group) & 1)
            values.append(scale * factor * quant - minimum * shift)
    return values


def _q6_k(block: Bytes) -> list[float]:
    low, high, scale = block[:128].tolist(), block[128:192].tolist(), _half(block, 208)
    factors = block[192:208].view(np.int8).tolist()
    values = []
    for place in range(BLOCK):
        half, quarter, column = place // 128, place % 128 // 32, place % 32
        byte = low[half * 64 + quarter % 2 * 32 + column]
        quant = (byte >> 4 if quarter >= 2 else byte & 0xF) | ((high[half * 32 + column] >> (2 * quarter)) & 3) << 4
        values.append(scale * factors[place // 16] * (quant - 32))
    return values


BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
LARGEST_SCALE = {"Q4_K": 4e-4, "Q5_K": 2e-4, "Q6_K": 5e-5}
SCALE_BYTES = {"Q4_K": (0, 2, 4), "Q5_K": (0, 2, 4), "Q6_K": (208, 210)}
DECODERS: dict[str, Callable[[Bytes], list[float]]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
