"""Which arithmetic a model runs in, by its shapes (`weir.core.device`). Nothing here imports torch or numba: every
process of a stack may ask.
"""

from collections.abc import Mapping
from dataclasses import replace

from weir.core.device import (
    ARITHMETIC_OF_DEVICE,
    FP8_MATRICES,
    INT8_PAGES,
    Arithmetic,
    Device,
    Precision,
    check_exact,
    check_precision,
)
from weir.kv.geometry import PageGeometry
from weir.model.architecture import ModelConfig
from weir.model.errors import ModelError
from weir.ops.cpu.quantized_rows import GROUP
from weir.ops.head_dims import CPU_HEAD_DIM_STEP, TRITON_HEAD_DIMS, WIDEST_QUANTIZED_ROW

_BYTES: Mapping[Arithmetic, int] = {"int8": 2, "fp32": 4, "bf16": 2, "fp8": 2, "bf16-kv8": 1, "fp8-kv8": 1}
"""Of a number in a page. int8 and fp8 are about matrices: keys and values have 16 bits."""
_SCALE_BYTES = 4
"""Of each head of a token, where numbers in pages have one byte."""
_PRODUCT_STEP = 16
"""Of the sizes of E4M3 matrices, in PyTorch's products of them."""


def choose_arithmetic(
    precision: Precision, config: ModelConfig, device: Device = "cpu", *, exact: bool = False
) -> Arithmetic:
    """`auto` is the device's first one; on a CPU, int8 where the model's shapes fit its kernels.

    Raises:
        ModelError: the device does not compute this model, or not in this precision, or not `exact` as was asked for.
    """
    try:
        check_precision(precision, device)
        check_exact(exact, precision, device)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if device != "cpu":
        obstacle = triton_obstacle(config)
        if obstacle:
            raise ModelError(f"device {device}: {obstacle}; use --device cpu for this model")
        first = ARITHMETIC_OF_DEVICE[device][0]
        arithmetic = first if precision == "auto" else precision
        if arithmetic in FP8_MATRICES and (obstacle := fp8_obstacle(config)):
            raise ModelError(f"precision {arithmetic}: {obstacle}; use --precision {first} for this model")
        return arithmetic
    if precision == "fp32":
        return "fp32"
    obstacle = int8_obstacle(config)
    if obstacle and precision == "int8":
        raise ModelError(f"precision int8: {obstacle}; use --precision fp32 for this model")
    if obstacle and exact:
        raise ModelError(
            f"exact: {obstacle}, so that device cpu computes this model in fp32 by PyTorch, whose products depend on "
            "the batch; leave exact out for this model"
        )
    return "fp32" if obstacle else "int8"


def int8_obstacle(config: ModelConfig) -> str:
    """Why the int8 kernels cannot run the model; empty if they can."""
    sizes = (
        ("hidden_size", config.hidden_size, GROUP),
        ("intermediate_size", config.intermediate_size, GROUP),
        ("num_heads * head_dim", config.num_heads * config.head_dim, GROUP),
        ("head_dim", config.head_dim, CPU_HEAD_DIM_STEP),
    )
    wrong = [f"{name} is {size}, expected a multiple of {step}" for name, size, step in sizes if size % step]
    return "; ".join(wrong)


def fp8_obstacle(config: ModelConfig) -> str:
    """Why the model's matrices cannot be multiplied as E4M3; empty if they can."""
    sizes = (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_heads * head_dim", config.num_heads * config.head_dim),
        ("num_kv_heads * head_dim", config.num_kv_heads * config.head_dim),
    )
    wrong = [
        f"{name} is {size}, expected a multiple of {_PRODUCT_STEP}" for name, size in sizes if size % _PRODUCT_STEP
    ]
    width = config.num_heads * config.head_dim
    if width > WIDEST_QUANTIZED_ROW:
        wrong.append(f"num_heads * head_dim is {width}, a row is quantized up to {WIDEST_QUANTIZED_ROW}")
    return "; ".join(wrong)


def triton_obstacle(config: ModelConfig) -> str:
    """Why the Triton kernels cannot run the model; empty if they can."""
    least, most = TRITON_HEAD_DIMS
    if least <= config.head_dim <= most:
        return ""
    return f"head_dim is {config.head_dim}, the attention kernels take {least} to {most}"


def page_geometry(config: ModelConfig, arithmetic: Arithmetic) -> PageGeometry:
    """Of a page whose keys and values are numbers of this arithmetic."""
    scale_bytes = _SCALE_BYTES if arithmetic in INT8_PAGES else 0
    return replace(config.page_geometry, dtype_bytes=_BYTES[arithmetic], scale_bytes=scale_bytes)
