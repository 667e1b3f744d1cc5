"""A model's tensors as Weir names and orders them, of files that arrange some in another way.

qkv_proj, gate_up_proj      the matrices that they are made of, one below the other
norms about 0               1 + w, what a layer multiplies with
part of a head rotates      rows of queries and keys in the order of `partial_rotary_order`
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weir.model.architecture import ModelConfig, partial_rotary_order
from weir.model.files.quant_blocks import QuantBlocks
from weir.model.files.safetensors import StoredValues
from weir.model.files.tensor_file import TensorFile


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows [first, last) of a tensor of the file."""

    name: str
    first: int
    last: int


class ArrangedTensors:
    """A `TensorFile` over another one."""

    def __init__(self, file: TensorFile, config: ModelConfig, *, has_offset_norms: bool) -> None:
        """`has_offset_norms`: those of the file are to be added to 1."""
        self._file = file
        self._has_offset_norms = has_offset_norms
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, _Place] = {}
        for name, shape in file.shapes().items():
            for part, place in _parts(name, shape, config):
                self._shapes[part] = (place.last - place.first, *shape[1:])
                self._places[part] = place
        order = partial_rotary_order(config)
        self._order_of = {
            name: _in_every_head(order, shape[0])
            for name, shape in self._shapes.items()
            if order is not None and (".q_proj." in name or ".k_proj." in name) and shape[0] % len(order) == 0
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        values = self._file.read(self._places[name].name)
        if self._is_offset(name):
            values += np.float32(1.0)
        return np.ascontiguousarray(self._rows(name, values))

    def try_view(self, name: str) -> StoredValues | None:
        if name in self._order_of or self._is_offset(name):
            return None
        place = self._places[name]
        stored = self._file.try_view(place.name)
        return None if stored is None else stored[place.first : place.last]

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        blocks = self._file.try_read_blocks(self._places[name].name)
        return None if blocks is None else blocks.map_rows(lambda rows: self._rows(name, rows))

    def _is_offset(self, name: str) -> bool:
        return self._has_offset_norms and name.endswith("norm.weight")

    def _rows(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        place, order = self._places[name], self._order_of.get(name)
        own = values[place.first : place.last]
        return own if order is None else own[order]


def _parts(name: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[tuple[str, _Place]]:
    """What is in a tensor of the file. One whose rows do not add up stays whole, and is refused by its name."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused: Mapping[str, Mapping[str, int]] = {
        "qkv_proj": {"q_proj": query, "k_proj": key, "v_proj": key},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    for fused_name, members in fused.items():
        if f".{fused_name}." in name and shape[0] == sum(members.values()):
            first = 0
            for member, num_rows in members.items():
                place = _Place(name, first, first + num_rows)
                yield name.replace(f".{fused_name}.", f".{member}."), place
                first += num_rows
            return
    yield name, _Place(name, 0, shape[0] if shape else 0)


def _in_every_head(order: npt.NDArray[np.intp], num_rows: int) -> npt.NDArray[np.intp]:
    starts = np.arange(0, num_rows, len(order), dtype=np.intp)
    return (starts[:, None] + order[None, :]).reshape(-1)
