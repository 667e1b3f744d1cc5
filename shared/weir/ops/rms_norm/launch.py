"""Launches RMSNorm on a GPU (or in Triton's interpreter)."""

import torch
import triton

from weir.ops.checks import check_rows, check_shape
from weir.ops.rms_norm.kernel import rms_norm_kernel

_MAX_HIDDEN = 32768
_ELEMENTS_PER_WARP = 512


def rms_norm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """Writes `out` [rows, hidden] and adds `rows` to `residual`; meaning as `reference.rms_norm`.

    `out` may be `rows`. Raises:
        ValueError: a shape or stride does not fit, or a row has more than 32,768 columns.
    """
    num_rows, hidden = rows.shape
    check_shape("weight", weight, (hidden,))
    check_rows("weight", weight)
    for name, tensor in (("rows", rows), ("out", out), ("residual", rows if residual is None else residual)):
        check_shape(name, tensor, rows.shape)
        check_rows(name, tensor)
    if hidden > _MAX_HIDDEN:
        raise ValueError(f"rows have {hidden} columns, the kernel keeps a row in registers and takes {_MAX_HIDDEN}")
    if num_rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[num_rows,](
        rows,
        rows if residual is None else residual,
        weight,
        out,
        epsilon,
        rows.stride(0),
        rows.stride(0) if residual is None else residual.stride(0),
        out.stride(0),
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), 16),
    )
