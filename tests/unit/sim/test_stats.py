"""Intervals over seeds."""

import math

import numpy as np
import pytest

from weir.sim.results.stats import bootstrap_estimate, mean_estimate


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


def test_a_bootstrap_repeats_and_narrows_with_more_values() -> None:
    source = np.random.default_rng(4)
    few, many = source.exponential(1.0, 10).tolist(), source.exponential(1.0, 1000).tolist()
    assert bootstrap_estimate(few, seed=1) == bootstrap_estimate(few, seed=1)
    wide, narrow = bootstrap_estimate(few), bootstrap_estimate(many)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert narrow.low < narrow.mean < narrow.high
    median = bootstrap_estimate(many, lambda sample: float(np.median(sample)))
    assert median.mean == pytest.approx(float(np.median(many)))


def test_no_values_are_an_error() -> None:
    for estimate in (mean_estimate, bootstrap_estimate):
        with pytest.raises(ValueError, match="at least one"):
            estimate([])
