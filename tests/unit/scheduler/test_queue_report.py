"""What gateways are told: who waits where, and how fast it goes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler.one_slot import LIMITS, busy_rig
from tests.unit.scheduler.rig import Rig

from weir.bus.codec import MAX_MESSAGE_BYTES, encode
from weir.bus.queue_report import LaneReport, TenantQueue
from weir.scheduling.lane_rates import LaneRates
from weir.scheduling.limits import TenantLimits


def lane(rig: Rig, name: str) -> LaneReport | None:
    return next((one for one in rig.core.queue_report().lanes if one.lane == name), None)


def serve_every(rig: Rig, seconds: float, num: int) -> None:
    for _ in range(num):
        rig.run(seconds)
        rig.finish(rig.granted[-1])


def test_a_lane_is_reported_with_what_waits_whose_it_is_and_its_bounds() -> None:
    rig = busy_rig(replace(LIMITS, tenants=(TenantLimits("a", max_queued=3), TenantLimits("b"))))
    assert rig.core.queue_report().lanes == ()
    for number in range(2):
        rig.submit(f"a-{number}", "low", tenant="a")
    rig.submit("b-0", "low", tenant="b")
    report = rig.core.queue_report()
    [low] = report.lanes
    assert (low.lane, low.num_queued, low.num_queued_of_all_models) == ("low", 3, 3)
    assert (low.max_queued, low.max_wait_s, low.s_per_request) == (100, 60.0, 0.0)
    assert low.tenants == (TenantQueue("a", 2), TenantQueue("b", 1))
    assert report.tenants == (TenantQueue("a", 2, 3),)


def test_how_fast_a_lane_goes_is_known_after_some_ended_while_others_waited_and_remembered() -> None:
    rig = busy_rig()
    for number in range(6):
        rig.submit(f"r-{number}", "high")
    serve_every(rig, 0.5, 4)
    high = lane(rig, "high")
    assert high is not None
    assert high.s_per_request == pytest.approx(0.5)
    assert (high.num_queued, high.num_free) == (2, 0)
    serve_every(rig, 0.5, 3)
    rig.run(30.0)
    high = lane(rig, "high")
    assert high is not None
    assert high.s_per_request == pytest.approx(0.5)
    assert (high.num_queued, high.num_free, high.tenants) == (0, 1, ())


def test_ends_without_anybody_waiting_say_nothing() -> None:
    rig = busy_rig()
    for number in range(8):
        rig.run(0.5)
        rig.finish(rig.granted[-1])
        rig.submit(f"r-{number}", "high")
    assert lane(rig, "high") is None


def test_a_lane_that_stands_still_counts_as_slower_up_to_four_times() -> None:
    rates = LaneRates()
    for number in range(5):
        rates.add("m", "high", 4, float(number), is_backlogged=True)
    assert rates.paces(4.0)["m", "high"] == (1.0, 4)
    assert rates.paces(15.0)["m", "high"] == (3.0, 4)
    assert rates.paces(50.0)["m", "high"] == (4.0, 4)
    assert rates.paces(2000.0) == {}


@pytest.mark.parametrize("what", ["bus", "worker", "leadership"])
def test_an_outage_in_which_nothing_could_be_granted_is_not_the_lanes_pace(what: str) -> None:
    rig = busy_rig()
    for number in range(12):
        rig.submit(f"r-{number}", "high")
    serve_every(rig, 0.5, 4)
    for _ in range(60):
        rig.core.bus_changed(is_connected=what != "bus")
        if what == "worker":
            rig.core.worker_gone("d")
        rig.clock.advance(0.5)
        rig.core.tick()
        if what != "leadership":
            rig.core.decide()
    paces = [lane(rig, "high")]
    rig.core.bus_changed(is_connected=True)
    rig.keep_workers()
    rig.say_held()
    rig.decide()
    serve_every(rig, 0.5, 3)
    paces.append(lane(rig, "high"))
    assert [pace and pace.s_per_request for pace in paces] == pytest.approx([0.5, 0.5], rel=0.4)


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=60))
def test_a_pace_is_always_a_positive_time(steps: list[tuple[float, bool]]) -> None:
    rates, now_s = LaneRates(), 0.0
    for gap_s, is_backlogged in steps:
        now_s += gap_s
        rates.add("m", "high", 1, now_s, is_backlogged=is_backlogged)
        assert all(pace.s_per_request > 0 for pace in rates.paces(now_s).values())


def test_a_report_fits_into_a_message_whatever_waits() -> None:
    tenants = tuple(TenantLimits(f"{number:04d}" + "x" * 60, max_queued=5) for number in range(1500))
    rig = busy_rig(replace(LIMITS, tenants=tenants, lanes=tuple(replace(one, max_queued=5000) for one in LIMITS.lanes)))
    for tenant in tenants:
        rig.submit(f"of-{tenant.name}", "low", tenant=tenant.name)
    report = rig.core.queue_report()
    assert (len(report.lanes[0].tenants), len(report.tenants)) == (1024, 1024)
    assert len(encode(report)) < MAX_MESSAGE_BYTES / 4
