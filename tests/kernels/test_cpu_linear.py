"""Linear layers on CPUs: exact sums, no saturation, the same bits in every instruction set, batch and split."""

import itertools
import math

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cpu_linear_cases import (
    INSTRUCTION_SETS,
    KINDS,
    LinearLayers,
    make_matrix,
    make_rows,
    random_case,
    random_quants,
)

from weir.ops.cpu.linear import linear, linear_range, linear_range_in, share_start
from weir.ops.cpu.linear_many import LEAST_ROWS, PAIR, has_many
from weir.ops.cpu.linear_pack import WeightKind
from weir.ops.cpu.quantize import quantize_rows
from weir.ops.simd import features
from weir.ops.simd.features import InstructionSet

NUM_ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 71)
SHAPES = ((1, 32), (16, 64), (17, 96), (40, 160), (95, 576))


@pytest.fixture(scope="module")
def linear_by_set() -> dict[InstructionSet, LinearLayers]:
    return {instruction_set: LinearLayers(instruction_set) for instruction_set in INSTRUCTION_SETS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_products_are_exact_where_float32_can_hold_them(
    linear_by_set: dict[InstructionSet, LinearLayers], instruction_set: InstructionSet, kind: WeightKind
) -> None:
    random = np.random.default_rng(1)
    for num_outputs, num_inputs in SHAPES:
        groups = num_inputs // 32
        quants = random_quants(random, kind, (num_outputs, num_inputs))
        scales = (2.0 ** random.integers(-1, 2, (num_outputs, groups))).astype(np.float16)
        minima = random.integers(-8, 1, scales.shape).astype(np.float16)
        matrix, weights = make_matrix(kind, quants, scales, minima)
        for num_rows in NUM_ROWS:
            values = random.integers(-127, 128, (num_rows, num_inputs)).astype(np.int8)
            row_scales = (2.0 ** random.integers(-1, 2, (num_rows, groups))).astype(np.float32)
            inputs = (values.reshape(num_rows, groups, 32) * row_scales[..., None]).reshape(values.shape)
            expected = inputs.astype(np.float64) @ weights.T
            found = linear_by_set[instruction_set](make_rows(values, row_scales), matrix)
            assert np.array_equal(found, expected), (num_outputs, num_inputs, num_rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_largest_sums_do_not_saturate(
    linear_by_set: dict[InstructionSet, LinearLayers], instruction_set: InstructionSet, kind: WeightKind
) -> None:
    extremes = [0, 15] if kind is WeightKind.INT4 else [-127, 127, -1]
    quants = np.repeat(np.resize(extremes, 16)[:, None], 96, axis=1)
    ones = np.ones((16, 3), dtype=np.float16)
    matrix, weights = make_matrix(kind, quants, ones, -8 * ones)
    values = np.repeat(np.array([127, -127, 0, 1, 127, -127, 127, 127, -127], dtype=np.int8)[:, None], 96, axis=1)
    for num_rows in (9, 40):
        rows = np.resize(values, (num_rows, 96))
        found = linear_by_set[instruction_set](make_rows(rows, np.ones((num_rows, 3), dtype=np.float32)), matrix)
        assert np.array_equal(found, rows.astype(np.float64) @ weights.T)


@pytest.mark.parametrize("kind", KINDS)
def test_all_instruction_sets_give_the_same_bits(
    linear_by_set: dict[InstructionSet, LinearLayers], kind: WeightKind
) -> None:
    rows, matrix, inputs, weights = random_case(np.random.default_rng(2), kind, 50, 95, 576)
    expected = inputs @ weights.T
    results = {instruction_set: linear_by_set[instruction_set](rows, matrix) for instruction_set in INSTRUCTION_SETS}
    tolerance = 2e-6 * np.abs(inputs) @ np.abs(weights).T
    for instruction_set, found in results.items():
        assert np.array_equal(found, results[InstructionSet.PORTABLE]), instruction_set
        assert (np.abs(found - expected) <= tolerance).all(), instruction_set
    assert np.array_equal(linear(rows, matrix), results[InstructionSet.PORTABLE])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    linear_by_set: dict[InstructionSet, LinearLayers], instruction_set: InstructionSet, kind: WeightKind
) -> None:
    random = np.random.default_rng(3)
    rows, matrix, _, _ = random_case(random, kind, 40, 33, 192)
    alone = np.concatenate(
        [linear_by_set[instruction_set](rows[index : index + 1], matrix) for index in range(len(rows))]
    )
    for num_rows in (2, 7, 32, 33):
        for _ in range(4):
            chosen = random.permutation(len(rows))[:num_rows]
            assert np.array_equal(linear_by_set[instruction_set](rows[chosen].copy(), matrix), alone[chosen]), num_rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_any_number_of_rows_and_outputs_gives_the_bits_of_the_portable_one(
    linear_by_set: dict[InstructionSet, LinearLayers], instruction_set: InstructionSet, kind: WeightKind
) -> None:
    random = np.random.default_rng(8)
    for num_outputs, num_inputs in ((53, 96), (16, 32)):
        rows, matrix, _, _ = random_case(random, kind, 150, num_outputs, num_inputs)
        expected = linear_by_set[InstructionSet.PORTABLE](rows, matrix)
        for num_rows in (*range(1, 71), 127, 128, 129, 150):
            found = linear_by_set[instruction_set](rows[:num_rows], matrix)
            assert np.array_equal(found, expected[:num_rows]), (num_outputs, num_rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_adding_adds_to_what_is_there_and_nothing_else_is_touched(
    linear_by_set: dict[InstructionSet, LinearLayers], instruction_set: InstructionSet, kind: WeightKind
) -> None:
    random = np.random.default_rng(4)
    for num_rows, num_outputs in ((1, 17), (3, 9), (7, 31), (9, 40), (19, 47), (40, 33)):
        rows, matrix, _, _ = random_case(random, kind, num_rows, num_outputs, 64)
        product = linear_by_set[instruction_set](rows, matrix)
        memory = random.standard_normal(num_rows * num_outputs + 32).astype(np.float32)
        before = memory.copy()
        out = memory[16 : 16 + num_rows * num_outputs].reshape(num_rows, num_outputs)
        linear_by_set[instruction_set](rows, matrix, out, added=1)
        assert np.array_equal(out, before[16:-16].reshape(out.shape) + product)
        assert np.array_equal(memory[:16], before[:16])
        assert np.array_equal(memory[-16:], before[-16:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 5, 32])
def test_threads_and_splits_do_not_change_a_bit(kind: WeightKind, num_rows: int) -> None:
    rows, matrix, _, _ = random_case(np.random.default_rng(5), kind, num_rows, 131, 96)
    whole = linear(rows, matrix)
    available = numba.get_num_threads()
    for num_threads in range(1, available + 1):
        numba.set_num_threads(num_threads)
        assert np.array_equal(linear(rows, matrix), whole)
    numba.set_num_threads(available)
    for cuts in ([0, 9], [0, 1, 9], [0, 4, 5, 9]):
        out = np.full_like(whole, np.nan)
        for first, last in itertools.pairwise(cuts):
            linear_range(rows, matrix.data, int(kind), out, False, first, last)
        assert np.array_equal(out, whole)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_range_in_another_instruction_set_has_the_same_bits(instruction_set: InstructionSet) -> None:
    range_there = linear_range_in(instruction_set)
    for kind in KINDS:
        rows, matrix, _, _ = random_case(np.random.default_rng(8), kind, 33, 131, 96)
        out = np.full((33, 131), np.nan, np.float32)
        range_there(rows, matrix.data, int(kind), out, False, 0, 9)
        assert np.array_equal(out, linear(rows, matrix))


@pytest.mark.parametrize("num_inputs", [2048, 8192])
def test_wide_rows_and_blocks_that_fill_a_span_alone_change_nothing(num_inputs: int) -> None:
    rows, matrix, inputs, weights = random_case(np.random.default_rng(7), WeightKind.INT4, 37, 83, num_inputs)
    expected, found = inputs @ weights.T, linear(rows, matrix)
    assert (np.abs(found - expected) <= 2e-6 * np.abs(inputs) @ np.abs(weights).T).all()
    assert np.array_equal(linear(rows[:1].copy(), matrix), found[:1])


@given(st.integers(0, 3000), st.integers(1, 200), st.integers(1, 40))
def test_shares_of_blocks_follow_one_another_as_even_as_can_be_and_cut_no_pair_that_is_one(
    num_blocks: int, num_shares: int, num_rows: int
) -> None:
    starts = [share_start(num_blocks, share, num_shares, num_rows) for share in range(num_shares + 1)]
    unit = PAIR if has_many(features.instruction_set().vectors) and num_rows >= LEAST_ROWS else 1
    assert starts[0] == 0
    assert starts[-1] == num_blocks
    assert starts == sorted(starts)
    assert all(start % unit == 0 or start == num_blocks for start in starts)
    assert max(np.diff(starts)) <= unit * math.ceil(math.ceil(num_blocks / unit) / num_shares)


def test_a_row_that_is_not_finite_gives_outputs_that_are_not_finite_and_spares_the_others() -> None:
    random = np.random.default_rng(6)
    inputs = random.standard_normal((4, 64)).astype(np.float32)
    inputs[1, 5], inputs[2, 40] = np.nan, np.inf
    for kind in KINDS:
        _, matrix, _, _ = random_case(random, kind, 1, 20, 64)
        found = linear(quantize_rows(inputs), matrix)
        assert not np.isfinite(found[1:3]).any()
        assert np.array_equal(found[[0, 3]], linear(quantize_rows(inputs[[0, 3]]), matrix))


def test_wrong_shapes_are_refused_by_name() -> None:
    rows, matrix, _, _ = random_case(np.random.default_rng(7), WeightKind.INT4, 2, 16, 64)
    with pytest.raises(ValueError, match=r"rows are uint8 \(2, 48\).*64 inputs.*\[rows, 96\]"):
        linear(rows[:, :48].copy(), matrix)
    with pytest.raises(ValueError, match=r"out is float32 \(2, 15\); expected contiguous float32 \(2, 16\)"):
        linear(rows, matrix, np.empty((2, 15), dtype=np.float32))
    with pytest.raises(ValueError, match="out is float64"):
        linear(rows, matrix, np.empty((2, 16)))  # type: ignore[arg-type]
