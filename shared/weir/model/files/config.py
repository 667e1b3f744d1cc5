"""From a model's files to its configuration, headers only."""

from functools import lru_cache
from pathlib import Path

from weir.model.architecture import ModelConfig
from weir.model.files.config_gguf import config_from_gguf
from weir.model.files.config_hf import config_from_hf
from weir.model.files.dummy import shape_named
from weir.model.files.gguf import read_gguf
from weir.model.files.source import DUMMY_PREFIX, ModelKind, ModelSource


def load_model_config(source: ModelSource, max_context_tokens: int = 0) -> ModelConfig:
    """Reads headers only, never weights, and no vocabulary. For contexts of at most so many tokens (0: the model's
    own), which for a few models decides how they rotate.

    Raises:
        ModelError: names the file, the field, and what Weir supports.
    """
    return _read(source).served_up_to(max_context_tokens)


def _read(source: ModelSource) -> ModelConfig:
    if source.kind is ModelKind.GGUF:
        return _config_of_gguf(source.path, source.state())
    if source.kind is ModelKind.DUMMY:
        return shape_named(source.name.removeprefix(DUMMY_PREFIX))
    return config_from_hf(source.path)


@lru_cache(maxsize=4)
def _config_of_gguf(path: Path, state: tuple[int, ...]) -> ModelConfig:
    """A process that serves a model asks half a dozen times, and its header takes 40 ms each time. `state`: that of the
    source."""
    del state
    return config_from_gguf(read_gguf(path, with_texts=False))
