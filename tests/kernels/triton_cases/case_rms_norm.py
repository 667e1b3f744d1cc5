import pytest
import torch
from tests.kernels.triton_cases.support import IS_INTERPRETED, TOLERANCES, normal, poisoned

from weir.ops import reference
from weir.ops.gpu.rms_norm import rms_norm


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("hidden", [1, 63, 576, 4096, 5000])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_it_equals_the_reference(num_rows: int, hidden: int, dtype: torch.dtype, atol: float, rtol: float) -> None:
    torch.manual_seed(42)
    rows, weight = normal(num_rows, hidden, dtype=dtype), normal(hidden, dtype=dtype)
    out = poisoned(num_rows, hidden, dtype=dtype)
    rms_norm(rows, weight, 1e-5, out)
    torch.testing.assert_close(out, reference.rms_norm(rows, weight, 1e-5), atol=atol, rtol=rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
def test_the_residual_becomes_the_sum_that_is_normed(dtype: torch.dtype, atol: float, rtol: float) -> None:
    torch.manual_seed(43)
    rows, residual, weight = normal(5, 576, dtype=dtype), normal(5, 576, dtype=dtype), normal(576, dtype=dtype)
    expected_residual = residual.clone()
    expected = reference.rms_norm(rows, weight, 1e-5, expected_residual)
    out = poisoned(5, 576, dtype=dtype)
    rms_norm(rows, weight, 1e-5, out, residual)
    # the interpreter cuts fp32 down to bf16 without rounding
    is_exact = dtype != torch.bfloat16 or not IS_INTERPRETED
    torch.testing.assert_close(residual, expected_residual, atol=0 if is_exact else atol, rtol=0 if is_exact else rtol)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def test_a_row_is_the_same_to_the_bit_in_every_batch() -> None:
    torch.manual_seed(44)
    rows, weight = normal(7, 577), normal(577)
    together, alone = poisoned(7, 577), poisoned(1, 577)
    rms_norm(rows, weight, 1e-5, together)
    for row in range(7):
        rms_norm(rows[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], together[row])


def test_it_works_in_place_and_on_part_of_a_wider_row() -> None:
    torch.manual_seed(45)
    wide, weight = normal(3, 100), normal(63)
    expected = reference.rms_norm(wide[:, :63], weight, 1e-5)
    beyond = wide[:, 63:].clone()
    rms_norm(wide[:, :63], weight, 1e-5, wide[:, :63])
    torch.testing.assert_close(wide[:, :63], expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(wide[:, 63:], beyond)


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \[64\], expected \[63\]"):
        rms_norm(normal(2, 63), normal(64), 1e-5, poisoned(2, 63))
    with pytest.raises(ValueError, match=r"residual has shape \[3, 63\], expected \[2, 63\]"):
        rms_norm(normal(2, 63), normal(63), 1e-5, poisoned(2, 63), normal(3, 63))
    with pytest.raises(ValueError, match="32769 columns"):
        rms_norm(normal(1, 32769), normal(32769), 1e-5, poisoned(1, 32769))
