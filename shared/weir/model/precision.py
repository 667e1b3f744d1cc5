"""Which arithmetic a model runs in, by its shapes (`weir.core.device`). Nothing here imports torch or numba: every
process of a stack may ask.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from weir.core.device import ARITHMETIC_OF_DEVICE, Arithmetic, Device, Precision, check_precision
from weir.kv.geometry import PAGE_LAYOUT, TOKEN_MAJOR_PAGE_LAYOUT, PageGeometry
from weir.model.architecture import ModelConfig
from weir.model.errors import ModelError

_BYTES: Mapping[Arithmetic, int] = {"int8": 2, "fp32": 4, "bf16": 2}
"""Of a number in a page. int8 is about matrices: keys and values are bfloat16."""
_VERSIONS: Mapping[Arithmetic, int] = {"int8": 2, "fp32": 1, "bf16": 1}
"""Part of every digest: to be raised when results, or files of packed weights, change their bits."""
_GROUP = 32
_TRITON_HEAD_DIMS = (16, 256)


def choose_arithmetic(precision: Precision, config: ModelConfig, device: Device = "cpu") -> Arithmetic:
    """`auto` is the device's first one; on a CPU, int8 where the model's shapes fit its kernels.

    Raises:
        ModelError: the device does not compute this model, or not in this precision.
    """
    try:
        check_precision(precision, device)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if device != "cpu":
        obstacle = triton_obstacle(config)
        if obstacle:
            raise ModelError(f"device {device}: {obstacle}; use --device cpu for this model")
        return ARITHMETIC_OF_DEVICE[device][0] if precision == "auto" else _named(precision)
    if precision == "fp32":
        return "fp32"
    obstacle = int8_obstacle(config)
    if obstacle and precision == "int8":
        raise ModelError(f"precision int8: {obstacle}; use --precision fp32 for this model")
    return "fp32" if obstacle else "int8"


def int8_obstacle(config: ModelConfig) -> str:
    """Why the int8 kernels cannot run the model; empty if they can."""
    inputs = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
    }
    wrong = [f"{name} is {size}" for name, size in inputs.items() if size % _GROUP]
    return f"{', '.join(wrong)}, expected a multiple of {_GROUP}" if wrong else ""


def triton_obstacle(config: ModelConfig) -> str:
    """Why the Triton kernels cannot run the model; empty if they can."""
    least, most = _TRITON_HEAD_DIMS
    if least <= config.head_dim <= most:
        return ""
    return f"head_dim is {config.head_dim}, the attention kernels take {least} to {most}"


def page_geometry(config: ModelConfig, arithmetic: Arithmetic) -> PageGeometry:
    """Of a page whose keys and values are numbers of this arithmetic."""
    return replace(config.page_geometry, dtype_bytes=_BYTES[arithmetic])


def page_layout(device: Device) -> str:
    """Part of every digest."""
    return PAGE_LAYOUT if device == "cpu" else TOKEN_MAJOR_PAGE_LAYOUT


def arithmetic_key(precision: Precision, config: ModelConfig, device: Device = "cpu") -> str:
    """What a digest has to say about arithmetic. Raises ModelError."""
    arithmetic = choose_arithmetic(precision, config, device)
    key = f"{arithmetic} {_VERSIONS[arithmetic]}"
    return key if device == "cpu" else f"{device} {key}"


def _named(precision: Literal["int8", "fp32", "bf16"]) -> Arithmetic:
    return precision
