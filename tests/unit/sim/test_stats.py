"""Intervals over seeds."""

import math

import numpy as np
import pytest

from weir.sim.results.stats import mean_estimate


def test_the_interval_of_five_values_is_students() -> None:
    estimate = mean_estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5 / 5)
    assert estimate.mean == 3.0
    assert estimate.low == pytest.approx(3 - half)
    assert estimate.high == pytest.approx(3 + half)


def test_one_run_says_nothing_of_its_spread() -> None:
    estimate = mean_estimate([2.0])
    assert (estimate.mean, estimate.low, estimate.high) == (2.0, -math.inf, math.inf)


@pytest.mark.parametrize("num", [2, 5, 40])
def test_19_of_20_intervals_hold_the_true_mean(num: int) -> None:
    source = np.random.default_rng(3)
    hits = 0
    for _ in range(2000):
        estimate = mean_estimate(source.normal(7.0, 2.0, num).tolist())
        hits += estimate.low <= 7.0 <= estimate.high
    assert hits / 2000 == pytest.approx(0.95, abs=0.02)


def test_no_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_estimate([])
