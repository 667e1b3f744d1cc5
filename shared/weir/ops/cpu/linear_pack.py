"""Weights in the order in which the kernels read them.

A block holds 16 outputs and all inputs. It is one stream of groups of 32 inputs, read from front to back and nowhere
else: with the scales in a stream of their own, one row read memory at 13 GB/s instead of 33.

    a group, 4 bits   [16] float16 scales, [16] float16 minima, [4][16 outputs][4 inputs] bytes: byte j of the first
                      64 holds input j of the group in its low nibble and input j + 4 in its high one, and so on
             8 bits   [16] float32 scales, [8][16 outputs][4 inputs] bytes with 128 added, so 1 … 255

    weight = scale * integer            8 bits, integers -127 … 127
    weight = scale * integer + minimum  4 bits, integers 0 … 15

Outputs are padded with zeros to a multiple of 16.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weir.ops.cpu.quantized_rows import GROUP, num_groups_of

BLOCK_OUTPUTS = 16
SCALES_BYTES = 64
"""Of a group: what stands before its weights."""
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


def group_bytes(kind: WeightKind) -> int:
    """Of one group of a block, a multiple of 64."""
    return SCALES_BYTES + GROUP * BLOCK_OUTPUTS * kind // 8


def block_bytes(kind: WeightKind, num_inputs: int) -> int:
    """Of one block of 16 outputs."""
    return num_groups_of(num_inputs) * group_bytes(kind)


def packed_bytes(kind: WeightKind, num_outputs: int, num_inputs: int) -> int:
    """The size of `PackedMatrix.data`. Raises ValueError unless `num_inputs` is a positive multiple of 32."""
    if num_outputs <= 0:
        raise ValueError(f"a matrix of {num_outputs} outputs; at least 1 is needed")
    return -(-num_outputs // BLOCK_OUTPUTS) * block_bytes(kind, num_inputs)


def pack_int8(weights: NDArray[np.float32]) -> PackedMatrix:
    """Quantizes float32 weights [outputs, inputs] to 8 bits, a scale for each 32 inputs of an output, symmetric.

    Raises:
        ValueError: inputs are no multiple of 32, or a weight is not finite.
    """
    groups = _grouped(np.ascontiguousarray(weights, dtype=np.float32))
    scales = np.abs(groups).max(axis=-1) / np.float32(127)
    if not np.isfinite(scales).all():
        raise ValueError("a weight is infinite or not a number")
    divisors = np.where(scales > 0, scales, np.float32(1))
    quants = np.clip(np.rint(groups / divisors[..., None]), -127, 127).astype(np.int8)
    return pack_q8_0(quants.reshape(weights.shape), scales)


def pack_q8_0(quants: NDArray[np.int8], scales: NDArray[np.floating]) -> PackedMatrix:
    """8-bit weights as they are in a GGUF Q8_0 tensor.

    `quants` int8 [outputs, inputs], `scales` [outputs, inputs / 32], kept as float32.

    Raises:
        ValueError: inputs are no multiple of 32, or a scale is not finite.
    """
    groups = _grouped(quants.astype(np.int8, copy=False))
    return _pack(WeightKind.INT8, groups.view(np.uint8) ^ np.uint8(128), [_exact(scales, groups, np.float32, "scales")])


def pack_q4_1(quants: NDArray[np.uint8], scales: NDArray[np.floating], minima: NDArray[np.floating]) -> PackedMatrix:
    """4-bit weights as they are in a GGUF Q4_1 tensor; those of Q4_0 have minima of -8 * scale.

    `quants` uint8 [outputs, inputs] in 0 … 15, `scales` and `minima` [outputs, inputs / 32].

    Raises:
        ValueError: inputs are no multiple of 32, a value is above 15, or a scale or minimum is no finite float16.
    """
    groups = _grouped(quants.astype(np.uint8, copy=False))
    if groups.max() > 15:
        raise ValueError(f"4-bit weights must be in 0 ... 15; the largest is {groups.max()}")
    return _pack(
        WeightKind.INT4,
        groups,
        [_exact(scales, groups, np.float16, "scales"), _exact(minima, groups, np.float16, "minima")],
    )


def aligned_empty(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that starts at a multiple of 64 bytes."""
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def _grouped(matrix: np.ndarray) -> np.ndarray:
    num_outputs, num_inputs = matrix.shape
    return matrix.reshape(num_outputs, num_groups_of(num_inputs), GROUP)


def _exact(
    values: NDArray[np.floating], groups: np.ndarray, dtype: type[np.floating], what: str
) -> NDArray[np.floating]:
    if values.shape != groups.shape[:2]:
        raise ValueError(
            f"{what} have shape {values.shape}, expected {groups.shape[:2]}: one for each group of {GROUP}"
        )
    with np.errstate(over="ignore"):
        exact = values.astype(dtype)
    if not np.isfinite(exact).all() or not np.array_equal(exact, values):
        raise ValueError(f"{what} must be finite {dtype.__name__} values")
    return exact


def _pack(kind: WeightKind, groups: NDArray[np.uint8], scales: list[NDArray[np.floating]]) -> PackedMatrix:
    num_outputs, num_groups, _ = groups.shape
    num_inputs = num_groups * GROUP
    data = aligned_empty(packed_bytes(kind, num_outputs, num_inputs))
    blocks = data.reshape(-1, num_groups, group_bytes(kind))
    # some blocks at a time: the head of a model has 50,000 outputs
    for first, last in _chunks(len(blocks)):
        outputs = slice(first * BLOCK_OUTPUTS, last * BLOCK_OUTPUTS)
        heads = np.stack([_by_block(part[outputs], last - first) for part in scales], axis=1)
        heads = np.ascontiguousarray(heads.transpose(0, 3, 1, 2))  # [blocks, groups, scales or minima, 16]
        blocks[first:last, :, :SCALES_BYTES] = heads.view(np.uint8).reshape(last - first, num_groups, SCALES_BYTES)
        quads = _by_block(groups[outputs].reshape(-1, num_groups, _QUADS, _QUAD), last - first)
        quads = quads.transpose(0, 2, 3, 1, 4)  # [blocks, groups, quads, 16, 4]
        if kind is WeightKind.INT4:
            quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4
        blocks[first:last, :, SCALES_BYTES:] = quads.reshape(last - first, num_groups, -1)
    return PackedMatrix(kind, num_outputs, num_inputs, data)


def _by_block(rows: np.ndarray, num_blocks: int) -> np.ndarray:
    """[outputs, ...] padded with zeros to [blocks, 16, ...]."""
    padded = np.zeros((num_blocks * BLOCK_OUTPUTS, *rows.shape[1:]), dtype=rows.dtype)
    padded[: len(rows)] = rows
    return padded.reshape(num_blocks, BLOCK_OUTPUTS, *rows.shape[1:])


def _chunks(num_blocks: int) -> Iterator[tuple[int, int]]:
    for first in range(0, num_blocks, _CHUNK_BLOCKS):
        yield first, min(first + _CHUNK_BLOCKS, num_blocks)
