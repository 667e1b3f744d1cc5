"""What launchers ask of tensors before a kernel reads them: a kernel itself would read past an end in silence."""

from collections.abc import Sequence

import torch

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.reference_quantized import KvScales

ALIGN_BYTES = 16


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | None]) -> None:
    """None stands for any size."""
    fits = tensor.dim() == len(expected) and all(
        want is None or size == want for size, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, allowed))}")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Elements of the last dimension must be neighbours: kernels have strides for all others."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} has stride {tensor.stride(-1)}, expected 1")


def check_kv_pages(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Both [pages, kv heads, PAGE_TOKENS, head_dim], views of any stride but of the same one."""
    check_shape("keys", keys, (None, None, PAGE_TOKENS, None))
    check_shape("values", values, keys.shape)
    check_dtype("values", values, keys.dtype)
    check_rows("keys", keys)
    if keys.stride() != values.stride():
        raise ValueError(f"keys have strides {keys.stride()} and values {values.stride()}, expected the same")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """For kernels that must be one variant: Triton compiles another for addresses that are no multiple of 16 bytes."""
    if tensor.data_ptr() % ALIGN_BYTES:
        raise ValueError(f"{name} begins at {tensor.data_ptr():#x}, expected a multiple of {ALIGN_BYTES} bytes")


def check_kv_scales(keys: torch.Tensor, scales: KvScales | None) -> KvScales:
    """Against `keys`, which has been checked. Without scales, something that a kernel may be given in their place."""
    if scales is None:
        if keys.dtype is torch.int8:
            raise ValueError("keys are int8, which needs scales")
        return KvScales(keys[..., 0], keys[..., 0])
    check_dtype("keys", keys, torch.int8)
    for name, tensor in (("scales.keys", scales.keys), ("scales.values", scales.values)):
        check_shape(name, tensor, keys.shape[:3])
        check_dtype(name, tensor, torch.float32)
        check_rows(name, tensor)
    if scales.keys.stride() != scales.values.stride():
        raise ValueError(
            f"scales have strides {scales.keys.stride()} and {scales.values.stride()}, expected the same for both"
        )
    return scales
