"""Quantized rows on CPUs, alone and fused with RMSNorm and SiLU: error bounds, extremes, a row's bits are its own."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.whole_ops import dequantized, gelu_mul_quantize, rms_norm_quantize, silu_mul_quantize

from weir.ops.cpu.gated import gated_quantize_range
from weir.ops.cpu.quantize import quantize_range, quantize_rows
from weir.ops.cpu.quantized_rows import GROUP, RECORD_BYTES, records_of, row_bytes
from weir.ops.cpu.rms_norm import rms_norm_add_range, rms_norm_quantize_range
from weir.ops.cpu.softcap import cap_rows

Floats = NDArray[np.float32]

WEIGHT = np.random.default_rng(0).uniform(-2, 2, 2048).astype(np.float32)
EPSILON = 1e-5
PADDED = 2048
"""Inputs of rows with padding behind their records."""


def norm(inputs: NDArray[np.floating]) -> NDArray[np.float64]:
    wide = inputs.astype(np.float64)
    normed: NDArray[np.float64] = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPSILON)
    return normed * WEIGHT[: inputs.shape[1]]


def silu_mul(gate_up: NDArray[np.floating]) -> NDArray[np.float64]:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        product: NDArray[np.float64] = gate / (1 + np.exp(-gate)) * up
    return product


def gelu_mul(gate_up: NDArray[np.floating]) -> NDArray[np.float64]:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    product: NDArray[np.float64] = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    return product


def group_maxima(expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each value's group, the largest magnitude."""
    maxima = np.abs(expected).reshape(len(expected), -1, GROUP).max(axis=-1)
    return np.repeat(maxima, GROUP, axis=-1)


def assert_quantized(rows: NDArray[np.uint8], expected: NDArray[np.float64], relative: float) -> None:
    """Every value within half a step of `expected`, and a float error of `relative` of its group's largest."""
    records = records_of(rows)
    assert records["values"].min() >= -127  # 127 is the largest int8
    maxima = group_maxima(expected)
    error = np.abs(dequantized(rows) - expected)
    assert (error <= maxima * (0.5 / 127 + relative) + 1e-30).all()
    scales = maxima[:, ::GROUP] / 127
    np.testing.assert_allclose(records["scale"], scales, rtol=relative, atol=1e-32)
    sums = records["values"].astype(np.int32).sum(axis=-1)
    assert np.array_equal(records["correction"], -128 * sums)
    assert np.array_equal(records["scaled_sum"], records["scale"] * sums.astype(np.float32))


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@pytest.mark.parametrize("num_inputs", [32, 96, 576, PADDED])
def test_rows_are_within_half_a_step(num_rows: int, num_inputs: int) -> None:
    random = np.random.default_rng(num_rows * num_inputs)
    inputs = (random.standard_normal((num_rows, num_inputs)) * 10.0 ** random.uniform(-6, 6, (num_rows, 1))).astype(
        np.float32
    )
    assert_quantized(quantize_rows(inputs), inputs.astype(np.float64), 1e-6)
    assert_quantized(rms_norm_quantize(inputs, WEIGHT[:num_inputs], EPSILON), norm(inputs), 2e-6)
    gate_up = np.concatenate([random.standard_normal(inputs.shape) * 4, inputs], axis=1).astype(np.float32)
    assert_quantized(silu_mul_quantize(gate_up), silu_mul(gate_up), 2e-6)
    assert_quantized(gelu_mul_quantize(gate_up), gelu_mul(gate_up), 2e-6)
    sums = np.ones_like(inputs)
    rms_norm_add_range(inputs, WEIGHT[:num_inputs], EPSILON, sums, 0, num_rows - 1)
    np.testing.assert_allclose(sums[:-1], 1 + norm(inputs)[:-1], rtol=0, atol=2e-5)
    assert (sums[-1] == 1).all(), "of the row behind the range"


@pytest.mark.parametrize("width", [1, 15, 16, 17, 160])
def test_logits_are_capped_wherever_they_stand_in_a_row(width: int) -> None:
    random = np.random.default_rng(width)
    logits = (random.standard_normal((3, width)) * 40).astype(np.float32)
    logits[0, 0] = 1e30
    logits[2, -1] = np.nan
    expected = 30 * np.tanh(logits.astype(np.float64) / 30)
    cap_rows(logits, np.float32(30))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=GROUP, max_size=GROUP))
@settings(max_examples=200, deadline=None)
def test_any_group_of_floats_is_within_half_a_step(values: list[float]) -> None:
    inputs = np.array([values], dtype=np.float32)
    expected = inputs.astype(np.float64)
    if np.abs(expected).max() < 1e-30:
        expected[:] = 0
    assert_quantized(quantize_rows(inputs), expected, 1e-6)


def test_values_are_rounded_to_nearest_and_ties_to_even() -> None:
    inputs = np.zeros((1, 32), dtype=np.float32)
    inputs[0, :8] = [127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.4]
    assert records_of(quantize_rows(inputs))["values"][0, 0, :8].tolist() == [127, -127, 0, 2, 2, 0, -2, 126]


def test_tiny_groups_become_zeros_and_do_not_touch_their_neighbours() -> None:
    inputs = np.ones((1, 96), dtype=np.float32)
    inputs[0, :32] = 1e-38
    inputs[0, 64:] = 3e38
    records = records_of(quantize_rows(inputs))[0]
    assert not records["values"][0].any()
    assert records["scale"][0] == 0
    assert (records["values"][1:] == 127).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    inputs = np.ones((2, 64), dtype=np.float32)
    inputs[1, 40] = wrong
    records = records_of(quantize_rows(inputs))
    assert not np.isfinite(records["scale"][1, 1])
    assert np.isfinite(records["scale"][0]).all()
    assert np.isfinite(records["scale"][1, 0])


def test_silu_is_right_far_from_zero() -> None:
    gates = np.array([-1e4, -200, -89, -88, -87, -20, -1e-3, 0, 1e-3, 20, 88, 89, 1e4], dtype=np.float32)
    for gate in gates:
        gate_up = np.array([[gate] * 32 + [1] * 32], dtype=np.float32)
        found, expected = dequantized(silu_mul_quantize(gate_up))[0, 0], silu_mul(gate_up)[0, 0]
        assert abs(found - expected) <= 2e-6 * abs(expected) + 1e-30, gate


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (quantize_rows, 96),
        (lambda inputs: rms_norm_quantize(inputs, WEIGHT[:96], EPSILON), 96),
        (silu_mul_quantize, 192),
    ],
    ids=["quantize", "rms_norm", "silu_mul"],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    make: Callable[[Floats], NDArray[np.uint8]], columns: int
) -> None:
    random = np.random.default_rng(8)
    inputs = (random.standard_normal((40, columns)) * 10.0 ** random.uniform(-2, 2, (40, 1))).astype(np.float32)
    alone = np.concatenate([records_of(make(inputs[row : row + 1])) for row in range(len(inputs))])
    for num_rows in (2, 7, 32):
        chosen = random.permutation(len(inputs))[:num_rows]
        together = records_of(make(inputs[chosen]))
        for field in ("values", "scale", "scaled_sum", "correction"):
            assert np.array_equal(together[field], alone[field][chosen])


@pytest.mark.parametrize(
    ("num_inputs", "first", "last"),
    [(96, 0, 9), (96, 2, 7), (96, 3, 6), (96, 8, 9), (96, 4, 4), (PADDED, 0, 192), (PADDED, 63, 129)],
)
def test_a_range_of_groups_writes_those_and_no_others(num_inputs: int, first: int, last: int) -> None:
    gate_up = np.random.default_rng(9).standard_normal((3, 2 * num_inputs)).astype(np.float32)
    inputs = gate_up[:, :num_inputs].copy()
    whole = quantize_rows(inputs)
    rows = np.full_like(whole, 0xEE)
    quantize_range(inputs, rows, first, last)
    assert_only(rows, whole, range(first, last))
    whole = silu_mul_quantize(gate_up)
    rows = np.full_like(whole, 0xEE)
    gated_quantize_range(gate_up, rows, np.bool_(False), first, last)
    assert_only(rows, whole, range(first, last))


def test_a_range_of_rows_writes_those_and_no_others() -> None:
    inputs = np.random.default_rng(10).standard_normal((4, 96)).astype(np.float32)
    whole = rms_norm_quantize(inputs, WEIGHT[:96], EPSILON)
    rows = np.full_like(whole, 0xEE)
    rms_norm_quantize_range(inputs, WEIGHT[:96], EPSILON, rows, 1, 3)
    assert_only(rows, whole, range(3, 9))


def assert_only(rows: NDArray[np.uint8], whole: NDArray[np.uint8], groups: range) -> None:
    """`groups` of `rows` are those of `whole`, the others are still filled with 0xEE."""
    found, expected = records_of(rows).reshape(-1), records_of(whole).reshape(-1)
    written = np.isin(np.arange(found.size), groups)
    for field in ("values", "scale", "scaled_sum", "correction"):
        assert np.array_equal(found[field][written], expected[field][written])
    groups_a_row = found.size // len(rows)
    in_records, behind = np.split(rows, [groups_a_row * RECORD_BYTES], axis=1)
    assert (in_records.reshape(found.size, -1)[~written] == 0xEE).all()
    assert (behind == 0xEE).all()


def test_rows_do_not_meet_in_the_same_sets_of_a_cache() -> None:
    assert row_bytes(PADDED) > PADDED // GROUP * RECORD_BYTES
    for num_inputs in range(GROUP, 32_769, GROUP):
        assert row_bytes(num_inputs) % 1024, num_inputs
        # as many records as whole ones fit in: kernels count groups by that
        assert row_bytes(num_inputs) // RECORD_BYTES == num_inputs // GROUP


def test_rows_that_are_no_multiple_of_32_are_refused() -> None:
    for num_inputs in (0, 31, 48):
        inputs = np.zeros((1, num_inputs), dtype=np.float32)
        with pytest.raises(ValueError, match=f"rows of {num_inputs} inputs.*multiple of 32"):
            quantize_rows(inputs)
