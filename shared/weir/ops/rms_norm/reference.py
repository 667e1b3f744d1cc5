"""RMSNorm in plain torch."""

import torch


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """[rows, hidden]: x / sqrt(mean(x^2) + epsilon) * weight, in fp32, rounded once.

    With a `residual` [rows, hidden], x is rows + residual, and the residual becomes that sum, rounded to its type.
    """
    values = rows.float()
    if residual is not None:
        residual.copy_(values + residual.float())
        values = residual.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (normed * weight.float()).to(rows.dtype)
