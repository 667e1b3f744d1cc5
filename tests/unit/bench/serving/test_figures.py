"""What records come to: percentiles, goodput, peaks, the client's own lateness."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bench.serving.figures import (
    Reporting,
    more_figures,
    num_good,
    peak_concurrency,
    peak_tokens_a_second,
    percentile,
    summarize,
)
from weir.bench.serving.records import ServedRequest

SECONDS = st.floats(0, 100)


@st.composite
def served(draw: st.DrawFn) -> ServedRequest:
    gaps = draw(st.lists(st.floats(0, 3), max_size=6))
    ttft = draw(SECONDS)
    record = ServedRequest(5, draw(SECONDS), ttft, gaps, ttft + sum(gaps), len(gaps) + 1)
    record.error = draw(st.sampled_from(["", "", "", "HTTP 500"]))
    return record


@given(st.lists(SECONDS, min_size=1, max_size=40), st.floats(0, 100))
def test_a_percentile_is_numpys(values: list[float], p: float) -> None:
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)), abs=1e-9)


@given(st.lists(served(), max_size=20), st.floats(0.1, 50))
def test_figures_are_those_of_numpy_over_what_was_served(records: list[ServedRequest], duration_s: float) -> None:
    figures = summarize(records, duration_s)
    done = [record for record in records if not record.error]
    assert figures["completed"] + figures["failed"] == len(records)
    assert figures["output_throughput"] == pytest.approx(sum(record.output_len for record in done) / duration_s)
    ttfts = [1000 * record.ttft_s for record in done] or [0.0]
    assert figures["mean_ttft_ms"] == pytest.approx(np.mean(ttfts))
    assert figures["std_ttft_ms"] == pytest.approx(np.std(ttfts), abs=1e-6)
    assert figures["p99_ttft_ms"] == pytest.approx(np.percentile(ttfts, 99))


@given(st.lists(served(), max_size=20), SECONDS, st.floats(0, 3), SECONDS)
def test_goodput_counts_what_keeps_every_target_and_stricter_targets_never_more(
    records: list[ServedRequest], ttft_s: float, tpot_s: float, e2el_s: float
) -> None:
    done = [record for record in records if not record.error]
    targets = {"ttft": 1000 * ttft_s, "tpot": 1000 * tpot_s, "e2el": 1000 * e2el_s}
    each = [num_good(done, {name: target}) for name, target in targets.items()]
    assert num_good(done, targets) <= min(each)
    assert num_good(done, {}) == len(done)
    stricter = {name: target / 2 for name, target in targets.items()}
    assert num_good(done, stricter) <= num_good(done, targets)


def test_goodput_is_of_the_targets_by_their_definitions() -> None:
    quick = ServedRequest(1, 0.0, ttft_s=0.1, latency_s=0.5, output_len=5)  # 100 ms a token
    slow_start = ServedRequest(1, 0.0, ttft_s=0.4, latency_s=0.8, output_len=5)
    one_token = ServedRequest(1, 0.0, ttft_s=0.2, latency_s=0.2, output_len=1)
    failed = ServedRequest(1, 0.0, error="HTTP 503")
    reporting = Reporting.parse(["ttft:300", "tpot:100.001"], "ttft", "50")
    figures = more_figures([quick, slow_start, one_token, failed], 2.0, reporting)
    assert figures["request_goodput"] == pytest.approx(2 / 2)
    assert num_good([quick], {"tpot": 99}) == 0
    assert num_good([one_token], {"tpot": 0}) == 1
    assert figures["p50_ttft_ms"] == pytest.approx(200)
    assert more_figures([quick], 2.0, Reporting({}))["request_goodput"] is None


def test_the_clients_lateness_and_its_queue_are_figures_of_their_own() -> None:
    records = [ServedRequest(1, 0.0, late_s=0.001 * number, queued_s=0.01) for number in range(5)]
    figures = more_figures(records, 1.0, Reporting({}))
    assert figures["mean_client_lateness_ms"] == pytest.approx(2)
    assert figures["max_client_lateness_ms"] == pytest.approx(4)
    assert figures["p99_client_queue_time_ms"] == pytest.approx(10)


def test_peaks_are_of_moments_and_of_seconds() -> None:
    first = ServedRequest(1, 10.0, ttft_s=0.5, gaps_s=[0.25, 0.5], latency_s=1.25)
    second = ServedRequest(1, 11.0, ttft_s=0.5, gaps_s=[], latency_s=0.5)
    after = ServedRequest(1, 11.25, ttft_s=0.5, gaps_s=[], latency_s=0.5)
    assert peak_concurrency([first, second]) == 2
    assert peak_concurrency([first, after]) == 1  # one ends as the other starts
    assert peak_concurrency([]) == 0
    assert peak_tokens_a_second([first, second]) == 2
    assert peak_tokens_a_second([]) == 0


@pytest.mark.parametrize(
    ("goodput", "metrics", "percentiles", "named"),
    [
        (["itl:5"], "ttft", "99", "goodput 'itl:5'"),
        (["ttft"], "ttft", "99", "goodput 'ttft'"),
        (["ttft:-1"], "ttft", "99", "at least 0 ms"),
        (["ttft:1", "ttft:2"], "ttft", "99", "each once"),
        ([], "ttft,speed", "99", "'speed' is none of"),
        ([], "ttft", "50,101", "metric-percentiles '50,101'"),
        ([], "ttft", "", "metric-percentiles"),
    ],
)
def test_a_report_that_cannot_be_made_is_named(goodput: list[str], metrics: str, percentiles: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Reporting.parse(goodput, metrics, percentiles)
