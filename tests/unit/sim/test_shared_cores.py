"""Workers of one host slow one another down, each as its profile says, and never alone."""

from dataclasses import replace

import pytest
from tests.unit.sim.loads import PROFILE, poisson_load

from weir.core.cost import StepCost
from weir.sim.cores import SharedCores
from weir.sim.results.metrics import SimResult
from weir.sim.simulator import simulate
from weir.sim.spec import FailureSpec, LinkSpec, PoolSpec, SystemSpec
from weir.sim.timeline import Timeline
from weir.sim.workloads.workload import SimRequest, Workload

MS = 1_000_000


class Host:
    """Steps over shared cores, and when each ended."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.cores = SharedCores(self.timeline)
        self.ended_ms: dict[str, float] = {}

    def begin(self, at_ms: int, worker_id: str, duration_ms: int, contention: float = 1.0) -> None:
        def on_end() -> None:
            self.ended_ms[worker_id] = self.timeline.now_ns / MS

        self.timeline.at(at_ms * MS, lambda: self.cores.begin(worker_id, contention, duration_ms * MS, on_end))

    def run(self) -> dict[str, float]:
        while self.timeline.next_ns is not None:
            self.timeline.step()
        return self.ended_ms


def test_a_step_alone_takes_what_it_takes() -> None:
    host = Host()
    host.begin(5, "a", 10)
    assert host.run() == {"a": 15.0}


def test_a_step_goes_on_slower_only_while_another_runs() -> None:
    """a: 4 ms alone, then half as fast; b has done 3 of its 3 ms after 6; a has 3 of its 10 left then."""
    host = Host()
    host.begin(0, "a", 10)
    host.begin(4, "b", 3)
    assert host.run() == {"b": 10.0, "a": 13.0}


def test_each_is_slowed_down_by_its_own_contention() -> None:
    host = Host()
    host.begin(0, "a", 10, contention=0.5)
    host.begin(0, "b", 10, contention=0.0)
    assert host.run() == {"b": 10.0, "a": pytest.approx(10 + 10 - 10 / 1.5)}


def test_of_three_each_has_two_others() -> None:
    host = Host()
    for worker_id in "abc":
        host.begin(0, worker_id, 10)
    assert host.run() == dict.fromkeys("abc", 30.0)


def test_a_dead_workers_step_never_ends_and_slows_nobody_down() -> None:
    host = Host()
    host.begin(0, "a", 10)
    host.begin(0, "b", 10)
    host.timeline.at(4 * MS, lambda: host.cores.drop("b"))
    assert host.run() == {"a": 12.0}


def split(contention: float, **rest: object) -> SystemSpec:
    profile = replace(PROFILE, contention=contention)
    return replace(SystemSpec.split(1, 1, profile), **rest)  # type: ignore[arg-type]


def times(result: SimResult) -> list[tuple[float | None, float | None]]:
    return [(outcome.first_token_s, outcome.last_token_s) for outcome in result.outcomes]


def test_one_request_has_the_host_for_itself() -> None:
    workload = Workload("one", (SimRequest("r0", 0.25, 100, 20, 20),))
    assert times(simulate(split(1.0), workload)) == times(simulate(split(0.0), workload))


def test_a_prompt_beside_a_decode_takes_longer_and_its_worker_is_busy_for_longer() -> None:
    """While something decodes all the time, a contention of 1 doubles what a prompt takes; the first is alone."""
    cost = StepCost(100.0, 0.0, 0.0, 0.0, 0.0)
    requests = tuple(SimRequest(f"r{index}", 10.0 * index, 10, 1000, 1000) for index in range(3))

    def ttfts_s(contention: float) -> list[float]:
        spec = split(contention)
        pools = tuple(replace(pool, profile=replace(pool.profile, step=cost)) for pool in spec.pools)
        result = simulate(replace(spec, pools=pools), Workload("three", requests))
        return [(outcome.first_token_s or 0) - outcome.arrival_s for outcome in result.outcomes]

    alone, beside = ttfts_s(0.0), ttfts_s(1.0)
    assert beside[0] == alone[0]
    assert [b - a for a, b in zip(alone, beside, strict=True)][1:] == pytest.approx([0.1, 0.1])


def test_a_longer_step_is_busy_time() -> None:
    load = poisson_load(40, 40.0)
    assert simulate(split(2.0), load).counters["busy_s"] > 1.3 * simulate(split(0.0), load).counters["busy_s"]


def test_a_death_in_the_middle_of_a_step_leaves_the_others_their_host() -> None:
    """`simulate` raises where a request is lost, or a worker that went on with a step of its former life."""
    load = poisson_load(80, 40.0)
    result = simulate(split(0.8, failures=(FailureSpec("prefill-0", 0.5, 0.9),)), load)
    later = [outcome for outcome in result.outcomes if outcome.arrival_s > 0.95]
    assert len(later) > 20
    assert all(outcome.num_output_tokens for outcome in later)


def test_fast_forward_is_left_where_steps_depend_on_one_another() -> None:
    spec = split(0.8, link=LinkSpec(10.0))
    load = poisson_load(60, 30.0)
    assert times(simulate(spec, load, fast_forward=True)) == times(simulate(spec, load, fast_forward=False))


def test_workers_on_hosts_of_their_own_share_nothing() -> None:
    load = poisson_load(60, 60.0)
    both = [SystemSpec((PoolSpec("local", 2, replace(PROFILE, contention=contention)),)) for contention in (0.0, 2.0)]
    first, second = (simulate(spec, load) for spec in both)
    assert times(first) == times(second)
