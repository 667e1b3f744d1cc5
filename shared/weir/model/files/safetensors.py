"""Tensors of a Hugging Face folder: one or more safetensors files. numpy only, so bfloat16 is widened here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from weir.model.errors import ModelError
from weir.model.files.quant_blocks import QuantBlocks

_SUPPORTED = ("F32", "F16", "BF16")
INDEX_NAME = "model.safetensors.index.json"

StoredValues = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.int16]
"""As a file has them. numpy has no bfloat16: int16 are its bits."""
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<i2"}
_INTEGERS = {"I8": "<i1", "I32": "<i4", "I64": "<i8"}
"""Of quantized weights. No I16, whose type in numpy is taken for bfloat16."""


def safetensors_files(folder: Path) -> list[Path]:
    """Those that the folder's index names; without one, all but the `consolidated*` copies in Mistral's own naming.

    Raises:
        ModelError: there are none, or the index cannot be read or names a file that is not there.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not paths:
        raise ModelError(f"{folder}: no *.safetensors file")
    return paths


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: cannot be read as an index of tensors ({error!r})") from error
    # by what lies in the folder: nothing outside of it is read
    there = {path.name for path in index.parent.iterdir() if path.is_file()}
    missing = sorted(names - there)
    if missing or not names:
        raise ModelError(f"{index}: names {', '.join(missing)[:200] or 'no file'}, which the folder does not have")
    return sorted(index.parent / name for name in names)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies: `offset` in bytes from the start of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFolder:
    """All safetensors files of a folder as one set of tensors."""

    def __init__(self, folder: Path, *, has_integers: bool = False) -> None:
        """`has_integers`: some tensors may be of integers, which `stored` gives."""
        self._entries: dict[str, _Entry] = {}
        dtypes = (*_SUPPORTED, *(_INTEGERS if has_integers else ()))
        for path in safetensors_files(folder):
            for name, entry in _read_header(path, dtypes).items():
                if name in self._entries:
                    raise ModelError(f"{path}: tensor {name} is in {self._entries[name].path.name} too")
                self._entries[name] = entry

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def dtype(self, name: str) -> str:
        """In the words of the format: F32, BF16, I32 …"""
        return self._entries[name].dtype

    def read(self, name: str) -> npt.NDArray[np.float32]:
        stored = self.stored(name)
        if stored.dtype == np.int16:  # bfloat16 is the upper half of a float32
            return (stored.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.array(stored, dtype=np.float32)

    def try_view(self, name: str) -> StoredValues | None:
        stored: StoredValues = self.stored(name)
        return stored

    def stored(self, name: str) -> npt.NDArray[Any]:
        """Mapped. Writes to it, which nobody makes, would be this process's own."""
        entry = self._entries[name]
        dtype = (_STORED | _INTEGERS)[entry.dtype]
        return np.asarray(np.memmap(entry.path, dtype=dtype, mode="c", offset=entry.offset, shape=entry.shape))

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        """None: these files hold floating-point numbers."""
        return None


def _read_header(path: Path, dtypes: Sequence[str]) -> dict[str, _Entry]:
    """8 bytes of length, a JSON object of tensors, their data: https://huggingface.co/docs/safetensors"""
    try:
        with safe_open(path, framework="np"):  # the library's checks: sizes, overlaps, the end of the file
            pass
    except SafetensorError as error:
        raise ModelError(f"{path}: broken safetensors file ({error})") from error
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    entries = {}
    for name, fields in header.items():
        if fields["dtype"] not in dtypes:
            raise ModelError(f"{path}: tensor {name} is {fields['dtype']}; Weir reads {', '.join(dtypes)}")
        offset = 8 + header_bytes + fields["data_offsets"][0]
        entries[name] = _Entry(path, fields["dtype"], tuple(fields["shape"]), offset)
    return entries
