"""Tensors of a Hugging Face folder: one or more safetensors files."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from weir.model.errors import ModelError
from weir.model.quant_blocks import QuantBlocks

_SUPPORTED = ("F32", "F16", "BF16")


class SafetensorsFolder:
    """All `*.safetensors` of a folder as one set of tensors."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{folder}: no *.safetensors file")
        for path in paths:
            self._read_header(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        dtype, raw = self._raw(name)
        if dtype == "BF16":  # the upper half of an fp32 number, which numpy cannot name
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(self._shapes[name])
        return raw.view({"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32).reshape(self._shapes[name])

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        """None: these files hold floating-point numbers."""
        return None

    def _raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """Type and bytes. The file is `length of the header u64 | header, JSON | data`, and was checked when opened."""
        path = self._file_of[name]
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(header_bytes))[name]
        first, last = entry["data_offsets"]
        return entry["dtype"], np.fromfile(path, np.uint8, count=last - first, offset=8 + header_bytes + first)

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    header = file.get_slice(name)
                    if name in self._file_of:
                        raise ModelError(f"{path}: tensor {name} is in {self._file_of[name].name} too")
                    if header.get_dtype() not in _SUPPORTED:
                        raise ModelError(
                            f"{path}: tensor {name} is {header.get_dtype()}; Weir reads {', '.join(_SUPPORTED)}"
                        )
                    self._file_of[name] = path
                    self._shapes[name] = tuple(header.get_shape())
        except SafetensorError as error:
            raise ModelError(f"{path}: broken safetensors file ({error})") from error
