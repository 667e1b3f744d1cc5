"""What every kind of file gives: tensors by name."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from weir.model.files.quant_blocks import QuantBlocks
from weir.model.files.safetensors import StoredValues


class TensorFile(Protocol):
    """Tensors by the names that `tensor_shapes` uses (those of Hugging Face's Llama)."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor there, without reading any."""
        ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A copy of its own, in fp32, with the rows of queries and keys in the order of Hugging Face."""
        ...

    def try_view(self, name: str) -> StoredValues | None:
        """The file's own bytes, not copied; None where they have another order or another type."""
        ...

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        """The integers that the file holds for a matrix; None where it holds anything that `QuantBlocks` cannot say."""
        ...
