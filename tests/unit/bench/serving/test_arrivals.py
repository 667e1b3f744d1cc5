"""When requests come: rates, dispersion, bursts, ramps."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bench.serving.arrivals import ArrivalPlan, RampUp

RATES = st.floats(0.01, 1000)


def gaps_of(arrivals: ArrivalPlan, num: int, seed: int = 3) -> list[float]:
    return [b - a for a, b in pairwise(arrivals.times_s(num, seed))]


@given(
    RATES, st.sampled_from([0.2, 0.5, 1.0, 4.0, math.inf]), st.integers(1, 7), st.integers(1, 300), st.integers(0, 9)
)
def test_times_rise_from_0_and_keep_the_rate_exactly(
    rate: float, burstiness: float, burst_size: int, num: int, seed: int
) -> None:
    arrivals = ArrivalPlan(rate, burstiness, burst_size)
    times = arrivals.times_s(num, seed)
    assert times == arrivals.times_s(num, seed)
    assert len(times) == num
    assert times[0] == 0
    assert times == sorted(times)
    num_moments = -(-num // burst_size)
    if num_moments > 1:
        assert times[-1] == pytest.approx((num_moments - 1) * burst_size / rate)
    for first in range(0, num, burst_size):
        assert len(set(times[first : first + burst_size])) == 1


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_dispersion_of_a_gamma_of_that_shape(burstiness: float) -> None:
    gaps = gaps_of(ArrivalPlan(50.0, burstiness), 20_000)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=1e-6)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_arrivals_in_a_second_vary_as_much_as_their_mean() -> None:
    times = ArrivalPlan(20.0).times_s(40_000, seed=5)
    counts = np.bincount(np.floor(times).astype(int))[:-1]
    assert np.var(counts) / np.mean(counts) == pytest.approx(1, abs=0.15)


def test_infinite_burstiness_is_a_metronome_and_an_infinite_rate_is_all_at_once() -> None:
    assert gaps_of(ArrivalPlan(4.0, math.inf), 9) == pytest.approx([0.25] * 8)
    assert ArrivalPlan().times_s(5, seed=0) == [0.0] * 5
    assert not ArrivalPlan().is_open
    assert ArrivalPlan(1.0).is_open


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_begins_at_one_rate_and_ends_at_the_other(strategy: str) -> None:
    ramp = RampUp(strategy, 2.0, 32.0)  # type: ignore[arg-type]
    gaps = gaps_of(ArrivalPlan(burstiness=math.inf, ramp_up=ramp), 101)
    assert [gaps[0], gaps[-1]] == pytest.approx([1 / 2, 1 / 32])
    assert gaps == sorted(gaps, reverse=True)
    middle = ramp.rate_at(0.5)
    assert middle == pytest.approx(17.0 if strategy == "linear" else 8.0)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"request_rate": 0.0}, "request-rate"),
        ({"request_rate": math.nan}, "request-rate"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"burst_size": 0}, "burst-size"),
        ({"request_rate": 3.0, "ramp_up": RampUp("linear", 1.0, 2.0)}, "a ramp-up has rates of its own"),
    ],
)
def test_arrivals_that_cannot_be_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ArrivalPlan(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf)])
def test_a_ramp_that_cannot_be_is_named(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="ramp-up-start-rps"):
        RampUp("linear", start, end)
