"""Tensors of a Hugging Face folder: one or more safetensors files."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from weir.model.errors import ModelError

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

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor = file.get_tensor(name)
            assert isinstance(tensor, torch.Tensor)
            return tensor.to(torch.float32)

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
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
