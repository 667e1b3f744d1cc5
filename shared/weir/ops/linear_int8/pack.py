"""Weights in the order in which the kernels read them.

A block holds 16 outputs and all inputs, and is read from front to back:

    scales   [groups][16] float16, for 4-bit weights each followed by [16] float16 minima; padded to 64 bytes
    weights  [groups][8 quads][16 outputs][4 inputs]: a vector of 64 bytes is one quad of inputs of all 16 outputs
             8 bits: one byte a weight, 128 added, so 1 … 255
             4 bits: quads 2j and 2j + 1 share 64 bytes; 2j has the low nibbles

    weight = scale * integer            8 bits, integers -127 … 127
    weight = scale * integer + minimum  4 bits, integers 0 … 15

Outputs are padded with zeros to a multiple of 16.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weir.ops.quantize.rows import GROUP, num_groups_of

BLOCK_OUTPUTS = 16
ALIGNMENT = 64
_QUAD = 4
_QUADS = GROUP // _QUAD
_CHUNK_BLOCKS = 64


class WeightKind(enum.IntEnum):
    """The value is the number of bits."""

    INT4 = 4
    INT8 = 8


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [num_outputs, num_inputs] of quantized weights.

    `data` is uint8, contiguous, starts at a multiple of 64 bytes, and may be a view of a mapped file.
    """

    kind: WeightKind
    num_outputs: int
    num_inputs: int
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        expected = packed_bytes(self.kind, self.num_outputs, self.num_inputs)
        if self.data.dtype != np.uint8 or self.data.shape != (expected,) or not self.data.flags.c_contiguous:
            raise ValueError(
                f"packed weights [{self.num_outputs}, {self.num_inputs}] of {self.kind} bits take {expected} "
                f"contiguous bytes; data is {self.data.dtype} {self.data.shape}"
            )
        if self.data.ctypes.data % ALIGNMENT:
            raise ValueError(f"packed weights start at {self.data.ctypes.data:#x}; they need a multiple of {ALIGNMENT}")

    @property
    def num_blocks(self) -> int:
        """What work is split by: each block of 16 outputs can be computed on its own."""
        return self.data.size // block_bytes(self.kind, self.num_inputs)


def block_bytes(kind: WeightKind, num_inputs: int) -> int:
    """Of one block of 16 outputs, a multiple of 64."""
    return scales_bytes(kind, num_inputs) + num_groups_of(num_inputs) * GROUP * BLOCK_OUTPUTS * kind // 8


def scales_bytes(kind: WeightKind, num_inputs: int) -> int:
    """The part of a block before its weights."""
    a_group = BLOCK_OUTPUTS * 2 * (2 if kind is WeightKind.INT4 else 1)
    return -(-num_groups_of(num_inputs) * a_group // ALIGNMENT) * ALIGNMENT


def packed_bytes(kind: WeightKind, num_outputs: int, num_inputs: int) -> int:
    """The size of `PackedMatrix.data`. Raises ValueError unless `num_inputs` is a positive multiple of 32."""
    if num_outputs <= 0:
        raise ValueError(f"a matrix of {num_outputs} outputs; at least 1 is needed")
    return -(-num_outputs // BLOCK_OUTPUTS) * block_bytes(kind, num_inputs)


def pack_int8(weights: NDArray[np.float32]) -> PackedMatrix:
    """Quantizes float32 weights [outputs, inputs] to 8 bits, a scale for each 32 inputs of an output, symmetric.

    Raises:
        ValueError: inputs are no multiple of 32, or a weight is not finite or beyond what a float16 scale can hold.
    """
    groups = _grouped(np.ascontiguousarray(weights, dtype=np.float32))
    largest = np.abs(groups).max(axis=-1)
    if not np.all(largest <= 127.0 * 65504):
        raise ValueError(f"a weight is {largest.max()}; int8 weights must be finite and at most 127 * 65504")
    scales = (largest / 127).astype(np.float16)
    # rounded up: with a scale rounded down the largest weight would be cut off
    scales = np.where(scales.astype(np.float32) * 127 < largest, np.nextafter(scales, np.float16(np.inf)), scales)
    divisors = np.where(scales > 0, scales, 1).astype(np.float32)
    quants = np.rint(groups / divisors[..., None]).astype(np.int8)
    return pack_q8_0(quants.reshape(weights.shape), scales)


def pack_q8_0(quants: NDArray[np.int8], scales: NDArray[np.floating]) -> PackedMatrix:
    """8-bit weights as they are in a GGUF Q8_0 tensor.

    `quants` int8 [outputs, inputs], `scales` [outputs, inputs / 32].

    Raises:
        ValueError: inputs are no multiple of 32, or a scale is no finite float16.
    """
    groups = _grouped(quants.astype(np.int8, copy=False))
    return _pack(WeightKind.INT8, groups.view(np.uint8) ^ np.uint8(128), [_half(scales, groups, "scales")])


def pack_q4_1(quants: NDArray[np.uint8], scales: NDArray[np.floating], minima: NDArray[np.floating]) -> PackedMatrix:
    """4-bit weights as they are in a GGUF Q4_1 tensor; those of Q4_0 have minima of -8 * scale.

    `quants` uint8 [outputs, inputs] in 0 … 15, `scales` and `minima` [outputs, inputs / 32].

    Raises:
        ValueError: inputs are no multiple of 32, a value is above 15, or a scale or minimum is no finite float16.
    """
    groups = _grouped(quants.astype(np.uint8, copy=False))
    if groups.max() > 15:
        raise ValueError(f"4-bit weights must be in 0 ... 15; the largest is {groups.max()}")
    return _pack(WeightKind.INT4, groups, [_half(scales, groups, "scales"), _half(minima, groups, "minima")])


def aligned_empty(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that starts at a multiple of 64 bytes."""
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def _grouped(matrix: np.ndarray) -> np.ndarray:
    num_outputs, num_inputs = matrix.shape
    return matrix.reshape(num_outputs, num_groups_of(num_inputs), GROUP)


def _half(values: NDArray[np.floating], groups: np.ndarray, what: str) -> NDArray[np.float16]:
    if values.shape != groups.shape[:2]:
        raise ValueError(
            f"{what} have shape {values.shape}, expected {groups.shape[:2]}: one for each group of {GROUP}"
        )
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all() or not np.array_equal(half, values):
        raise ValueError(f"{what} must be finite float16 values, as GGUF files store them")
    return half


def _pack(kind: WeightKind, groups: NDArray[np.uint8], scales: list[NDArray[np.float16]]) -> PackedMatrix:
    num_outputs, num_groups, _ = groups.shape
    num_inputs = num_groups * GROUP
    data = aligned_empty(packed_bytes(kind, num_outputs, num_inputs))
    blocks = data.reshape(-1, block_bytes(kind, num_inputs))
    split = scales_bytes(kind, num_inputs)
    # some blocks at a time: the head of a model has 50,000 outputs
    for first, last in _chunks(len(blocks)):
        outputs = slice(first * BLOCK_OUTPUTS, last * BLOCK_OUTPUTS)
        heads = np.stack([_by_block(part[outputs], last - first) for part in scales], axis=1)
        heads = np.ascontiguousarray(heads.transpose(0, 3, 1, 2)).view(np.uint8).reshape(last - first, -1)
        blocks[first:last, : heads.shape[1]] = heads
        blocks[first:last, heads.shape[1] : split] = 0
        quads = _by_block(groups[outputs].reshape(-1, num_groups * _QUADS, _QUAD), last - first)
        quads = quads.transpose(0, 2, 1, 3)  # [blocks, quads, 16, 4]
        if kind is WeightKind.INT4:
            quads = quads[:, 0::2] | quads[:, 1::2] << 4
        blocks[first:last, split:] = quads.reshape(last - first, -1)
    return PackedMatrix(kind, num_outputs, num_inputs, data)


def _by_block(rows: np.ndarray, num_blocks: int) -> np.ndarray:
    """[outputs, ...] padded with zeros to [blocks, 16, ...]."""
    padded = np.zeros((num_blocks * BLOCK_OUTPUTS, *rows.shape[1:]), dtype=rows.dtype)
    padded[: len(rows)] = rows
    return padded.reshape(num_blocks, BLOCK_OUTPUTS, *rows.shape[1:])


def _chunks(num_blocks: int) -> Iterator[tuple[int, int]]:
    for first in range(0, num_blocks, _CHUNK_BLOCKS):
        yield first, min(first + _CHUNK_BLOCKS, num_blocks)
