"""A Hugging Face folder whose matrices are integers: GPTQ, AWQ, compressed-tensors.

A matrix is quantized if the tensor is there that the layout puts in place of its weights; what a list of exceptions
names (`ignore`, `modules_to_not_convert`) has its `weight` as in any folder.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weir.model.errors import ModelError
from weir.model.files.quant_blocks import QuantBlocks
from weir.model.files.quant_layouts import PARTS, Array, QuantMatrix, matrix_shape, read_matrix, wanted_tensors
from weir.model.files.quantization import QuantLayout, QuantScheme
from weir.model.files.safetensors import SafetensorsFolder, StoredValues

_ORDER_FIELDS = {QuantLayout.GPTQ: ("g_idx", "desc_act"), QuantLayout.PACKED: ("weight_g_idx", "actorder")}
"""The tensor that names each input's group, and the field of the configuration that is about it."""


class QuantizedFolder:
    """A `TensorFile`. Every tensor of a quantized matrix is checked when it is made, by headers; so is `g_idx`."""

    def __init__(self, folder: Path, scheme: QuantScheme, expected: Collection[str]) -> None:
        """`expected`: names of the model's tensors. Other biases that are zero, which old tools wrote, are left out.

        Raises ModelError.
        """
        self._folder, self._scheme = folder, scheme
        self._file = SafetensorsFolder(folder, has_integers=True)
        shapes = self._file.shapes()
        self._matrices: dict[str, tuple[int, int]] = {}
        taken: set[str] = set()
        problems: list[str] = []
        for prefix, own in _by_module(shapes).items():
            if PARTS[scheme.layout] not in own:
                continue
            shape = matrix_shape(scheme, own, partial(self._stored, prefix))
            if shape is None:
                problems.append(f"{prefix}{PARTS[scheme.layout]}: nothing there says the shape of a matrix")
                continue
            problems += self._problems_of(prefix, shape, own)
            self._matrices[f"{prefix}weight"] = shape
            taken |= {f"{prefix}{part}" for part in own.keys() - {"bias"}}
            bias = f"{prefix}bias"
            if "bias" in own and bias not in expected and not self._file.read(bias).any():
                taken.add(bias)
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise ModelError(f"{folder}: {'; '.join(problems[:10])}{more}")
        self._plain = {name: shape for name, shape in shapes.items() if name not in taken}
        self._check_plain()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**self._plain, **self._matrices}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        return self._matrix(name).values() if name in self._matrices else self._file.read(name)

    def try_view(self, name: str) -> StoredValues | None:
        return None if name in self._matrices else self._file.try_view(name)

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        """Raises ValueError: the numbers of a matrix fit into no blocks without being rounded."""
        return self._matrix(name).blocks() if name in self._matrices else None

    def _matrix(self, name: str) -> QuantMatrix:
        prefix = name.removesuffix("weight")
        matrix = read_matrix(
            self._scheme,
            self._matrices[name],
            partial(self._stored, prefix),
            lambda part: self._file.read(f"{prefix}{part}"),
        )
        if int(matrix.integers.max()) >> self._scheme.bits:
            raise ModelError(f"{self._folder}: {name} has integers of more than {self._scheme.bits} bits")
        if not np.isfinite(matrix.scales).all():
            raise ModelError(f"{self._folder}: {name} has a scale that is infinite or not a number")
        return matrix

    def _stored(self, prefix: str, part: str) -> Array:
        return self._file.stored(f"{prefix}{part}")

    def _problems_of(self, prefix: str, shape: tuple[int, int], found: dict[str, tuple[int, ...]]) -> Iterator[str]:
        group = self._scheme.group_size or shape[1]
        if shape[1] % group:
            yield f"{prefix}weight has {shape[1]} inputs, no multiple of group_size {group}"
            return
        wanted = wanted_tensors(self._scheme, *shape)
        for part, tensor in wanted.items():
            if part not in found:
                if not tensor.is_optional:
                    yield f"{prefix}{part} is missing"
            elif found[part] != tensor.shape:
                yield f"{prefix}{part} has shape {list(found[part])}, expected {list(tensor.shape)}"
            elif (dtype := self._file.dtype(f"{prefix}{part}")) not in tensor.dtypes:
                yield f"{prefix}{part} is {dtype}, expected {' or '.join(tensor.dtypes)}"
        order, field = _ORDER_FIELDS.get(self._scheme.layout, ("", ""))
        for part in sorted(found.keys() - wanted.keys() - {"bias", order}):
            yield f"{prefix}{part} is not part of a matrix of {self._scheme.layout.value!r}"
        if order in found and not self._is_in_order(f"{prefix}{order}", shape[1], group):
            yield (
                f"quantization_config.{field}: {prefix}{order} puts inputs that are no neighbours into one group; "
                f"only groups of {group} inputs in their order are supported"
            )

    def _is_in_order(self, name: str, num_inputs: int, group: int) -> bool:
        found = self._file.stored(name)
        return np.array_equal(found, np.arange(num_inputs) // group)

    def _check_plain(self) -> None:
        for name in self._plain:
            dtype = self._file.dtype(name)
            if dtype.startswith("I"):
                raise ModelError(f"{self._folder}: {name} is {dtype}, and nothing beside it says what it stands for")


def _by_module(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of each module, by the beginning of its tensors' names, those tensors by the end of their names."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in sorted(shapes):
        module, dot, part = name.rpartition(".")
        modules.setdefault(module + dot, {})[part] = shapes[name]
    return modules
