"""Packed weights of a model in the model cache: made by whoever comes first, mapped by all."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weir.model.architecture import ModelConfig
from weir.model.cpu.packed_file import FORMAT_VERSION, PackedFileDefect, PackedWeights, open_packed, write_packed
from weir.model.cpu.packed_weights import pack_arrays, pack_matrices
from weir.model.errors import ModelError
from weir.model.files.source import ModelSource
from weir.model.files.tensors import open_tensors

_log = logging.getLogger(__name__)


def load_packed(source: ModelSource, config: ModelConfig, digest: str, cache_dir: Path) -> PackedWeights:
    """`digest` names weights, configuration and packing (`weir.model.files.digest`), and so the file.

    Several processes at once make it once: the others wait for the lock.

    Raises:
        ModelError: the model cannot be packed, or the cache cannot be written.
    """
    path = cache_dir / "packed" / f"{source.name}-{digest}-{FORMAT_VERSION}.weights"
    try:
        packed = _try_open(path)
        if packed is not None:
            return packed
        with _locked(path):
            packed = _try_open(path)  # somebody else has made it meanwhile
            return _make(path, source, config) if packed is None else packed
    except OSError as error:
        raise ModelError(
            f"{path}: packed weights cannot be kept there ({error}); make room or set WEIR_CACHE to another folder"
        ) from error


def _make(path: Path, source: ModelSource, config: ModelConfig) -> PackedWeights:
    started_s = time.monotonic()
    tensors = open_tensors(source, config)
    write_packed(path, pack_matrices(tensors, config), pack_arrays(tensors, config))
    packed = open_packed(path)
    _log.info("packed %s in %.1f s: %s", source.name, time.monotonic() - started_s, path)
    return packed


def _try_open(path: Path) -> PackedWeights | None:
    try:
        return open_packed(path)
    except FileNotFoundError:
        return None
    except PackedFileDefect as error:
        _log.warning("%s; it is made again", error)
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The kernel gives the lock back when its holder ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
