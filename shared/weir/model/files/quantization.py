"""`quantization_config` of a folder's config.json: how its integers are to be read, or why Weir does not read them.

gptq                 AutoGPTQ, GPTQModel: checkpoint_format gptq (zeros stored minus 1) and gptq_v2
awq                  AutoAWQ: version gemm
compressed-tensors   llm-compressor: formats pack-quantized and int-quantized
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.model.errors import ModelError
from weir.ops.cpu.quantized_rows import GROUP

_BITS = (4, 8)
_WHOLE_ROW = -1


class QuantLayout(enum.Enum):
    """How the tensors of a matrix are named and packed (`weir.model.files.quant_layouts`)."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "pack-quantized"
    INTEGERS = "int-quantized"


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """value = scale * (integer - zero), a scale and a zero for each `group_size` inputs of an output; None: for all.

    `zeros_less_one`: they are stored minus 1. `has_zeros`: they are stored; else zero is the middle.
    """

    layout: QuantLayout
    bits: int
    group_size: int | None
    has_zeros: bool = True
    zeros_less_one: bool = False


class _Fields:
    """An object of JSON within `quantization_config`, whose path its errors name."""

    def __init__(self, path: Path, name: str, value: object) -> None:
        self._path, self._name = path, name
        if not isinstance(value, dict):
            raise ModelError(f"{path}: {name} is {value!r}, expected an object")
        self._fields: Mapping[str, Any] = value

    def get(self, name: str, default: object = None) -> Any:
        """What is null is as if it were missing."""
        value = self._fields.get(name)
        return default if value is None else value

    def part(self, name: str) -> "_Fields":
        return _Fields(self._path, f"{self._name}.{name}", self._fields.get(name))

    def parts(self) -> list["_Fields"]:
        return [self.part(name) for name in self._fields]

    def need(self, name: str, supported: Sequence[object], default: object = None) -> Any:
        """One of `supported`, of the same type: 1 is no true."""
        value = self.get(name, default)
        if not any(type(value) is type(one) and value == one for one in supported):
            raise self.refusal(name, value, ", ".join(map(repr, supported)))
        return value

    def need_none(self, *names: str) -> None:
        """Null, missing, false or empty."""
        for name in names:
            if self._fields.get(name):
                raise self.refusal(name, self._fields[name], "null")

    def group_size(self) -> int | None:
        """None: whole rows."""
        value = self.get("group_size", _WHOLE_ROW)
        if type(value) is not int or (value != _WHOLE_ROW and (value <= 0 or value % GROUP)):
            raise self.refusal("group_size", value, f"multiples of {GROUP}, and {_WHOLE_ROW} for whole rows")
        return None if value == _WHOLE_ROW else value

    def refusal(self, name: str, value: object, supported: str) -> ModelError:
        return ModelError(f"{self._path}: {self._name}.{name} {value!r} is not supported, only {supported}")


def quant_scheme(path: Path, config: Mapping[str, object]) -> QuantScheme | None:
    """Of the fields of a config.json at `path`; None: its weights are no integers.

    Raises ModelError: names the field, its value, and what Weir reads.
    """
    value = config.get("quantization_config", config.get("compression_config"))
    if value is None:
        return None
    fields = _Fields(path, "quantization_config", value)
    match fields.get("quant_method"):
        case "gptq":
            return _gptq(fields)
        case "awq":
            return _awq(fields)
        case "compressed-tensors":
            return _compressed_tensors(fields)
        case other:
            raise fields.refusal(
                "quant_method",
                other,
                "'gptq', 'awq', 'compressed-tensors'; Weir also reads folders of float32, float16 and bfloat16, "
                "and GGUF files",
            )


def folder_scheme(folder: Path) -> QuantScheme | None:
    """Of a folder whose config.json `config_from_hf` has read. Raises ModelError."""
    path = folder / "config.json"
    return quant_scheme(path, json.loads(path.read_bytes()))


def _gptq(fields: _Fields) -> QuantScheme:
    """`desc_act` may be true: whether groups are in order is in the tensors (`g_idx`)."""
    fields.need_none("is_marlin_format", "dynamic", "rotation")
    fields.need("pack_dtype", ["int32"], "int32")
    # GPTQModel calls it `format`, too
    name = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    checkpoint_format = fields.need(name, ["gptq", "gptq_v2"], "gptq")
    bits = fields.need("bits", _BITS)
    return QuantScheme(
        QuantLayout.GPTQ, bits, fields.group_size(), has_zeros=True, zeros_less_one=checkpoint_format == "gptq"
    )


def _awq(fields: _Fields) -> QuantScheme:
    version = fields.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise fields.refusal("version", version, "'gemm'")
    fields.need("zero_point", [True], True)
    # AutoAWQ's own names, beside those that transformers writes
    bits = fields.need("bits" if fields.get("bits") is not None else "w_bit", [4])
    return QuantScheme(QuantLayout.AWQ, bits, fields.group_size())


def _compressed_tensors(fields: _Fields) -> QuantScheme:
    fields.need_none("kv_cache_scheme")
    sparsity = fields.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise fields.refusal("sparsity_config", sparsity, "dense weights")
    transform = fields.get("transform_config")
    if transform and not (isinstance(transform, dict) and not transform.get("config_groups")):
        raise fields.refusal("transform_config", transform, "null")
    layout = QuantLayout(fields.need("format", [QuantLayout.PACKED.value, QuantLayout.INTEGERS.value]))
    schemes = [_of_group(group, layout) for group in fields.part("config_groups").parts()]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise fields.refusal("config_groups", fields.get("config_groups"), "one or several with equal weights")
    return schemes[0]


def _of_group(group: _Fields, layout: QuantLayout) -> QuantScheme:
    weights = group.part("weights")
    weights.need("type", ["int"], "int")
    weights.need_none("dynamic", "block_structure")
    # by their own weights, groups stay in order
    weights.need("actorder", ["static", "weight"], "static")
    group.need_none("output_activations")
    group.need("format", [layout.value], layout.value)
    if group.get("input_activations") is not None:
        inputs = group.part("input_activations")
        inputs.need("type", ["int"], "int")
        inputs.need("num_bits", [8])
        inputs.need("dynamic", [True], False)
    strategy = weights.need("strategy", ["group", "channel"])
    if strategy == "group" and weights.get("group_size") is None:
        raise weights.refusal("group_size", None, f"multiples of {GROUP} with strategy 'group'")
    symmetric = weights.need("symmetric", [True, False], True)
    group_size = weights.group_size() if strategy == "group" else None
    return QuantScheme(layout, weights.need("num_bits", _BITS), group_size, has_zeros=not symmetric)
