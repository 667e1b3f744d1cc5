"""Simulated fleets whose workers come and go: when they serve, that nothing is lost with them, and what they cost."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.sim.loads import PROFILE, poisson_load, shared_prompts

from weir.planner.observation import Observation, PoolCount, Pools
from weir.sim.results.metrics import SimResult, Slo
from weir.sim.scaling import FleetChange, ScalingSpec
from weir.sim.simulator import simulate
from weir.sim.spec import LinkSpec, SystemSpec
from weir.sim.workloads.workload import Workload

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
LOAD = poisson_load(300, 12.0)
LONG_ANSWERS = poisson_load(300, 12.0, output=400)
LINK = LinkSpec(25.0)
NO_SPARES = Pools(0, 0)


@dataclass(slots=True)
class Script:
    """Implements `weir.sim.scaling.Controller`: at the first tick from each time on, one change."""

    changes: dict[float, FleetChange]
    seen: list[Observation] = field(default_factory=list)

    def act(self, seen: Observation) -> FleetChange:
        self.seen.append(seen)
        due = [at_s for at_s in self.changes if at_s <= seen.at_s]
        return self.changes.pop(due[0]) if due else FleetChange()


def run(
    changes: dict[float, FleetChange],
    *,
    load: Workload = LOAD,
    pools: tuple[int, int] = (1, 1),
    start_s: float = 4.0,
    max_num_seqs: int = 16,
    spares: Pools = NO_SPARES,
) -> tuple[SimResult, list[Observation]]:
    scripts: list[Script] = []

    def make() -> Script:
        scripts.append(Script(dict(changes)))
        return scripts[-1]

    spec = SystemSpec.split(*pools, PROFILE, link=LINK, max_num_seqs=max_num_seqs)
    result = simulate(spec, load, scaling=ScalingSpec(make, SLO, start_s, switch_s=1.5, tick_s=1.0, spares=spares))
    assert all(outcome.is_finished for outcome in result.outcomes)
    return result, scripts[-1].seen


def granted_to(result: SimResult, worker_id: str) -> list[float]:
    return [
        one.granted_s for one in result.outcomes if one.prefill_worker_id == worker_id and one.granted_s is not None
    ]


def test_a_fleet_that_nobody_changes_is_a_fleet_that_cannot_change() -> None:
    scaled, _ = run({})
    plain = simulate(SystemSpec.split(1, 1, PROFILE, link=LINK, max_num_seqs=16), LOAD)
    assert scaled.outcomes == plain.outcomes
    assert scaled.worker_s == pytest.approx(2 * LOAD.requests[-1].arrival_s)
    assert plain.worker_spans == ()


def test_an_ordered_worker_is_paid_at_once_and_serves_late() -> None:
    result, seen = run({5.0: FleetChange(prefill=1)})
    first_s = min(granted_to(result, "prefill-1"))
    assert 9.0 <= first_s < 11.0
    assert [one.prefill for one in seen[5:9]] == [PoolCount(1, starting=1)] * 3 + [PoolCount(2)]
    span = result.worker_spans[-1]
    assert (span.role, span.from_s, span.to_s) == ("prefill", 5.0, float("inf"))


def test_a_drained_worker_gets_nothing_new_and_nothing_is_lost_with_it() -> None:
    result, seen = run({6.0: FleetChange(-1, -1)}, load=LONG_ANSWERS, pools=(2, 2), max_num_seqs=64)
    ended = [span for span in result.worker_spans if span.to_s < float("inf")]
    assert {span.role for span in ended} == {"prefill", "decode"}
    assert all(7.0 <= span.to_s < 20.0 for span in ended)
    late = {one.prefill_worker_id for one in result.outcomes if one.granted_s is not None and one.granted_s > 6.1}
    assert len(late) == 1
    assert any(one.decode.draining for one in seen)
    assert (seen[-1].prefill, seen[-1].decode) == (PoolCount(1), PoolCount(1))


def test_the_last_worker_of_a_role_stays() -> None:
    result, seen = run({3.0: FleetChange(prefill=-3, decode=-3), 6.0: FleetChange(switch_from="decode")}, pools=(2, 1))
    assert (seen[-1].prefill, seen[-1].decode) == (PoolCount(1), PoolCount(1))
    assert len(result.worker_spans) == 3


def test_a_worker_that_has_not_started_is_ended_first() -> None:
    result, seen = run({3.0: FleetChange(decode=1), 5.0: FleetChange(decode=-1)}, start_s=10.0)
    assert result.worker_spans[-1].to_s == 5.0
    assert seen[-1].decode == PoolCount(1)


def test_a_worker_that_changes_its_role_drains_and_serves_in_the_other_one() -> None:
    result, seen = run({5.0: FleetChange(switch_from="decode")}, load=LONG_ANSWERS, pools=(1, 2), max_num_seqs=64)
    assert seen[5].decode == PoolCount(1, draining=1)
    assert seen[5].prefill == PoolCount(1, starting=1), "it is counted where it is to be"
    assert seen[-1].prefill == PoolCount(2)
    [gone, came] = [span for span in result.worker_spans if span.to_s < float("inf") or span.from_s > 0]
    assert (gone.role, came.role) == ("decode", "prefill")
    assert gone.to_s == came.from_s, "it is paid once"
    assert min(granted_to(result, "prefill-1")) >= came.from_s + 1.5


def test_what_is_observed_adds_up() -> None:
    result, seen = run({}, pools=(2, 2))
    in_time = [one for one in result.outcomes if one.ended_s is not None and one.ended_s < seen[-1].at_s]
    assert sum(one.num_ended for one in seen) == len(in_time)
    assert sum(one.num_first_tokens for one in seen) >= len(in_time)
    assert sum(one.num_arrived for one in seen) == sum(one.arrival_s <= seen[-1].at_s for one in result.outcomes)
    assert 0 < max(one.booked_share for one in seen) <= 1.0


def test_overload_is_seen_as_a_backlog_and_as_booked_sequences() -> None:
    _, seen = run({}, load=poisson_load(300, 60.0), max_num_seqs=4)
    assert max(one.num_backlog_tokens for one in seen) > 5000
    assert max(one.booked_share for one in seen) == 1.0


@pytest.mark.parametrize("make_load", [lambda: LOAD, lambda: shared_prompts(150, 8.0)], ids=["plain", "prefixes"])
def test_the_same_run_gives_the_same_result(make_load: Callable[[], Workload]) -> None:
    changes = {3.0: FleetChange(1, 1), 9.0: FleetChange(switch_from="decode"), 14.0: FleetChange(-1, 0)}
    one, _ = run(changes, load=make_load())
    other, _ = run(changes, load=make_load())
    assert one == other


def test_workers_of_one_memory_cannot_come_and_go() -> None:
    scaling = ScalingSpec(lambda: Script({}), SLO, 1.0)
    for spec in (SystemSpec.split(1, 1, PROFILE), SystemSpec.colocated(2, PROFILE)):
        with pytest.raises(ValueError, match="link"):
            simulate(spec, LOAD, scaling=scaling)
    with pytest.raises(ValueError, match="start_s"):
        replace(scaling, start_s=0.0)


def test_a_spare_serves_at_once_and_is_paid_for_while_it_idles() -> None:
    changes = {5.0: FleetChange(prefill=1)}
    plain, _ = run(changes, start_s=8.0)
    spared, seen = run(changes, start_s=8.0, spares=Pools(1, 0))
    assert min(granted_to(plain, "prefill-1")) > 13.0
    assert 5.0 < min(granted_to(spared, "prefill-1")) < 7.0
    assert next(one.prefill.serving for one in seen if one.at_s > 5.9) == 2
    end_s = spared.outcomes[-1].arrival_s
    assert spared.worker_s == pytest.approx(3 * end_s)
    assert plain.worker_s == pytest.approx(3 * end_s - 5.0)


def test_who_is_ended_is_a_spare_again_as_far_as_there_may_be_one() -> None:
    changes = {3.0: FleetChange(prefill=-1), 8.0: FleetChange(prefill=-1), 13.0: FleetChange(prefill=1)}
    result, seen = run(changes, pools=(3, 1), spares=Pools(1, 0), start_s=60.0)
    assert [one.prefill.serving for one in seen if one.at_s in (2.0, 7.0, 12.0, 15.0)] == [3, 2, 1, 2]
    idle = [span for span in result.worker_spans if span.role == "prefill"][4:]
    assert [round(span.from_s) for span in idle] == [0], "there is one already when others end"
    with pytest.raises(ValueError, match=r"spares \(-1, 0\): must be at least 0"):
        ScalingSpec(lambda: Script({}), SLO, 1.0, spares=Pools(-1, 0))
