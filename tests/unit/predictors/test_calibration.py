"""Predictions follow what is seen, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.policy.predictors.predictor import Calibration, CalibrationLimits


def test_nothing_seen_changes_nothing() -> None:
    assert Calibration().factor == 1.0


def test_answers_twice_as_long_as_predicted_double_what_is_said() -> None:
    calibration = Calibration()
    for _ in range(3000):
        calibration.observe(100, 200, 10_000)
    assert calibration.factor == pytest.approx(2.0, rel=0.1)


def test_one_odd_answer_changes_little() -> None:
    calibration = Calibration()
    calibration.observe(100, 5000, 10_000)
    assert calibration.factor < 2.6


def test_it_forgets() -> None:
    calibration = Calibration()
    for num_output_tokens in (300, 50):
        for _ in range(3000):
            calibration.observe(100, num_output_tokens, 10_000)
    assert calibration.factor == pytest.approx(0.5, abs=0.06)


def test_an_answer_that_was_cut_below_its_prediction_says_nothing() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(400, 64, 64)
    assert calibration.factor == 1.0
    for _ in range(500):
        calibration.observe(32, 64, 64)
    assert calibration.factor > 1.5


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6)), max_size=60))
def test_the_factor_keeps_its_bounds(seen: list[tuple[float, int, int]]) -> None:
    limits = CalibrationLimits(smallest=0.5, largest=3.0)
    calibration = Calibration(limits)
    for entry in seen:
        calibration.observe(*entry)
        assert 0.5 <= calibration.factor <= 3.0
