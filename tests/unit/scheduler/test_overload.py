"""Shedding from the least urgent lane up, and limits and policy that change while requests wait and run."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from tests.unit.scheduler.rig import Rig, make_worker

from weir.bus.messages import RefusalReason
from weir.policy.registry import make_policy, policy_names
from weir.policy.seams import Policy, Waiting
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits

LANES = (LaneLimits("high", 100, 60.0), LaneLimits("middle", 100, 60.0), LaneLimits("low", 100, 60.0))
LIMITS = CoreLimits(lanes=LANES, default_lane="high", slot_overbooking=0.0)


def busy_rig(limits: CoreLimits = LIMITS) -> Rig:
    """One slot, and it is taken."""
    rig = Rig(limits).start(make_worker("p", "prefill", pages=1000), make_worker("d", "decode", pages=1000, seqs=1))
    rig.submit("running")
    return rig


def drain(rig: Rig) -> list[str]:
    before = len(rig.granted)
    while rig.metric("granted"):
        rig.finish(rig.granted[-1])
    return rig.granted[before:]


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


def test_new_limits_lose_nothing_that_waits_and_keep_its_order() -> None:
    tenants = (TenantLimits("a", tokens_per_min=1000), TenantLimits("b"))
    rig = busy_rig(replace(LIMITS, tenants=tenants))
    for name, lane in (("m0", "middle"), ("l0", "low"), ("h0", "high"), ("m1", "middle"), ("l1", "low")):
        rig.submit(name, lane, tenant="a")
        rig.run(0.5)
    lanes = (LANES[2], LANES[0], LaneLimits("new", 10, 5.0))
    changed = replace(LIMITS, lanes=lanes, tenants=(TenantLimits("a", tokens_per_min=2000),))
    rig.core.set_limits(changed)
    assert list(rig.core.lane_figures()) == [lane.name for lane in lanes]
    assert rig.core.check_integrity() == ()
    assert rig.metric("queued") == 5
    assert rig.core.tenant_figures()["a"]["queued"] == 5
    used = 2000 - rig.core.tenant_figures()["a"]["tokens_left"]
    assert 0 < used <= 5 * 32, "what was used up stays used up"
    # `middle` is no more: its requests wait in the default lane, by when they came.
    assert drain(rig) == ["l0", "l1", "m0", "h0", "m1"]
    assert rig.submit("x", "middle").reason is RefusalReason.UNKNOWN_LANE


def test_a_lane_that_runs_out_while_its_requests_run_leaves_books_that_add_up() -> None:
    rig = busy_rig()
    rig.finish("running")
    rig.submit("m", "middle", tenant="a")
    rig.core.set_limits(replace(LIMITS, lanes=(LANES[0],)))
    rig.core.progressed("m", 5)
    assert rig.core.check_integrity() == ()
    rig.finish("m")
    assert rig.core.is_idle


def test_a_new_policy_orders_what_waits_already() -> None:
    rig = busy_rig()
    for name, prompt in (("a", 300), ("b", 100), ("c", 200)):
        rig.submit(name, prompt=prompt)
    assert rig.core.policy_name == "fcfs"
    rig.core.set_policy(make_policy("shortest-prompt"))
    assert rig.core.policy_name == "shortest-prompt"
    rig.submit("d", prompt=150)
    assert drain(rig) == ["b", "d", "c", "a"]


def test_a_new_policy_orders_tenants_lanes_and_models_that_come_later() -> None:
    rig = busy_rig(replace(LIMITS, tenants=(TenantLimits("new"),)))
    rig.put(*(make_worker(f"{role}2", role, host="h2", model="m2", seqs=1) for role in ("prefill", "decode")))
    rig.submit("waits")
    rig.submit("runs", model="m2")
    rig.core.set_policy(make_policy("shortest-prompt"))
    for changes in ({"tenant": "new"}, {"lane": "low"}, {"model": "m2"}):
        for prompt in (100, 20):
            rig.submit(f"{'-'.join(changes.values())}-{prompt}", **changes, prompt=prompt)
    for number in range(9):
        rig.finish(rig.granted[number])
    for name in ("new", "low", "m2"):
        assert [request_id for request_id in rig.granted if request_id.startswith(name)] == [
            f"{name}-20",
            f"{name}-100",
        ]


def order_and_ranks(policy: str, *, from_the_start: bool) -> list[tuple[str, float]]:
    """How forty requests of two tenants in two lanes, of random lengths, are served, one after the other."""
    rig, source = busy_rig(replace(LIMITS, tenants=(TenantLimits("a"), TenantLimits("b")))), Random(7)
    if from_the_start:
        rig.core.set_policy(make_policy(policy))
    for number in range(40):
        rig.clock.advance(0.01)
        rig.submit(
            f"r{number}",
            source.choice(("high", "low")),
            tenant=source.choice("ab"),
            prompt=source.randint(1, 200),
            predicted_output_tokens=float(source.randint(1, 100)),
            output_score=source.random(),
            ttft_target_ms=source.choice((100, 2000, 60_000)),
        )
    if not from_the_start:
        rig.core.set_policy(make_policy(policy))
    return [(request_id, rig.placement(request_id).rank) for request_id in drain(rig)]


@pytest.mark.parametrize("policy", policy_names())
def test_what_waits_already_is_served_as_if_the_policy_had_been_there_from_the_start(policy: str) -> None:
    served = order_and_ranks(policy, from_the_start=False)
    assert served == order_and_ranks(policy, from_the_start=True)
    assert len(served) == 40


def test_who_waited_before_a_policy_came_gets_a_slot_over_the_number_by_its_rank_under_it() -> None:
    rig = Rig(replace(LIMITS, slot_overbooking=1.0))
    for name, predicted in (("long", 500.0), ("short", 5.0), ("middle", 50.0)):
        rig.submit(name, predicted_output_tokens=predicted)
    rig.core.set_policy(make_policy("srtf"))
    rig.start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    assert rig.granted == ["short"], "no other outranks it"
    rig.submit("shortest", predicted_output_tokens=1.0)
    assert rig.granted == ["short", "shortest"]


class BrokenQueue:
    """Of a policy with a defect."""

    def add(self, request: Waiting) -> None:
        raise RuntimeError(f"no place for {request.request_id}")


class BrokenOrder:
    def new_queue(self) -> BrokenQueue:
        return BrokenQueue()


def test_a_policy_that_cannot_take_the_queue_leaves_everything_as_it_was() -> None:
    rig = busy_rig()
    for number in range(3):
        rig.submit(f"r{number}", tenant=f"t{number}")
    before = (rig.core.metrics(), rig.core.tenant_figures(), rig.core.tenant_counters())
    broken = Policy("broken", BrokenOrder(), None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no place for r0"):
        rig.core.set_policy(broken)
    assert (rig.core.metrics(), rig.core.tenant_figures(), rig.core.tenant_counters()) == before
    assert rig.core.policy_name == "fcfs"
    assert rig.core.check_integrity() == ()
    assert drain(rig) == ["r0", "r1", "r2"]


def test_counters_survive_a_change_of_limits_so_that_nobody_is_served_twice() -> None:
    tenants = (TenantLimits("a"), TenantLimits("b"))
    rig = busy_rig(replace(LIMITS, tenants=tenants))
    for number in range(6):
        rig.submit(f"a{number}", tenant="a", prompt=100)
    for number in range(6):
        rig.submit(f"b{number}", tenant="b", prompt=100)
    rig.finish("running")
    rig.finish(rig.granted[-1])
    before = rig.core.tenant_counters()
    rig.core.set_limits(replace(LIMITS, tenants=tenants, max_queued=1000))
    assert rig.core.tenant_counters() == before
    order = [name[0] for name in drain(rig)]
    assert all(set(order[start : start + 2]) == {"a", "b"} for start in range(0, 8, 2)), order


def test_a_preemptive_policys_rank_is_in_the_placement() -> None:
    rig = busy_rig()
    rig.core.set_policy(make_policy("srtf"))
    assert rig.core.policy_name == "srtf"
    rig.finish("running")
    rig.submit("short", predicted_output_tokens=5.0)
    rig.finish("short")
    rig.submit("long", predicted_output_tokens=500.0)
    assert rig.placement("short").rank < rig.placement("long").rank
