"""Seeded random weights made where they are used: nothing of them passes through the host's memory.

The numbers are not those of `dummy_weights`, nor equal on two kinds of device: each has a generator of its own.
"""

import torch

from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.files.dummy import DUMMY_SEED, SPREAD, is_norm, tensor_seed
from weir.model.torch.weights import Weights, stack_weights


def dummy_tensor_on(
    device: torch.device, dtype: torch.dtype, name: str, shape: tuple[int, ...], seed: int = DUMMY_SEED
) -> torch.Tensor:
    """Depends on its name and the seed, not on the tensors made before it."""
    if is_norm(name):
        return torch.ones(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(tensor_seed(name, seed))
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-SPREAD, SPREAD, generator=generator)


def dummy_weights_on(device: torch.device, dtype: torch.dtype, config: ModelConfig, seed: int = DUMMY_SEED) -> Weights:
    """A whole model there."""
    shapes = tensor_shapes(config)
    return stack_weights(lambda name: dummy_tensor_on(device, dtype, name, shapes[name], seed), config)
