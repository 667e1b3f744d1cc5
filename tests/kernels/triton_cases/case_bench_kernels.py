"""`python -m benchmarks.kernels` up to its clock: what it runs is right, and what it prints is what it measured."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.kernels.triton_cases.support import COMPUTE_CAPABILITY, DEVICE

from benchmarks.gpu.cases import full_width, one_byte
from benchmarks.gpu.cases.full_width import AttentionShape, KernelCase
from benchmarks.gpu.kernels import KernelReport, as_json, as_lines, measure
from benchmarks.gpu.products import time_exact_products
from benchmarks.gpu.timer import Ceilings, Timing
from weir.model.files.dummy import shape_named

SHAPE = AttentionShape("tiny", 4, 2, 64)
CEILINGS = Ceilings(copy_bytes_a_second=1e12, read_bytes_a_second=9e11, matmul_flops_a_second=1e14)
MAKERS = [
    pytest.param(
        partial(full_width.decode_case, SHAPE, [64, 64], DEVICE, torch.float16, with_rivals=True), id="decode"
    ),
    pytest.param(partial(full_width.decode_case, SHAPE, [5, 40], DEVICE, torch.float16), id="ragged-decode"),
    pytest.param(partial(full_width.linear_case, 3, 70, 96, DEVICE, torch.float16), id="exact-linear"),
    pytest.param(partial(full_width.norm_case, 3, 64, DEVICE), id="norm"),
    pytest.param(partial(full_width.silu_case, 3, 64, DEVICE), id="silu"),
    pytest.param(partial(one_byte.fp8_norm_case, 3, 64, DEVICE), id="norm-E4M3"),
    pytest.param(partial(one_byte.fp8_silu_case, 3, 64, DEVICE), id="silu-E4M3"),
    pytest.param(partial(one_byte.fp8_product_case, 3, 48, 64, DEVICE), id="product-E4M3"),
    pytest.param(partial(one_byte.int8_decode_case, SHAPE, [5, 40], DEVICE, torch.float16), id="decode-int8"),
    pytest.param(partial(full_width.rotary_case, SHAPE, 5, DEVICE), id="rotary"),
    pytest.param(partial(full_width.sampling_case, 3, 1000, DEVICE), id="sampling"),
    pytest.param(
        partial(
            full_width.prefill_case, SHAPE, 40, [40, 40], DEVICE, COMPUTE_CAPABILITY, torch.float16, with_rivals=True
        ),
        id="prefill",
    ),
    pytest.param(
        partial(full_width.prefill_case, SHAPE, 9, [40, 17], DEVICE, COMPUTE_CAPABILITY, torch.float16), id="chunks"
    ),
]


class CountedCalls:
    """A timer that calls once and says 100 us."""

    def __init__(self) -> None:
        self.num_calls = 0

    def time(self, call: Callable[[], object]) -> Timing:
        call()
        self.num_calls += 1
        return Timing(100.0, 90.0, 120.0)


def without_flex(make: Callable[[], KernelCase]) -> KernelCase:
    """FlexAttention would compile for half a minute."""
    case = make()
    return dataclasses.replace(
        case, rivals={name: rival for name, rival in case.rivals.items() if not name.startswith("Flex")}
    )


@pytest.mark.parametrize("make", MAKERS)
def test_every_case_is_right_and_is_timed(make: Callable[[], KernelCase]) -> None:
    torch.manual_seed(1)
    timer = CountedCalls()
    (kernel,) = measure([partial(without_flex, make)], timer, CEILINGS)
    assert kernel.error < 2e-2
    assert kernel.timing == Timing(100.0, 90.0, 120.0)
    assert kernel.num_bytes > 0
    assert timer.num_calls == 1 + sum(rival.median_us is not None for rival in kernel.rivals)
    assert all(rival.problem for rival in kernel.rivals if rival.median_us is None)


def test_rivals_compute_the_same() -> None:
    torch.manual_seed(2)
    case = full_width.decode_case(SHAPE, [64, 64], DEVICE, torch.float16, with_rivals=True)
    gathered = case.rivals["torch SDPA, gathering"]()()
    contiguous = case.rivals["torch SDPA, contiguous"]()()
    assert isinstance(gathered, torch.Tensor)
    assert isinstance(contiguous, torch.Tensor)
    torch.testing.assert_close(gathered, contiguous)


def test_wrong_results_are_reported_and_not_timed() -> None:
    timer = CountedCalls()
    wrong = KernelCase("op", "1 x 1", 8, 0, lambda: None, lambda: float("nan"))
    (kernel,) = measure([lambda: wrong], timer, CEILINGS)
    assert kernel.timing is None
    assert timer.num_calls == 0
    report = KernelReport("a GPU", "torch", CEILINGS, (kernel,))
    assert not report.is_right
    assert "WRONG: off by nan" in as_lines(report)[-1]


def test_the_table_and_the_json_hold_the_shares_of_the_floor() -> None:
    def broken() -> Callable[[], object]:
        raise ImportError("no such package\nand more")

    case = KernelCase("op", "2 x 3", 50_000_000, 0, lambda: None, lambda: 0.0, {"other": lambda: int, "none": broken})
    (kernel,) = measure([lambda: case], CountedCalls(), CEILINGS)
    assert kernel.floor_share == pytest.approx(0.5)
    report = KernelReport("a GPU", "torch", CEILINGS, (kernel,))
    line = as_lines(report)[-1]
    assert "50%" in line
    assert "other 100.0 (1.00x); none: ImportError: no such package" in line
    (entry,) = json.loads(json.dumps(as_json(report)))["kernels"]
    assert entry["floor_share"] == pytest.approx(0.5)
    assert entry["timing"]["median_us"] == 100.0


def test_the_floor_is_what_takes_longer() -> None:
    assert CEILINGS.floor_us(num_bytes=10**6, num_flops=0) == pytest.approx(1.0)
    assert CEILINGS.floor_us(num_bytes=10**6, num_flops=10**9) == pytest.approx(10.0)


class SlowerEverySecondTime:
    """100 us, then 150 us."""

    def __init__(self) -> None:
        self._num_calls = 0

    def time(self, call: Callable[[], object]) -> Timing:
        call()
        self._num_calls += 1
        median_us = 150.0 if self._num_calls % 2 == 0 else 100.0
        return Timing(median_us, median_us, median_us)


# the interpreter multiplies the bits of bf16 numbers as if they were whole ones
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_what_exact_products_cost_is_recorded_for_each_and_for_a_step() -> None:
    config = shape_named("tiny")
    *products, whole = time_exact_products(config, 3, SlowerEverySecondTime(), DEVICE)
    assert [record["rows"] for record in products] == [3] * 5
    assert [record["exact_over_library"] for record in products] == [1.5] * 5
    assert whole["exact_over_library"] == pytest.approx(1.5)
    assert whole["exact_products_of_a_step_ms"] == pytest.approx((4 * config.num_layers + 1) * 0.15)
