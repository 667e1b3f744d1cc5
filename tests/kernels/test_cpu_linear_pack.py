"""Packed weights: what they stand for, reading rows back, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu_linear_cases import KINDS, random_case
from tests.kernels.whole_ops import embedding_rows

from weir.ops.cpu.linear_pack import (
    PackedMatrix,
    WeightKind,
    aligned_empty,
    pack_int8,
    pack_q4_1,
    pack_q8_0,
    packed_bytes,
)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_read_back_are_the_weights_rounded_once(kind: WeightKind) -> None:
    for num_outputs, num_inputs in ((1, 32), (17, 96), (1100, 64)):
        _, matrix, _, weights = random_case(np.random.default_rng(1), kind, 1, num_outputs, num_inputs)
        rows = np.random.default_rng(2).integers(0, num_outputs, 50)
        assert np.array_equal(embedding_rows(matrix, rows), weights[rows].astype(np.float32))


@given(st.integers(0, 2**32 - 1), st.floats(-30, 30))
@settings(max_examples=30, deadline=None)
def test_int8_weights_are_within_half_a_step(seed: int, magnitude: float) -> None:
    random = np.random.default_rng(seed)
    weights = (random.standard_normal((5, 64)) * 10.0 ** (magnitude + random.uniform(-3, 3, (5, 1)))).astype(np.float32)
    steps = np.repeat(np.abs(weights).reshape(5, 2, 32).max(axis=-1), 32, axis=-1).astype(np.float64) / 127
    found = embedding_rows(pack_int8(weights), np.arange(5))
    assert (np.abs(found - weights) <= steps * 0.50001 + 1e-44).all()


def test_groups_of_zeros_stay_zeros() -> None:
    weights = np.zeros((3, 64), dtype=np.float32)
    weights[1, 40] = 5
    assert np.array_equal(embedding_rows(pack_int8(weights), np.arange(3)), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_the_same_as_a_view_of_a_larger_buffer(kind: WeightKind) -> None:
    _, matrix, _, weights = random_case(np.random.default_rng(3), kind, 1, 20, 64)
    buffer = aligned_empty(matrix.data.size + 256)
    buffer[128:-128] = matrix.data
    view = PackedMatrix(kind, 20, 64, buffer[128:-128])
    assert view.num_blocks == 2
    assert np.array_equal(embedding_rows(view, np.arange(20)), weights.astype(np.float32))


def test_data_of_another_size_or_place_is_refused() -> None:
    size = packed_bytes(WeightKind.INT8, 16, 64)
    for data in (aligned_empty(size + 64), aligned_empty(2 * size)[::2], aligned_empty(size).view(np.int8)):
        with pytest.raises(ValueError, match=rf"\[16, 64\] of 8 bits take {size} contiguous bytes"):
            PackedMatrix(WeightKind.INT8, 16, 64, data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 64"):
        PackedMatrix(WeightKind.INT8, 16, 64, aligned_empty(size + 64)[32:-32])


def test_weights_that_cannot_be_held_exactly_are_refused() -> None:
    quants, scales = np.zeros((2, 64), dtype=np.uint8), np.ones((2, 2), dtype=np.float32)
    with pytest.raises(ValueError, match="largest is 16"):
        pack_q4_1(quants + 16, scales, scales)
    with pytest.raises(ValueError, match="scales must be finite float16"):
        pack_q4_1(quants, scales * np.float32(0.1), scales)
    with pytest.raises(ValueError, match="minima must be finite float16"):
        pack_q4_1(quants, scales, scales * 1e6)
    with pytest.raises(ValueError, match=r"scales have shape \(2, 1\), expected \(2, 2\)"):
        pack_q8_0(quants.view(np.int8), scales[:, :1])
    with pytest.raises(ValueError, match="scales must be finite float32"):
        pack_q8_0(quants.view(np.int8), scales * np.nan)
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="infinite or not a number"):
            pack_int8(np.full((1, 32), wrong, dtype=np.float32))


@pytest.mark.parametrize("num_inputs", [1, 31, 33, 48])
def test_inputs_that_are_no_multiple_of_32_are_refused(num_inputs: int) -> None:
    weights = np.zeros((2, num_inputs), dtype=np.float32)
    scales = np.zeros((2, 1), dtype=np.float32)
    for pack in (
        lambda: pack_int8(weights),
        lambda: pack_q8_0(weights.astype(np.int8), scales),
        lambda: pack_q4_1(weights.astype(np.uint8), scales, scales),
        lambda: packed_bytes(WeightKind.INT4, 2, num_inputs),
    ):
        with pytest.raises(ValueError, match=f"rows of {num_inputs} inputs.*multiple of 32"):
            pack()
