"""Float arithmetic of the CPU kernels: exponentials, fused multiply-adds, and bfloat16 as torch has it, to the bit."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.kernels.whole_ops import bf16_to_float32

from weir.ops.cpu.rotary_kv_write import write_value
from weir.ops.simd.bf16 import bf16_from
from weir.ops.simd.float import exp, exp2, fma
from weir.ops.simd.jit import kernel
from weir.ops.simd.loops import address_of

TIES = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x7F7F8000, 0x00008000], np.uint32)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 3.4e38, -3.4e38], np.float32)
RANDOM_BITS = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)


@kernel
def exponentials(x: NDArray[np.float32], natural: NDArray[np.float32], binary: NDArray[np.float32]) -> None:
    for index in range(x.size):
        natural[index] = exp(x[index])
        binary[index] = exp2(x[index])


@kernel
def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    result: np.float32 = fma(a, b, c)
    return result


def both(values: NDArray[np.float32] | list[float]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    x = np.array(values, np.float32)
    natural, binary = np.empty_like(x), np.empty_like(x)
    exponentials(x, natural, binary)
    return natural, binary


def test_exponentials_are_right_to_the_last_bit_or_two() -> None:
    x = np.random.default_rng(1).uniform(-87, 87, 500_000).astype(np.float32)
    natural, binary = both(x)
    np.testing.assert_allclose(natural, np.exp(x.astype(np.float64)), rtol=1.2e-7)
    np.testing.assert_allclose(binary, np.exp2(x.astype(np.float64)), rtol=1.2e-7)


def test_the_exponential_of_zero_is_exactly_one() -> None:
    natural, binary = both([0.0, -0.0])
    assert natural.tolist() == binary.tolist() == [1.0, 1.0]


def test_exponentials_end_at_zero_and_at_a_finite_number() -> None:
    natural, binary = both([-np.inf, -1e30, -127.5, np.inf, 1e30, 128.0])
    assert natural.tolist()[:3] == binary.tolist()[:3] == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(natural[3:], 2.0**127, rtol=1e-4)
    np.testing.assert_allclose(binary[3:], 2.0**127, rtol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0x7FFFFFFF])
def test_what_is_no_number_stays_none(payload: int, sign: float) -> None:
    x = np.array([payload], np.int32).view(np.float32)
    natural, binary = both(np.copysign(x, np.float32(sign)))
    assert np.isnan(natural[0])
    assert np.isnan(binary[0])


def test_fused_multiply_add_rounds_once() -> None:
    small = np.float32(2.0**-12)
    one = np.float32(1)
    # the square's last part, 2**-24, is lost where the product is rounded first
    assert fused(one + small, one + small, -(one + 2 * small)) == np.float32(2.0**-24)


@kernel
def narrow(values: NDArray[np.float32], narrowed: NDArray[np.uint16]) -> None:
    write_value(address_of(values), values.size, address_of(narrowed))


def in_kernel(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    padded = np.resize(values, -(-values.size // 8) * 8)
    narrowed = np.empty(padded.size, np.uint16)
    narrow(padded, narrowed)
    return narrowed[: values.size]


@pytest.mark.parametrize("narrowed_by", [in_kernel, bf16_from])
@pytest.mark.parametrize(
    "values", [TIES.view(np.float32), SPECIAL, RANDOM_BITS.view(np.float32)], ids=["ties", "special", "random bits"]
)
def test_bfloat16_is_rounded_as_torch_does(values: NDArray[np.float32], narrowed_by: object) -> None:
    assert callable(narrowed_by)
    found = narrowed_by(values)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    is_number = ~np.isnan(values)
    assert np.array_equal(found[is_number], expected[is_number])
    assert np.isnan(bf16_to_float32(found[~is_number])).all(), "and no other becomes a number"
