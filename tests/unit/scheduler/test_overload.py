"""Shedding from the least urgent lane up."""

from collections.abc import Mapping
from dataclasses import replace

from tests.unit.scheduler.one_slot import LANES, LIMITS, busy_rig, drain
from tests.unit.scheduler.rig import Rig, make_worker

from weir.bus.messages import RefusalReason
from weir.scheduling.limits import TenantLimits


def reasons(rig: Rig) -> Mapping[str, RefusalReason]:
    return {request_id: revoke.reason for request_id, revoke in rig.revoked.items()}


def test_when_all_queues_are_full_the_latest_of_the_least_urgent_lane_makes_room() -> None:
    rig = busy_rig(replace(LIMITS, max_queued=3))
    for number in range(2):
        rig.submit(f"low-{number}", "low")
        rig.run(0.5)
    rig.submit("middle-0", "middle")
    assert rig.submit("high-0", "high").queued
    assert reasons(rig) == {"low-1": RefusalReason.SHED}
    assert rig.revoked["low-1"].retry_after_ms >= 100
    assert rig.submit("high-1", "high").queued
    assert rig.submit("high-2", "high").queued
    assert list(rig.revoked) == ["low-1", "low-0", "middle-0"]
    for lane in ("high", "low"):
        reply = rig.submit(f"{lane}-more", lane)
        assert (reply.queued, reply.reason) == (False, RefusalReason.SHED)
    assert drain(rig) == ["high-0", "high-1", "high-2"]


def test_what_will_have_waited_too_long_before_its_turn_is_given_up_at_once_the_latest_first() -> None:
    rig = busy_rig()
    for number in range(20):
        rig.submit(f"early-{number:02d}")
    for _ in range(20):
        rig.run(0.5)
        rig.finish(rig.granted[-1])
    # 2 a second end: 1.5 * 60 s are enough for 180 of them and a few more.
    lanes = tuple(replace(lane, max_queued=1000) for lane in LANES)
    rig.core.set_limits(replace(LIMITS, lanes=lanes))
    replies = [rig.submit(f"r{number:03d}", "middle") for number in range(250)]
    num_queued = sum(reply.queued for reply in replies)
    assert 180 <= num_queued <= 220
    assert {reply.reason for reply in replies[num_queued:]} == {RefusalReason.SHED}
    assert all(reply.queued for reply in replies[:num_queued])
    assert replies[-1].retry_after_ms == 30_000
    assert rig.submit("urgent", "high").queued, "hardly anybody is before it"
    for number in range(30):
        rig.submit(f"high-{number:02d}", "high")
    rig.run(0.5)
    revoked = list(rig.revoked)
    assert revoked == [f"r{num_queued - 1 - index:03d}" for index in range(len(revoked))]
    assert 20 <= len(revoked) <= 60, "as many as have come before them"
    assert set(reasons(rig).values()) == {RefusalReason.SHED}


def test_without_enough_ends_to_estimate_by_nobody_is_shed() -> None:
    rig = busy_rig()
    for number in range(90):
        rig.submit(f"r{number:02d}", "low", deadline_ms=2000)
    rig.run(1)
    assert rig.revoked == {}


def test_the_pace_of_quiet_times_is_not_taken_for_what_can_be_done() -> None:
    lanes = tuple(replace(lane, max_queued=1000) for lane in LANES)
    rig = busy_rig(replace(LIMITS, lanes=lanes))
    rig.finish("running")
    for number in range(28):
        rig.run(1)
        rig.submit(f"one-a-second-{number:02d}")
        rig.finish(rig.granted[-1])
    assert all(rig.submit(f"burst-{number:03d}", deadline_ms=50_000).queued for number in range(200))
    rig.run(0.5)
    assert rig.revoked == {}


def test_a_tenant_that_floods_a_lane_is_shed_and_not_those_that_take_turns_with_it() -> None:
    lanes = tuple(replace(lane, max_queued=1000) for lane in LANES)
    rig = busy_rig(replace(LIMITS, lanes=lanes, tenants=(TenantLimits("flood"), TenantLimits("light"))))
    for number in range(200):
        rig.submit(f"flood-{number:03d}", tenant="flood")
    for _ in range(20):
        rig.run(0.5)
        rig.finish(rig.granted[-1])
    assert rig.submit("flood-more", tenant="flood", deadline_ms=30_000).reason is RefusalReason.SHED
    assert rig.submit("light-0", tenant="light", deadline_ms=30_000).queued
    rig.run(0.5)
    assert "light-0" not in rig.revoked
    rig.finish(rig.granted[-1])
    rig.finish(rig.granted[-1])
    assert "light-0" in rig.granted


def test_who_waits_for_workers_of_its_own_holds_up_no_other_lane() -> None:
    lanes = (replace(LANES[0], max_queued=1000, worker_group="fast"), *LANES[1:])
    rig = Rig(replace(LIMITS, lanes=lanes)).start(
        *(
            replace(make_worker(f"{role}{group}", role, host=f"h{group}", pages=1000, seqs=1), group=group)
            for role in ("prefill", "decode")
            for group in ("", "fast")
        )
    )
    for number in range(200):
        rig.submit(f"fast-{number:03d}", "high")
    for _ in range(20):
        rig.run(0.5)
        rig.finish(rig.granted[-1])
    assert rig.submit("more", "high", deadline_ms=30_000).reason is RefusalReason.SHED
    assert rig.submit("low", "low", deadline_ms=30_000).queued
    assert "low" in rig.granted
