"""Packed weights of a model in the model cache: made by whoever comes first, mapped by all, so in memory once.

    magic 8 bytes | index bytes u32 | file bytes u64 | XXH3 of the data u64 | CRC32 of the index u32 | index, JSON
    data from DATA_START on, every piece at a multiple of 64 bytes

A file is written under another name, brought to disk, and then renamed: nobody ever sees half of it. What a killed
process has left under that name, the next one overwrites. What is damaged later is found when the file is opened.
"""

import json
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from weir.core.file_lock import file_lock
from weir.model.architecture import ModelConfig
from weir.model.cpu.packing import Floats, Parts, pack_arrays, pack_matrices
from weir.model.errors import ModelError
from weir.model.files.source import ModelSource
from weir.model.files.tensors import open_tensors
from weir.ops.cpu.linear_pack import ALIGNMENT, PackedMatrix, WeightKind

_log = logging.getLogger(__name__)
_PACKING_TIMEOUT_S = 900.0
FORMAT_VERSION = 2
_MAGIC = b"WEIRPK" + FORMAT_VERSION.to_bytes(2, "little")
_HEAD = struct.Struct("<8sIQQI")
_INDEX_BYTES = 1 << 20
DATA_START = _INDEX_BYTES  # of fixed size, so that data can be written before its index is known


class PackedFileDefect(Exception):
    """The file is not a whole file of packed weights of this version; it has to be made again."""


@dataclass(frozen=True)
class PackedWeights:
    """`mapped` [file bytes] is read-only, the rest are views of it. Names: `weir.model.cpu.packing`."""

    mapped: npt.NDArray[np.uint8]
    matrices: Mapping[str, Parts]
    arrays: Mapping[str, Floats]

    def offset_of(self, part: PackedMatrix) -> int:
        """Where the bytes of a part begin in `mapped`."""
        return part.data.ctypes.data - self.mapped.ctypes.data

    @property
    def num_bytes(self) -> int:
        """What one step reads at least: all matrices but an embedding that is only looked up in."""
        return sum(part.data.nbytes for name, parts in self.matrices.items() if name != "embedding" for part in parts)


def write_packed(path: Path, matrices: Iterable[tuple[str, Parts]], arrays: Iterable[tuple[str, Floats]]) -> None:
    """Takes one matrix at a time; for one caller at a time. The file is whole and on disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("wb") as file:
            writer = _Writer(file)
            index = {
                "matrices": {name: [_entry(part, writer.add(part.data)) for part in parts] for name, parts in matrices},
                "arrays": {name: [array.shape, writer.add(array.view(np.uint8))] for name, array in arrays},
            }
            writer.finish(json.dumps(index).encode())
        temporary.rename(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def open_packed(path: Path) -> PackedWeights:
    """Maps the file and reads all of it once, to be sure of every byte: 0.1 s a GB once it is in memory.

    Raises:
        FileNotFoundError: there is none.
        PackedFileDefect: says what is wrong with it.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < DATA_START:
            raise PackedFileDefect(f"{path}: has only {size} bytes")
        mapped = np.frombuffer(mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    index = _read_index(path, mapped)
    matrices = {
        name: tuple(_matrix(mapped, *entry) for entry in entries) for name, entries in index["matrices"].items()
    }
    return PackedWeights(mapped, matrices, {name: _array(mapped, *entry) for name, entry in index["arrays"].items()})


class _Writer:
    """Appends pieces, each aligned; the head comes last."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_64()
        self._end = DATA_START
        file.seek(DATA_START)

    def add(self, data: npt.NDArray[np.uint8]) -> int:
        """Returns where it begins."""
        offset = self._end
        self._write(np.ascontiguousarray(data).data.cast("B"))
        self._write(memoryview(bytes(-self._end % ALIGNMENT)))
        return offset

    def finish(self, index: bytes) -> None:
        if _HEAD.size + len(index) > _INDEX_BYTES:
            raise OSError(f"the index of the packed weights takes {len(index)} bytes, at most {_INDEX_BYTES}")
        self._file.seek(0)
        self._file.write(_HEAD.pack(_MAGIC, len(index), self._end, self._digest.intdigest(), zlib.crc32(index)))
        self._file.write(index)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _write(self, piece: memoryview) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self._end += len(piece)


def _read_index(path: Path, mapped: npt.NDArray[np.uint8]) -> Mapping[str, Any]:
    magic, index_bytes, file_bytes, digest, crc = _HEAD.unpack(mapped[: _HEAD.size].tobytes())
    if magic != _MAGIC:
        raise PackedFileDefect(f"{path}: is not a file of packed weights of version {FORMAT_VERSION}")
    index = mapped[_HEAD.size : _HEAD.size + index_bytes].tobytes()
    if zlib.crc32(index) != crc:
        raise PackedFileDefect(f"{path}: its index is damaged")
    if file_bytes != mapped.size:
        raise PackedFileDefect(f"{path}: has {mapped.size} bytes, its head says {file_bytes}")
    if xxhash.xxh3_64_intdigest(mapped[DATA_START:].data) != digest:
        raise PackedFileDefect(f"{path}: its data is damaged")
    found: Mapping[str, Any] = json.loads(index)
    return found


def _entry(part: PackedMatrix, offset: int) -> list[int]:
    return [part.kind, part.num_outputs, part.num_inputs, offset, part.data.nbytes]


def _matrix(
    mapped: npt.NDArray[np.uint8], kind: int, num_outputs: int, num_inputs: int, offset: int, num_bytes: int
) -> PackedMatrix:
    return PackedMatrix(WeightKind(kind), num_outputs, num_inputs, mapped[offset : offset + num_bytes])


def _array(mapped: npt.NDArray[np.uint8], shape: list[int], offset: int) -> Floats:
    num_bytes = 4 * int(np.prod(shape))
    return mapped[offset : offset + num_bytes].view(np.float32).reshape(shape)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_packed(source: ModelSource, config: ModelConfig, digest: str, cache_dir: Path) -> PackedWeights:
    """`digest` names weights, configuration and packing (`weir.model.files.digest`), and so the file.

    Several processes at once make it once: the others wait for the lock.

    Raises:
        ModelError: the model cannot be packed, or the cache cannot be written.
        StillLocked: another process has been packing it for too long.
    """
    path = cache_dir / "packed" / f"{source.file_stem}-{digest}-{FORMAT_VERSION}.weights"
    try:
        packed = _try_open(path)
        if packed is not None:
            return packed
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock"), f"packing {source.name}", timeout_s=_PACKING_TIMEOUT_S):
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
