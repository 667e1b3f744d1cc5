"""Seeded random weights: the speed of a model is that of its shape, whatever the numbers are."""

import hashlib
import math

import numpy as np
import numpy.typing as npt

from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.files.quant_blocks import QuantBlocks

DUMMY_SEED = 0
_DEVIATION = 0.02
"""Standard deviation of all but norms: what transformers initialises these models with."""
SPREAD = _DEVIATION * math.sqrt(3.0)
"""Numbers are uniform in [-SPREAD, SPREAD): five times as quick to draw as normal ones."""


def is_norm(name: str) -> bool:
    """Norms are all ones."""
    return name.endswith("norm.weight")


def tensor_seed(name: str, seed: int) -> int:
    """63 bits, so that each tensor can be made by itself, in any order and on any machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class DummyTensors:
    """A `TensorFile` without a file: a tensor is made when it is read, and nothing is kept."""

    def __init__(self, config: ModelConfig, seed: int = DUMMY_SEED) -> None:
        self._shapes = tensor_shapes(config)
        self._seed = seed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        shape = self._shapes[name]
        if is_norm(name):
            return np.ones(shape, dtype=np.float32)
        values = np.random.default_rng(tensor_seed(name, self._seed)).random(shape, dtype=np.float32)
        values *= 2 * SPREAD
        values -= SPREAD
        return values

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        """None: these are floating-point numbers."""
        return None
