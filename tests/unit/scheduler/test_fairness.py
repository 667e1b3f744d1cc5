"""Virtual token counters: the bound of their paper on random workloads, and what first come first served does there."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.scheduler.mini_fleet import Arrival, MiniFleet
from tests.unit.scheduler.rig import Rig, make_worker

from weir.scheduling.fairness import Fairness, VirtualCounters
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits, TenantOrder

TENANTS = ("a", "b", "c")
MAX_PROMPT, MAX_TOKENS = 64, 12


@dataclass(frozen=True)
class Burst:
    """`num_requests` of one tenant, one every `every` steps (0: all at once)."""

    tenant: str
    step: int
    every: int
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    def arrivals(self) -> list[Arrival]:
        lengths = self.num_prompt_tokens, self.num_output_tokens
        return [Arrival(self.step + self.every * n, self.tenant, *lengths) for n in range(self.num_requests)]


def bursts(tenant: str) -> st.SearchStrategy[Burst]:
    return st.builds(
        Burst,
        tenant=st.just(tenant),
        step=st.integers(0, 10),
        every=st.integers(0, 3),
        num_requests=st.integers(2, 12),
        num_prompt_tokens=st.integers(1, MAX_PROMPT),
        num_output_tokens=st.integers(1, MAX_TOKENS),
    )


workloads = st.tuples(*(bursts(tenant) for tenant in (*TENANTS, *TENANTS[:2])))


def widest_gap(workload: tuple[Burst, ...], num_pages: int, max_num_seqs: int, order: TenantOrder) -> float:
    """The largest difference in service that two tenants got while both had something queued all the time."""
    weights = dict.fromkeys(TENANTS, 1.0)
    fleet = MiniFleet(
        weights, num_pages=num_pages, max_num_seqs=max_num_seqs, tenant_order=order, max_tokens=MAX_TOKENS
    )
    arrivals = sorted((a for burst in workload for a in burst.arrivals()), key=lambda arrival: arrival.step)
    ranges: dict[tuple[str, str], tuple[float, float]] = {}
    """Pair -> lowest and highest difference since both began to wait."""
    widest = 0.0
    for step in itertools.count():
        while arrivals and arrivals[0].step <= step:
            fleet.submit(arrivals.pop(0))
        before, gaps = fleet.backlogged(), fleet.gaps()
        fleet.step()
        waiting = before & fleet.backlogged()
        for pair in itertools.combinations(TENANTS, 2):
            if not waiting.issuperset(pair):
                ranges.pop(pair, None)
                continue
            low, high = ranges.get(pair, (gaps[pair], gaps[pair]))
            gap = fleet.gaps()[pair]
            ranges[pair] = (min(low, gap), max(high, gap))
            widest = max(widest, max(high, gap) - min(low, gap))
        if fleet.is_idle and not arrivals:
            assert fleet.core.is_idle
            return widest
    raise AssertionError("unreachable")


def bound(num_pages: int) -> float:
    """2 * max(w_p * longest prompt, w_q * tokens of the fleet)."""
    return 2 * max(1.0 * MAX_PROMPT, 2.0 * num_pages * 16)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_workloads", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_tenants_that_wait_get_equal_service_within_the_bound_and_first_come_first_served_breaks_it(
    num_workloads: int,
) -> None:
    outcomes: list[tuple[float, float]] = []

    @settings(max_examples=num_workloads, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads, st.integers(5, 6), st.integers(1, 3))
    def on_a_workload(workload: tuple[Burst, ...], num_pages: int, max_num_seqs: int) -> None:
        fair = widest_gap(workload, num_pages, max_num_seqs, "fair") / bound(num_pages)
        assert fair <= 1
        outcomes.append((fair, widest_gap(workload, num_pages, max_num_seqs, "arrival") / bound(num_pages)))

    on_a_workload()
    num_exceeding = sum(by_arrival > 1 for _, by_arrival in outcomes)
    assert num_exceeding > 0.2 * len(outcomes)


def test_a_tenant_with_twice_the_weight_gets_twice_the_service() -> None:
    fleet = MiniFleet({"heavy": 2.0, "light": 1.0}, num_pages=12, max_num_seqs=3, max_tokens=MAX_TOKENS)
    for _ in range(60):
        fleet.submit(Arrival(0, "heavy", 20, 8))
        fleet.submit(Arrival(0, "light", 20, 8))
    while len(fleet.backlogged()) == 2:
        fleet.step()
    assert fleet.service["heavy"] == pytest.approx(fleet.service["light"], abs=bound(12))
    assert fleet.num_served["heavy"] == pytest.approx(2 * fleet.num_served["light"], abs=4)


def test_who_was_away_has_saved_nothing_up() -> None:
    fleet = MiniFleet({"a": 1.0, "b": 1.0}, num_pages=12, max_num_seqs=1, max_tokens=MAX_TOKENS)
    for _ in range(20):
        fleet.submit(Arrival(0, "a", 20, 8))
    while len(fleet.queued) > 10:
        fleet.step()
    for _ in range(10):
        fleet.submit(Arrival(0, "b", 20, 8))
    before = dict(fleet.num_served)
    while len(fleet.queued) > 8:
        fleet.step()
    assert fleet.num_served["a"] - before["a"] == pytest.approx(6, abs=1)


def test_a_counter_is_lifted_to_the_least_of_those_that_wait_or_to_the_last_that_left() -> None:
    counters = VirtualCounters()
    counters.charge("old", 50.0)
    counters.lift("new", 30.0)
    assert counters["new"] == 30.0
    counters.charge("new", 40.0)
    counters.lift("new", 10.0)
    assert counters["new"] == 70.0, "never lowered"
    counters.leave("new")
    counters.lift("third", None)
    assert counters["third"] == 70.0
    counters.charge("new", 100.0)
    counters.lift("fourth", None)
    assert counters["fourth"] == 170.0, "what the last one was given after it had left its queue counts"
    counters.keep_only(("third", "fourth"))
    counters.lift("fifth", None)
    assert counters["fifth"] == 70.0


def test_groups_of_counters_are_bounded_and_those_of_unknown_lanes_and_tenants_are_dropped() -> None:
    fairness = Fairness(lambda key: False, max_groups=3)
    for number in range(5):
        fairness.group(f"model-{number}", "batch").charge("a", 1.0)
    assert [key for key, _ in fairness.items()] == [(f"model-{number}", "batch") for number in (2, 3, 4)]
    fairness.group("model-4", "gone").charge("a", 1.0)
    fairness.group("model-4", "batch").charge("b", 1.0)
    fairness.keep_only(("batch",), ("b",))
    assert {key: dict(counters.values) for key, counters in fairness.items() if counters.values} == {
        ("model-4", "batch"): {"b": 1.0}
    }


def test_counters_that_somebody_needs_are_never_dropped() -> None:
    """Two are needed of a bound of three: the others make room. Once all are needed there are more than the bound, and
    fewer again when they are not any more."""
    needed = {("model-0", "batch"), ("model-1", "batch")}
    fairness = Fairness(lambda key: key in needed, max_groups=3)
    for number in range(9):
        fairness.group(f"model-{number}", "batch").charge("a", 1.0)
    assert {key for key, _ in fairness.items()} == {*needed, ("model-8", "batch")}
    needed |= {(f"model-{number}", "batch") for number in range(20)}
    for number in range(20):
        fairness.group(f"model-{number}", "batch")
    assert needed <= {key for key, _ in fairness.items()}
    needed.clear()
    for number in range(100, 200):
        fairness.group(f"model-{number}", "batch")
    assert len(list(fairness.items())) == 3


def test_the_counters_of_a_model_are_not_dropped_for_each_other() -> None:
    fairness = Fairness(lambda key: False, max_groups=3)
    groups = {lane: fairness.group("m", lane) for lane in ("a", "b", "c", "d", "e")}
    assert dict(fairness.items()) == {("m", lane): groups[lane] for lane in groups}


def test_tenants_that_wait_or_run_keep_their_counters_whatever_other_models_come_and_go() -> None:
    """Seventy models of 64 lanes are more groups of counters than are kept."""
    lanes = tuple(LaneLimits(f"lane{number}", 100, 60.0) for number in range(64))
    tenants = (TenantLimits("a"), TenantLimits("b"))
    rig = Rig(CoreLimits(lanes=lanes, default_lane="lane0", tenants=tenants, slot_overcommit=0.0))
    others = [f"other{number}" for number in range(70)]
    rig.start(
        *(
            make_worker(f"{role}-{model}", role, host=model, model=model, seqs=1)
            for model in ("m", "busy", *others)
            for role in ("prefill", "decode")
        )
    )
    rig.submit("runs", model="busy", tenant="a", prompt=20)
    rig.submit("first", "lane1")
    for number in range(3):
        rig.submit(f"a{number}", tenant="a")
        rig.submit(f"b{number}", tenant="b")
    for model in others:
        rig.submit(model, model=model)
        rig.finish(model)
    for request_id in ("first", "a0", "b0", "a1"):
        rig.finish(request_id)
    assert rig.granted[-4:] == ["a0", "b0", "a1", "b1"], "they take turns"
    assert rig.core.tenant_counters()["busy", "lane0"] == {"a": 20.0}
