"""Launches silu(gate) * up on a GPU (or in Triton's interpreter)."""

import torch
import triton

from weir.ops.checks import check_rows, check_shape
from weir.ops.silu_mul.kernel import silu_mul_kernel

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """`gate_up` [rows, 2 * width] to `out` [rows, width]; meaning as `reference.silu_mul`.

    Raises:
        ValueError: a shape or stride does not fit.
    """
    num_rows, width = out.shape
    check_shape("gate_up", gate_up, (num_rows, 2 * width))
    check_rows("gate_up", gate_up)
    check_rows("out", out)
    if num_rows == 0:
        return
    silu_mul_kernel[num_rows, triton.cdiv(width, _BLOCK)](
        gate_up, out, gate_up.stride(0), out.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=4
    )
