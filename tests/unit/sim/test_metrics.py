"""What a run came to, on outcomes small enough to reckon by hand."""

import math

import numpy as np
import pytest

from weir.scheduling.limits import CoreLimits, LaneLimits
from weir.sim.results.metrics import (
    RequestOutcome,
    SimResult,
    Slo,
    Slos,
    by_lane,
    by_tenant,
    gap_percentile_s,
    mean_estimate,
    slo_from_ms,
    slos_of,
    summarize,
)


def served(
    arrival_s: float,
    *,
    ttft_s: float = 0.1,
    tpot_s: float = 0.02,
    num_output: int = 11,
    worst_gap_s: float = 0.02,
    lane: str = "standard",
    tenant: str = "",
) -> RequestOutcome:
    first_s = arrival_s + ttft_s
    last_s = first_s + tpot_s * (num_output - 1)
    return RequestOutcome(
        f"r{arrival_s}", arrival_s, lane, tenant, 100, num_output, 50, arrival_s + ttft_s / 2, first_s, last_s, last_s,
        worst_gap_s,
    )  # fmt: skip


def refused(arrival_s: float) -> RequestOutcome:
    return RequestOutcome(f"r{arrival_s}", arrival_s, "standard", "", 100, ended_s=arrival_s, refusal="queue_full")


def run(*outcomes: RequestOutcome, gaps: dict[int, int] | None = None) -> SimResult:
    return SimResult(outcomes, 10.0, gaps or {})


def test_latencies_of_one_request() -> None:
    summary = summarize(run(served(5.0)), warmup=0)
    assert summary.mean_ttft_s == pytest.approx(0.1)
    assert summary.mean_wait_s == pytest.approx(0.05)
    assert summary.mean_tpot_s == pytest.approx(0.02)
    assert summary.mean_latency_s == pytest.approx(0.3)
    assert summary.mean_normalized_s == pytest.approx(0.3 / 11)
    assert summary.cached_share == pytest.approx(0.5)


def test_a_refused_request_is_a_miss() -> None:
    summary = summarize(run(served(0.0), refused(1.0), served(2.0), refused(3.0)), warmup=0)
    assert summary.attainment == 0.5
    assert (summary.num_offered, summary.num_finished, summary.num_refused) == (4, 2, 2)
    assert summary.mean_ttft_s == pytest.approx(0.1)


def test_a_request_that_was_given_up_half_way_is_a_miss_though_its_first_token_came() -> None:
    outcome = served(0.0)
    outcome.refusal = "waited too long"
    assert summarize(run(outcome, served(1.0)), warmup=0).attainment == 0.5


@pytest.mark.parametrize(
    "slo", [Slo(ttft_s=0.05), Slo(worst_gap_s=0.01), Slo(tpot_s=0.01), Slo(latency_s=0.2)], ids=str
)
def test_each_bound_of_an_slo_counts_by_itself(slo: Slo) -> None:
    result = run(served(0.0), served(1.0))
    assert summarize(result, Slos(Slo(0.11, 0.03, 0.03, 0.4)), warmup=0).attainment == 1.0
    assert summarize(result, Slos(slo), warmup=0).attainment == 0.0


def test_a_lane_may_have_an_slo_of_its_own() -> None:
    result = run(served(0.0, lane="interactive"), served(1.0, lane="batch"))
    slos = Slos(Slo(ttft_s=1.0), {"interactive": Slo(ttft_s=0.01)})
    assert {lane: s.attainment for lane, s in by_lane(result, slos, warmup=0).items()} == {
        "batch": 1.0,
        "interactive": 0.0,
    }
    assert list(by_tenant(result, warmup=0)) == [""]


def test_a_burst_has_no_warm_up() -> None:
    """Else whoever serves the first of it first would lose its best."""
    summary = summarize(run(*(served(3.0, ttft_s=1.0 + number) for number in range(10))))
    assert summary.num_offered == 10
    assert summary.mean_ttft_s == pytest.approx(5.5)


def test_the_first_tenth_is_warm_up_and_counts_nowhere() -> None:
    slow_start = [served(float(i), ttft_s=9.0 if i < 2 else 0.1) for i in range(20)]
    summary = summarize(run(*slow_start), Slos(Slo(ttft_s=1.0)))
    assert summary.num_offered == 18
    assert summary.attainment == 1.0
    assert summary.max_ttft_s == pytest.approx(0.1)
    assert summary.offered_a_s == pytest.approx(1.0)


def test_rates_are_over_the_time_until_the_last_end() -> None:
    late = served(9.0, ttft_s=10.0, tpot_s=0.1)
    summary = summarize(run(*(served(float(i)) for i in range(9)), late), Slos(Slo(ttft_s=1.0)), warmup=0)
    assert summary.finished_a_s == pytest.approx(10 / 20)
    assert summary.goodput_a_s == pytest.approx(9 / 20)
    assert summary.output_tokens_a_s == pytest.approx(110 / 20)


def test_nothing_counted_is_an_error_and_nothing_served_has_no_latency() -> None:
    with pytest.raises(ValueError, match="none of 1 requests"):
        summarize(run(served(0.0)), wanted=lambda outcome: outcome.lane == "batch")
    summary = summarize(run(refused(0.0), refused(1.0)), warmup=0)
    assert math.isnan(summary.p99_ttft_s)
    assert summary.attainment == 0.0
    with pytest.raises(ValueError, match="warmup 1"):
        summarize(run(served(0.0)), warmup=1)
    with pytest.raises(ValueError, match="ttft_s 0"):
        Slo(ttft_s=0)


def test_percentiles_of_gaps_come_from_their_histogram() -> None:
    result = run(served(0.0), gaps={7: 98, 40: 1, 300: 1})
    assert gap_percentile_s(result, 50) == pytest.approx(0.008)
    assert gap_percentile_s(result, 99) == pytest.approx(0.041)
    assert gap_percentile_s(result, 100) == pytest.approx(0.301)
    assert math.isnan(gap_percentile_s(run(), 50))


LANES = (
    LaneLimits("interactive", 10, 1.0, ttft_slo_ms=250, itl_slo_ms=50),
    LaneLimits("standard", 10, 1.0, ttft_slo_ms=900),
    LaneLimits("batch", 10, 1.0),
)


def test_a_lane_has_its_own_slo_where_it_names_one_and_the_default_for_the_rest() -> None:
    slos = slos_of(CoreLimits(lanes=LANES), Slo(ttft_s=5.0, tpot_s=0.1))
    assert slos.of("interactive") == Slo(ttft_s=0.25, worst_gap_s=0.05, tpot_s=0.1)
    assert slos.of("standard") == Slo(ttft_s=0.9, tpot_s=0.1)
    assert slos.of("batch") == Slo(ttft_s=5.0, tpot_s=0.1)


def test_a_request_without_a_lane_is_asked_what_the_default_lane_is() -> None:
    assert slos_of(CoreLimits(lanes=LANES, default_lane="standard"), Slo()).of("") == Slo(ttft_s=0.9)
    assert slos_of(CoreLimits(lanes=LANES, default_lane="batch"), Slo()).of("") == Slo()


def test_zero_milliseconds_ask_for_nothing() -> None:
    assert slo_from_ms(300, 0, 0, 0) == Slo(ttft_s=0.3)
    assert slo_from_ms(0, 40, 20, 1000) == Slo(math.inf, 0.04, 0.02, 1.0)


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
