"""From a model's files to its configuration, headers only."""

from weir.model.architecture import ModelConfig
from weir.model.files.gguf import read_gguf
from weir.model.files.gguf_config import config_from_gguf
from weir.model.files.hf_config import config_from_hf
from weir.model.files.shapes import shape_named
from weir.model.files.source import DUMMY_PREFIX, ModelKind, ModelSource

__all__ = ["ModelConfig", "load_model_config"]


def load_model_config(source: ModelSource) -> ModelConfig:
    """Reads headers only, never weights: some 50 ms for a vocabulary of 49,152.

    A model with a sliding window (Mistral 7B v0.1: 4096 tokens of 32,768) is served up to that window, within which it
    attends as any other: `max_context_tokens` is the smaller of the two.

    Raises:
        ModelError: names the file, the field, and what Weir supports.
    """
    if source.kind is ModelKind.GGUF:
        return config_from_gguf(read_gguf(source.path))
    if source.kind is ModelKind.DUMMY:
        return shape_named(source.name.removeprefix(DUMMY_PREFIX))
    return config_from_hf(source.path)
