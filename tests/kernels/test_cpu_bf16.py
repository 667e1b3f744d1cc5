"""bfloat16 in kernels and outside: torch's, to the bit."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weir.ops.simd.bf16 import bf16_from, bf16_of, bf16_to_float32
from weir.ops.simd.jit import kernel

TIES = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x7F7F8000, 0x00008000], np.uint32)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 3.4e38, -3.4e38], np.float32)
RANDOM_BITS = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)


@kernel
def narrow(values: NDArray[np.float32], narrowed: NDArray[np.uint16]) -> None:
    for index in range(values.size):
        narrowed[index] = bf16_of(values[index])


def in_kernel(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    narrowed = np.empty(values.size, np.uint16)
    narrow(values, narrowed)
    return narrowed


@pytest.mark.parametrize("narrowed_by", [in_kernel, bf16_from])
@pytest.mark.parametrize(
    "values", [TIES.view(np.float32), SPECIAL, RANDOM_BITS.view(np.float32)], ids=["ties", "special", "random bits"]
)
def test_numbers_are_rounded_as_torch_does(values: NDArray[np.float32], narrowed_by: object) -> None:
    assert callable(narrowed_by)
    found = narrowed_by(values)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    is_number = ~np.isnan(values)
    assert np.array_equal(found[is_number], expected[is_number])
    assert np.isnan(bf16_to_float32(found[~is_number])).all(), "and no other becomes a number"
