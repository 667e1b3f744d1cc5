"""A model's tensors by name, wherever they lie. numpy only: not every worker computes with torch."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.errors import ModelError
from weir.model.files.dummy import DummyTensors
from weir.model.files.quant_blocks import QuantBlocks
from weir.model.files.safetensors import SafetensorsFolder, StoredValues
from weir.model.files.source import ModelKind, ModelSource


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


def open_tensors(source: ModelSource, config: ModelConfig) -> TensorFile:
    """The tensors of `config` and no others; nothing is read yet but headers.

    Raises:
        ModelError: names every tensor that is missing, unknown or of another shape than `config` asks for.
    """
    tensors = _open(source, config)
    _check_shapes(source, tensors.shapes(), tensor_shapes(config), config.tie_word_embeddings)
    return tensors


def _open(source: ModelSource, config: ModelConfig) -> TensorFile:
    if source.kind is ModelKind.GGUF:
        # here and not above: a machine without GGUF files need not have their library
        from weir.model.files.gguf_tensors import GgufTensors  # noqa: PLC0415

        return GgufTensors(source.path, config)
    if source.kind is ModelKind.DUMMY:
        return DummyTensors(config)
    return SafetensorsFolder(source.path)


def _check_shapes(
    source: ModelSource, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], tied: bool
) -> None:
    # buffers that old checkpoints saved, and the second name of a tied matrix
    found = {
        name: shape
        for name, shape in found.items()
        if not name.endswith(".rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [
        f"{name} is not part of a Llama, Mistral, Qwen2 or Qwen3 model"
        for name in sorted(found.keys() - expected.keys())
    ]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ModelError(f"{source.path}: {'; '.join(problems[:10])}{more}")
