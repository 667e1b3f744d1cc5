"""Reads the header of a GGUF file: metadata and where the tensors lie.

Not through `gguf.GGUFReader`: that one makes several numpy arrays for each of the tokenizer's hundred thousand strings
and takes 2.4 s where this takes 0.05 s, and every process of a stack reads a header.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata     key string, type u32, value
    tensors      name string, dimensions u32, each u64, fastest first | type u32 | offset u64 from the data's start
    padding to `general.alignment` | data
"""

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weir.model.errors import ModelError

GgufValue = bool | int | float | str | list["GgufValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_MAX_DIMENSIONS = 8
_DEFAULT_ALIGNMENT = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` slowest dimension first, as in torch; `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header."""

    path: Path
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]

    def find(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of `key`, or `default` if the file has none. Raises ModelError if it is of another type."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ModelError(f"{self.path}: {key} is {type(value).__name__} {value!r:.60}, expected {kind.__name__}")
        return value

    def get(self, key: str, kind: type[T]) -> T:
        """The value of `key`. Raises ModelError if it is missing or of another type."""
        value = self.find(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: has no {key}")
        return value


def read_gguf(path: Path, *, with_texts: bool = True) -> GgufFile:
    """Reads the header; the tensors' bytes are not touched.

    Without texts the metadata lack all arrays of strings (a vocabulary and its merges are a hundred thousand), which
    saves three quarters of the time.

    Raises:
        ModelError: not a GGUF file, cut off, or of a version that Weir does not know.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data, with_texts=with_texts))
    except (struct.error, UnicodeDecodeError, OverflowError, ValueError) as error:
        raise ModelError(f"{path}: broken or cut-off GGUF file ({error})") from error


class _Cursor:
    """Reads forward; runs into struct.error or ValueError at the end of the file, never past it."""

    def __init__(self, data: mmap.mmap, *, with_texts: bool) -> None:
        self._data = data
        self._end = len(data)
        self._with_texts = with_texts
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        start, self.offset = self.offset, self.offset + num_bytes
        return self._data[start : self.offset]

    def scalar(self, layout: struct.Struct) -> bool | int | float:
        (value,) = layout.unpack_from(self._data, self.offset)
        self.offset += layout.size
        assert isinstance(value, bool | int | float)
        return value

    def u32(self) -> int:
        return int(self.scalar(_SCALARS[4]))

    def u64(self) -> int:
        return int(self.scalar(_SCALARS[10]))

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things of at least `least_bytes` each, checked against what is left of the file."""
        number = self.u64()
        if number * least_bytes > self._end - self.offset:
            raise ValueError(f"{number} {what} at byte {self.offset} do not fit into the file")
        return number

    def string(self) -> str:
        length = self.count("bytes of text", 1)
        start = self.offset
        self.offset = start + length
        return self._data[start : self.offset].decode()

    def value(self, type_id: int) -> GgufValue | None:
        """None: an array of strings that is not wanted."""
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array()
        return self.scalar(self._layout(type_id))

    def _array(self) -> list[GgufValue] | None:
        element_type = self.u32()
        if element_type == _STRING:
            return self._strings(self.count("strings", 8))
        if element_type == _ARRAY:
            raise ValueError("arrays of arrays are not supported")
        layout = self._layout(element_type)
        number = self.count("values", layout.size)
        # one call for all: an array of token types has as many entries as the vocabulary
        values = struct.unpack_from(f"<{number}{layout.format[-1]}", self._data, self.offset)
        self.offset += number * layout.size
        return list(values)

    def _strings(self, number: int) -> list[GgufValue] | None:
        """As `string`, in one loop: each call counts."""
        data, end, offset, unpack_length = self._data, self._end, self.offset, _SCALARS[10].unpack_from
        starts = []
        for _ in range(number):
            (length,) = unpack_length(data, offset)
            offset += 8
            if length > end - offset:
                raise ValueError(f"{length} bytes of text at byte {offset} do not fit into the file")
            starts.append(offset)
            offset += length
        self.offset = offset
        if not self._with_texts:
            return None
        ends = [start - 8 for start in starts[1:]] + [offset]
        return [data[start:end].decode() for start, end in zip(starts, ends, strict=True)]

    def _layout(self, type_id: int) -> struct.Struct:
        layout = _SCALARS.get(type_id)
        if layout is None:
            raise ValueError(f"unknown metadata type {type_id} at byte {self.offset}")
        return layout


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    magic = cursor.take(len(_MAGIC))
    if magic != _MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r})")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version}; Weir reads versions {_VERSIONS}")
    num_tensors = cursor.count("tensors", 24)
    num_pairs = cursor.count("metadata entries", 12)
    values = _collect(num_pairs, lambda: (cursor.string(), cursor.value(cursor.u32())), "metadata key")
    metadata = {key: value for key, value in values.items() if value is not None}
    entries = _collect(num_tensors, lambda: _tensor_entry(cursor), "tensor")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, expected a power of two")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: GgufTensor(name, shape, type_id, data_start + offset)
        for name, (shape, type_id, offset) in entries.items()
    }
    return GgufFile(path, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    name = cursor.string()
    num_dimensions = cursor.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
    return name, (shape, cursor.u32(), cursor.u64())


def _collect(number: int, read: Callable[[], tuple[str, T]], what: str) -> dict[str, T]:
    found: dict[str, T] = {}
    for _ in range(number):
        name, value = read()
        if name in found:
            raise ValueError(f"{what} {name} occurs twice")
        found[name] = value
    return found
