"""The integers inside quantized GGUF tensors, so that a kernel can use them as they are.

Blocks are of 32 values of a row, little endian:

    Q4_0    scale f16 | 16 bytes          value = scale * (quant - 8)
    Q4_1    scale f16 | minimum f16 | 16 bytes      value = scale * quant + minimum
    Q8_0    scale f16 | 32 signed bytes   value = scale * quant

Byte i of a 4-bit block holds value i in its low half and value i + 16 in its high half.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class QuantBlocks:
    """`value[r, c] = scales[r, c // 32] * quants[r, c] + minima[r, c // 32]`, exactly.

    `quants` [rows, columns] is uint8 in [0, 15] where `minima` is an array, and int8 where it is None (minima of 0).
    """

    quants: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    minima: npt.NDArray[np.float32] | None

    def map_rows(self, reorder: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> "QuantBlocks":
        """The same with rows in another order."""
        minima = None if self.minima is None else reorder(self.minima)
        return QuantBlocks(reorder(self.quants), reorder(self.scales), minima)


def try_split_blocks(kind: str, raw: npt.NDArray[np.uint8]) -> QuantBlocks | None:
    """`raw` [rows, bytes of a row] of a tensor of type `kind`; None for a type that is not listed above."""
    if raw.ndim != 2:
        return None
    if kind == "Q8_0":
        blocks = raw.reshape(raw.shape[0], -1, 34)
        return QuantBlocks(_joined(blocks[..., 2:]).view(np.int8), _halves(blocks, 0), None)
    if kind == "Q4_0":
        blocks = raw.reshape(raw.shape[0], -1, 18)
        scales = _halves(blocks, 0)
        return QuantBlocks(_nibbles(blocks[..., 2:]), scales, scales * np.float32(-8))
    if kind == "Q4_1":
        blocks = raw.reshape(raw.shape[0], -1, 20)
        return QuantBlocks(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))
    return None


def _halves(blocks: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0].astype(np.float32)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return _joined(np.concatenate([packed & 15, packed >> 4], axis=-1))


def _joined(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(blocks).reshape(blocks.shape[0], -1)
