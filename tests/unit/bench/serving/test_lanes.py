"""What `weir bench lanes` sends, and what it makes of the answers."""

import pytest

from weir.bench.serving.figures import p99
from weir.bench.serving.lanes import LanesConfig, Side, figures, jobs_of, report

CONFIG = LanesConfig("http://x", "m", num_flood=5, num_urgent=3)


def test_the_flood_comes_first_and_at_once_and_the_urgent_one_by_one_behind_it() -> None:
    jobs = jobs_of(CONFIG, "interactive", seed=1)
    assert [(job.lane, job.tenant, job.at_s) for job in jobs[:5]] == [("batch", "flood", 0.0)] * 5
    assert [(job.lane, job.tenant) for job in jobs[5:]] == [("interactive", "urgent")] * 3
    times_s = [job.at_s for job in jobs[5:]]
    assert times_s == sorted(times_s)
    assert times_s[0] > 2


def test_both_kinds_of_run_differ_in_the_lane_of_the_urgent_requests_alone() -> None:
    own, shared = jobs_of(CONFIG, "interactive", seed=1), jobs_of(CONFIG, "batch", seed=1)
    assert [(job.prompt, job.at_s, job.output_len) for job in own] == [
        (job.prompt, job.at_s, job.output_len) for job in shared
    ]
    assert {job.lane for job in shared} == {"batch"}


def test_the_ratio_is_that_of_the_pooled_p99() -> None:
    own = Side(tuple(number / 100 for number in range(1, 101)), (100.0, 120.0, 110.0), (1.0,))
    shared = Side(tuple(number / 10 for number in range(1, 101)), (100.0,), (10.0,))
    values = figures(own, shared)
    assert values["with_lane_p99_ttft_ms"] == pytest.approx(990)
    assert values["p99_ttft_ratio"] == pytest.approx(10)
    assert values["with_lane_flood_tok_per_s"] == 110
    assert "10.0 times lower" in report(CONFIG, own, shared)


def test_p99_of_few_values_is_the_largest() -> None:
    assert p99([3.0, 1.0, 2.0]) == 3.0
