"""Simulated hosts that exchange prefixes: what crosses takes its time, and is cached; nothing is lost by it."""

from dataclasses import replace

import pytest

from weir.scheduling.limits import CoreLimits, Crossing, PlacingLimits
from weir.sim.profile import load_profile
from weir.sim.results.metrics import SimResult
from weir.sim.simulator import simulate
from weir.sim.spec import FailureSpec, LinkSpec, PoolSpec, SystemSpec
from weir.sim.workloads.workload import SimRequest, Workload

PROFILE = load_profile("h100-llama3-8b")
PROMPT_TOKENS = 4001


def hosts(*layout: tuple[int, int], gbytes_per_s: float = 12.5, failures: tuple[FailureSpec, ...] = ()) -> SystemSpec:
    """(prefill, decode workers) of each."""
    pools = [
        PoolSpec(role, num, PROFILE, host=f"h{number}")  # type: ignore[arg-type]
        for number, counts in enumerate(layout)
        for role, num in zip(("prefill", "decode"), counts, strict=True)
        if num
    ]
    return SystemSpec(tuple(pools), host_link=LinkSpec(gbytes_per_s, 0.1), failures=failures)


def requests(num: int, gap_s: float = 1.0, blocks: tuple[int, ...] = ()) -> Workload:
    made = [SimRequest(f"r{i}", i * gap_s, PROMPT_TOKENS, 20, 64, prefix_blocks=blocks) for i in range(num)]
    return Workload("test", made)


def run(spec: SystemSpec, workload: Workload, crossing: Crossing = "prompts") -> SimResult:
    return simulate(spec, workload, limits=CoreLimits(placing=PlacingLimits(crossing=crossing)))


def first_token_s(result: SimResult) -> float:
    """Of the first request."""
    outcome = result.outcomes[0]
    assert outcome.first_token_s is not None
    return outcome.first_token_s - outcome.arrival_s


def test_a_prompt_is_computed_at_one_host_and_answered_at_another() -> None:
    result = run(hosts((1, 0), (0, 1)), requests(3))
    assert all(outcome.is_finished for outcome in result.outcomes)
    assert result.counters["core_placed_crossing_total"] == 3
    assert result.counters["exchanged_bytes"] == 3 * 4000 * PROFILE.kv_bytes_per_token
    assert result.counters["exchanged_prefixes_failed"] == 0


def test_what_crosses_is_hidden_by_what_is_computed_as_far_as_the_link_can() -> None:
    """Two steps of 2,048 tokens: of the transfer, what is left once the second one is computed is waited for."""
    alone_s = first_token_s(run(hosts((1, 1)), requests(1)))
    num_bytes = 4000 * PROFILE.kv_bytes_per_token
    for gbytes_per_s in (100.0, 1.0):
        added_s = first_token_s(run(hosts((1, 0), (0, 1), gbytes_per_s=gbytes_per_s), requests(1))) - alone_s
        whole_s = num_bytes / gbytes_per_s / 1e9
        assert 0 < added_s < whole_s + 0.03
    assert added_s > whole_s / 4, "a slow link shows"


def test_a_prefix_that_one_host_has_is_fetched_by_the_other() -> None:
    """Many at once that begin alike: of the second host one fetches."""
    busy = replace(
        requests(12, gap_s=0.02, blocks=(1, 2, 3, 4, 5, 6, 7)),
        requests=[
            SimRequest("first", 0.0, PROMPT_TOKENS, 2, 64, prefix_blocks=(1, 2, 3, 4, 5, 6, 7)),
            *(
                SimRequest(
                    f"r{i}", 2 + i * 0.002, PROMPT_TOKENS, 200, 256, prefix_blocks=(1, 2, 3, 4, 5, 6, 7, 100 + i)
                )
                for i in range(24)
            ),
        ],
    )
    fetching, not_fetching = run(hosts((1, 1), (1, 1)), busy, "prefixes"), run(hosts((1, 1), (1, 1)), busy, "nothing")
    assert fetching.counters["exchanged_prefixes"] >= 1
    assert not_fetching.counters["exchanged_bytes"] == 0
    assert all(outcome.is_finished for outcome in fetching.outcomes)


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
def test_a_worker_that_dies_while_prompts_cross_costs_time_and_nothing_else(worker_id: str) -> None:
    """The simulator checks that no page or slot is left over."""
    spec = hosts((1, 0), (0, 1), failures=(FailureSpec(worker_id, 1.05, 2.0),))
    result = run(spec, requests(6, gap_s=0.5))
    finished = [outcome for outcome in result.outcomes if outcome.is_finished]
    assert len(finished) >= (6 if worker_id == "prefill-0" else 4)


@pytest.mark.parametrize("away_s", [(0.0, 5.5), (5.0, 7.5)])
def test_sequences_go_on_at_a_host_that_comes_late(away_s: tuple[float, float]) -> None:
    """Or comes back. The simulator checks that no page or slot is left over."""
    pools = tuple(PoolSpec("decode", 1, PROFILE, serves_locally=True, host=f"h{number}") for number in range(2))
    failures = (FailureSpec("decode-1", *away_s),)
    spec = SystemSpec(pools, host_link=LinkSpec(12.5, 0.1), failures=failures)
    workload = Workload("test", [SimRequest(f"r{i}", 4 + 0.01 * i, PROMPT_TOKENS, 800, 1000) for i in range(12)])
    stays, moves = (simulate(spec, workload, limits=CoreLimits(rebalances=on)) for on in (False, True))
    assert stays.counters["migrations_moved"] == stays.counters["exchanged_bytes"] == 0
    finished = [outcome for outcome in moves.outcomes if outcome.is_finished]
    assert len(finished) == sum(outcome.is_finished for outcome in stays.outcomes) >= 5
    assert {outcome.num_output_tokens for outcome in finished} == {800}
    assert moves.counters["core_migrations_moved_total"] == moves.counters["migrations_moved"] >= 2
    assert moves.counters["exchanged_bytes"] >= 2 * 4000 * PROFILE.kv_bytes_per_token
    assert moves.duration_s < stays.duration_s


def test_hosts_and_links_go_together() -> None:
    pools = (PoolSpec("prefill", 1, PROFILE, host="a"), PoolSpec("decode", 1, PROFILE, host="b"))
    with pytest.raises(ValueError, match="host_link: is for pools with hosts"):
        SystemSpec(pools)
    with pytest.raises(ValueError, match="host_link: give every pool a host"):
        SystemSpec((pools[0], PoolSpec("decode", 1, PROFILE)), host_link=LinkSpec(1.0))
