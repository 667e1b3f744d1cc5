"""Kendall's tau with an interval over prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from benchmarks.predictors.agreement import agreement, mean_of

NUMBERS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4)), min_size=4, max_size=24)


def tau_of(one: np.ndarray, other: np.ndarray) -> float:
    """Of SciPy; 0 where one side is all equal."""
    value = float(kendalltau(one, other).statistic) if len(one) > 1 else 0.0
    return 0.0 if np.isnan(value) else value


@given(NUMBERS)
def test_tau_and_tau_without_each_group_are_those_of_scipy(samples: list[tuple[int, int, int]]) -> None:
    scores, truth, groups = np.array(samples, np.int64).T
    found = agreement(scores, truth, groups)
    assert found.value == pytest.approx(tau_of(scores, truth), abs=1e-9)
    expected = [tau_of(scores[groups != group], truth[groups != group]) for group in np.unique(groups)]
    assert found.left_out == pytest.approx(expected, abs=1e-9)


def test_the_interval_covers_the_true_tau_about_as_often_as_it_says() -> None:
    source = np.random.default_rng(2)
    correlation = 0.6
    true_tau = 2 / np.pi * np.arcsin(correlation)
    covered = 0
    for _ in range(200):
        one = source.normal(size=120)
        other = correlation * one + np.sqrt(1 - correlation**2) * source.normal(size=120)
        found = agreement(one, other, np.arange(120))
        covered += abs(found.value - true_tau) <= found.half_width
    assert 0.9 <= covered / 200 <= 0.99


def test_samples_of_one_group_count_as_one() -> None:
    source = np.random.default_rng(3)
    one, other = source.normal(size=(2, 60))
    alone = agreement(one, other, np.arange(60))
    twice = agreement(np.repeat(one, 2), np.repeat(other, 2), np.repeat(np.arange(60), 2))
    assert twice.half_width == pytest.approx(alone.half_width, rel=0.1)


def test_what_two_predictions_share_is_not_in_the_interval_of_their_difference() -> None:
    source = np.random.default_rng(4)
    truth = source.normal(size=200)
    shared = truth + source.normal(size=200)
    groups = np.arange(200)
    one, other = (agreement(shared + 0.01 * source.normal(size=200), truth, groups) for _ in range(2))
    assert one.minus(other).half_width < one.half_width / 5
    assert mean_of([one, other]).value == pytest.approx((one.value + other.value) / 2)
