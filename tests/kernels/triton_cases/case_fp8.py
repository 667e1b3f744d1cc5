"""E4M3 rows, matrices and their products: exact where only rounding to E4M3 is asked for."""

import pytest
import torch
from tests.kernels.triton_cases.support import DEVICE, IS_INTERPRETED, normal, poisoned

from weir.ops import reference_quantized as reference
from weir.ops.gpu import fp8_product as products
from weir.ops.gpu.fp8_rows import gated_quantize, quantize_rows
from weir.ops.gpu.rms_norm import rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def quantized(num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows are quantized to, all NaN."""
    values = torch.full((num_rows, width), 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    return values, poisoned(num_rows)


def assert_nearly_equal(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Of numbers whose last bits differ a few are rounded to the neighbour: an eighth apart at most."""
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=1e-5)
    torch.testing.assert_close(found[0].float(), expected[0].float(), atol=2**-9, rtol=0.13)
    assert (found[0].float() != expected[0].float()).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 63), (2, 1536), (5, 5000)])
def test_rows_are_quantized_to_the_bit_as_pytorch_rounds(num_rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(42)
    rows = normal(num_rows, width, dtype=dtype) * torch.logspace(-6, 3, num_rows, device=DEVICE).to(dtype)[:, None]
    out, scales = quantized(num_rows, width)
    quantize_rows(rows, out, scales)
    expected, expected_scales = reference.quantize_rows(rows)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_every_e4m3_number_and_every_tie_between_two_is_rounded_as_pytorch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.unique(codes[codes.isfinite()])
    ties = (numbers[1:] + numbers[:-1]) / 2
    nearby = torch.cat([numbers, ties, ties * (1 + 2**-20), ties * (1 - 2**-20), torch.tensor([448.0])])
    out, scales = quantized(1, len(nearby))
    quantize_rows(nearby[None].to(DEVICE), out, scales)
    assert scales.tolist() == [1.0]
    assert torch.equal(out.cpu().float(), nearby.to(torch.float8_e4m3fn).float()[None])


def test_a_row_of_zeros_has_a_scale_and_what_is_no_number_stays_none() -> None:
    rows = normal(3, 40)
    rows[0], rows[1, 7], rows[2, 7] = 0.0, float("nan"), float("inf")
    out, scales = quantized(3, 40)
    quantize_rows(rows, out, scales)
    assert bool((out[0].float() == 0).all())
    assert float(scales[0]) > 0
    assert not bool((out.float() * scales[:, None])[1:, 7].isfinite().any())


@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("hidden", [63, 576, 4096])
def test_a_norm_is_quantized_as_the_reference_does(hidden: int, has_residual: bool) -> None:
    torch.manual_seed(43)
    rows, weight = normal(5, hidden), normal(hidden)
    residual = normal(5, hidden) if has_residual else None
    expected_residual = residual.clone() if residual is not None else None
    expected = reference.rms_norm_quantize(rows, weight, 1e-5, expected_residual)
    out, scales = quantized(5, hidden)
    rms_norm(rows, weight, 1e-5, out, residual, scales)
    assert_nearly_equal((out, scales), expected)
    if residual is not None and expected_residual is not None:
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 63), (2, 4096), (5, 5000)])
def test_a_gate_is_quantized_as_the_reference_does(num_rows: int, width: int) -> None:
    torch.manual_seed(44)
    gate_up = normal(num_rows, 2 * width)
    out, scales = quantized(num_rows, width)
    for activation in ("silu", "gelu_tanh"):
        gated_quantize(gate_up, out, scales, activation)
        assert_nearly_equal((out, scales), reference.gated_quantize(gate_up, activation))


def operands(num_rows: int, num_out: int, num_in: int) -> list[torch.Tensor]:
    rows, matrix = normal(num_rows, num_in), normal(num_out, num_in)
    return [tensor for pair in map(reference.quantize_rows, (rows, matrix)) for tensor in pair]


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"),
    [(torch.float32, 1e-4, 1e-5), (torch.float16, 2e-2, 1e-3), (torch.bfloat16, 2e-1, 1.6e-2)],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("num_rows", "num_out", "num_in"), [(1, 16, 16), (3, 80, 48), (16, 96, 400), (70, 144, 130)])
def test_a_product_is_that_of_the_reference(
    num_rows: int, num_out: int, num_in: int, has_bias: bool, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    torch.manual_seed(45)
    given = operands(num_rows, num_out, num_in)
    bias = normal(num_out, dtype=dtype) if has_bias else None
    out = poisoned(num_rows, num_out, dtype=dtype)
    rows, row_scales, matrix, matrix_scales = given
    products.fp8_product(rows, row_scales, matrix, matrix_scales, bias, out)
    expected = reference.scaled_product(rows, row_scales, matrix, matrix_scales, bias, dtype)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def test_a_row_that_is_no_number_is_none_in_the_product() -> None:
    rows, row_scales, matrix, matrix_scales = operands(3, 32, 64)
    rows.view(torch.uint8)[1, 5] = 0x7F
    out = poisoned(3, 32)
    products.fp8_product(rows, row_scales, matrix, matrix_scales, None, out)
    assert out.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.filterwarnings("ignore:.*subtracting.*")
def test_the_product_that_a_device_gets_is_right() -> None:
    chosen = products.choose_product(DEVICE)
    assert (chosen is products.fp8_product) == IS_INTERPRETED or torch.cuda.get_device_capability() < (8, 9)
    assert products.problem_of(chosen, DEVICE) == ""


def test_a_library_that_refuses_or_computes_something_else_is_not_used() -> None:
    def refusing(
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        matrix: torch.Tensor,
        matrix_scales: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        raise RuntimeError("row-wise scaling is for others\nat some place")

    def wrong(
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        matrix: torch.Tensor,
        matrix_scales: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        out.zero_()

    assert products.problem_of(refusing, DEVICE) == "row-wise scaling is for others"
    assert products.problem_of(wrong, DEVICE) == "a small product is 100.0% off"


def test_misfits_are_named() -> None:
    out, scales = quantized(2, 63)
    with pytest.raises(ValueError, match=r"out has shape \[2, 63\], expected \[2, 64\]"):
        quantize_rows(normal(2, 64), out, scales)
    with pytest.raises(ValueError, match=r"out is torch\.float32, expected torch\.float8_e4m3fn"):
        rms_norm(normal(2, 63), normal(63), 1e-5, poisoned(2, 63), None, scales)
    with pytest.raises(ValueError, match="32769 columns"):
        quantize_rows(normal(1, 32769), *quantized(1, 32769))
    rows, row_scales, matrix, matrix_scales = operands(3, 32, 64)
    with pytest.raises(ValueError, match=r"matrix has shape \[32, 64\], expected \[32, 48\]"):
        products.fp8_product(rows[:, :48], row_scales, matrix, matrix_scales, None, poisoned(3, 32))
