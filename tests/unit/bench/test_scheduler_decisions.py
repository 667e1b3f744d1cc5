"""What `weir bench scheduler` calls a decision."""

import statistics

import pytest

from weir.bench.scheduler import SchedulerBench, SchedulerBenchConfig, measure


@pytest.mark.parametrize("policy", ["fcfs", "srtf"])
def test_every_prompt_that_started_is_prefilled_within_a_decision(policy: str) -> None:
    """No worker is kept full by a prompt of which nobody says that it is done."""
    bench = SchedulerBench(policy, 2, SchedulerBenchConfig(policies=()))
    bench.fill(300)
    picks = []
    for _ in range(300):
        bench.decide_once()
        picks.append(bench.num_picks)
        assert bench.metrics()["prefills_in_flight"] <= bench.num_picks
    assert statistics.mean(picks) == pytest.approx(1, abs=0.3)


def test_a_decision_is_reported_whole_and_by_the_request_that_it_starts() -> None:
    config = SchedulerBenchConfig(policies=(), num_decisions=200)
    cost = measure("fcfs", 1, 50, config)
    assert 0 < cost.median_us <= cost.p99_us <= cost.p999_us <= cost.max_us
    assert 0 < cost.median_pick_us <= cost.p99_pick_us <= cost.max_us
    assert cost.p99_num_picks == 1
