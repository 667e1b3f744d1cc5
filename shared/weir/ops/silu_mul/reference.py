"""The gate of SwiGLU in plain torch."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * width], gate then up, to silu(gate) * up [rows, width], in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
