"""Arrival times and the workloads made with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.sim.workloads.workload import (
    Lengths,
    SimRequest,
    Workload,
    at_rate,
    burst,
    draw,
    first,
    gamma,
    jittered_within_ticks,
    merge,
    poisson,
    rescaled,
)


def source(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_poisson_gaps_vary_as_much_as_their_mean() -> None:
    gaps = np.diff(poisson(5.0, 50_000, source()))
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_variation_that_was_asked(cv: float) -> None:
    gaps = np.diff(gamma(5.0, cv, 200_000, source()))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_the_same_seed_gives_the_same_times() -> None:
    assert (gamma(3.0, 2.0, 100, source(7)) == gamma(3.0, 2.0, 100, source(7))).all()
    assert (poisson(3.0, 100, source(7)) != poisson(3.0, 100, source(8))).any()


@given(gaps=st.lists(st.floats(0, 100), min_size=2, max_size=50), rate=st.floats(0.01, 1000))
def test_rescaled_arrivals_have_the_rate_and_keep_the_pattern(gaps: list[float], rate: float) -> None:
    times = np.cumsum(gaps)
    if times[-1] - times[0] <= 1e-6:
        return
    scaled = rescaled(times, rate)
    assert scaled[0] == 0
    assert (len(times) - 1) / scaled[-1] == pytest.approx(rate)
    assert np.diff(scaled) * (times[-1] - times[0]) == pytest.approx(np.diff(times) * scaled[-1], abs=1e-6)


def test_a_burst_has_no_rate_to_change() -> None:
    with pytest.raises(ValueError, match="at one moment"):
        rescaled(burst(3), 1.0)


def test_jitter_stays_inside_its_tick() -> None:
    ticks = np.repeat([0.0, 3.0, 6.0], 100)
    jittered = jittered_within_ticks(ticks, 3.0, source())
    assert (np.diff(jittered) >= 0).all()
    assert (jittered // 3 * 3 == ticks).all()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: poisson(0, 3, source()), "rate_a_s 0"),
        (lambda: poisson(float("inf"), 3, source()), "rate_a_s inf"),
        (lambda: poisson(1.0, 0, source()), "num 0"),
        (lambda: gamma(1.0, 0, 3, source()), "cv 0"),
        (lambda: jittered_within_ticks([0.0], 0, source()), "tick_s 0"),
    ],
)
def test_what_cannot_be_drawn_is_named(call: object, named: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=named):
        call()


LENGTHS = [Lengths(10 * i, i) for i in range(1, 9)]


def test_lengths_are_drawn_without_repeats_while_there_are_enough() -> None:
    prompts = [r.num_prompt_tokens for r in draw(LENGTHS, burst(8), source()).requests]
    assert sorted(prompts) == [pair.num_prompt_tokens for pair in LENGTHS]
    assert len(draw(LENGTHS, burst(20), source()).requests) == 20


def test_no_request_says_how_long_its_own_answer_is() -> None:
    assert {r.max_tokens for r in draw(LENGTHS, burst(3), source()).requests} == {8}
    with pytest.raises(ValueError, match="max_tokens 2 is below an output of"):
        draw(LENGTHS, burst(8), source(), max_tokens=2)


def test_merged_workloads_come_by_time_and_must_not_share_ids() -> None:
    one = draw(LENGTHS, poisson(1.0, 20, source(1)), source(1), name="one", lane="interactive")
    other = draw(LENGTHS, poisson(3.0, 20, source(2)), source(2), name="other", lane="batch")
    merged = merge("both", [one, other])
    times = [r.arrival_s for r in merged.requests]
    assert times == sorted(times)
    assert merge("both", [other, one]) == merged
    with pytest.raises(ValueError, match="share an id"):
        merge("twice", [one, one])
    with pytest.raises(ValueError, match=r"blocks of \[16, 512\] tokens"):
        merge("mixed", [one, Workload("w", (), 16)])


def test_a_workload_at_another_rate_is_the_same_requests() -> None:
    workload = draw(LENGTHS, poisson(2.0, 30, source()), source())
    faster = at_rate(first(workload, 11), 10.0)
    assert faster.requests[-1].arrival_s == pytest.approx(1.0)
    assert [r.request_id for r in faster.requests] == [r.request_id for r in workload.requests[:11]]
    assert isinstance(faster.requests[0], SimRequest)
