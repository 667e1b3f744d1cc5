"""Limits and policy that change while requests wait and run."""

from dataclasses import replace
from random import Random

import pytest
from tests.unit.scheduler.one_slot import LANES, LIMITS, busy_rig, drain
from tests.unit.scheduler.rig import Rig, make_worker

from weir.bus.messages import RefusalReason
from weir.policy.keyed_orders import KeyedOrder
from weir.policy.registry import PolicySpec, policy_names
from weir.policy.seams import Policy, Waiting
from weir.scheduling.limits import LaneLimits, TenantLimits


def test_new_limits_lose_nothing_that_waits_and_keep_its_order() -> None:
    tenants = (TenantLimits("a", tokens_per_min=1000), TenantLimits("b"))
    rig = busy_rig(replace(LIMITS, tenants=tenants))
    for name, lane in (("m0", "middle"), ("l0", "low"), ("h0", "high"), ("m1", "middle"), ("l1", "low")):
        rig.submit(name, lane, tenant="a")
        rig.run(0.5)
    lanes = (LANES[2], LANES[0], LaneLimits("new", 10, 5.0))
    changed = replace(LIMITS, lanes=lanes, tenants=(TenantLimits("a", tokens_per_min=2000),))
    rig.core.set_limits(changed)
    assert list(rig.core.lane_metrics()) == [lane.name for lane in lanes]
    assert rig.core.check_integrity() == ()
    assert rig.metric("queued") == 5
    assert rig.core.tenant_metrics()["a"]["queued"] == 5
    used = 2000 - rig.core.tenant_metrics()["a"]["tokens_left"]
    assert 0 < used <= 5 * 32, "what was used up stays used up"
    # `middle` is no more: its requests wait in the default lane, by when they came.
    assert drain(rig) == ["l0", "l1", "m0", "h0", "m1"]
    assert rig.submit("x", "middle").reason is RefusalReason.UNKNOWN_LANE


def test_a_lane_that_runs_out_while_its_requests_run_leaves_counts_that_add_up() -> None:
    rig = busy_rig()
    rig.finish("running")
    rig.submit("m", "middle", tenant="a")
    rig.core.set_limits(replace(LIMITS, lanes=(LANES[0],)))
    rig.core.progressed("m", 5)
    assert rig.core.check_integrity() == ()
    rig.finish("m")
    assert rig.core.is_idle


def test_limits_of_tenants_that_change_hold_for_what_waits() -> None:
    limits = replace(LIMITS, tenants=(TenantLimits("a", max_in_flight=1), TenantLimits("b")))
    rig = Rig(limits).start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=3))
    for name in ("a0", "a1", "a2", "b0"):
        rig.submit(name, tenant=name[0])
    assert rig.granted == ["a0", "b0"]
    rig.core.set_limits(replace(limits, tenants=(TenantLimits("a", max_in_flight=2), TenantLimits("b"))))
    rig.decide()
    assert rig.granted == ["a0", "b0", "a1"]
    counts = {name: (f["queued"], f["in_flight"]) for name, f in rig.core.tenant_metrics().items()}
    assert counts == {"a": (1, 2), "b": (0, 1)}
    rig.core.set_limits(limits)
    rig.finish("a0")
    assert rig.granted == ["a0", "b0", "a1"], "one runs still"
    rig.finish("a1")
    assert rig.granted[3:] == ["a2"]


def test_guarantees_that_change_hold_for_what_waits() -> None:
    """Nothing of a guarantee is lent: of 100 pages the others have 20, then 90."""
    kept, given = (
        replace(LIMITS, lanes=(replace(LANES[0], guaranteed_share=share), *LANES[1:]), lent_share=0.0)
        for share in (0.8, 0.1)
    )
    rig = Rig(kept).start(make_worker("p", "prefill"), make_worker("d", "decode"))
    for name in ("m0", "m1"):
        rig.submit(name, "middle", prompt=16 * 14, max_tokens=16)
    assert rig.granted == ["m0"]
    rig.core.set_limits(given)
    rig.prefilled("m0")
    assert rig.granted == ["m0", "m1"]


def test_a_tenants_new_target_holds_for_what_waits() -> None:
    rig = busy_rig(replace(LIMITS, tenants=(TenantLimits("a", itl_slo_ms=50),)))
    rig.submit("waits", tenant="a")
    rig.core.set_limits(replace(LIMITS, tenants=(TenantLimits("a", itl_slo_ms=20),)))
    rig.finish("running")
    assert rig.placement("waits").scheduling.itl_target_ms == 20


def test_a_lanes_new_patience_holds_for_what_waits() -> None:
    rig = busy_rig()
    rig.submit("waits")
    rig.core.set_limits(replace(LIMITS, lanes=(replace(LANES[0], max_wait_s=2.0), *LANES[1:])))
    rig.run(3)
    assert rig.revoked["waits"].reason is RefusalReason.WAITED_TOO_LONG


def test_who_waits_as_a_stranger_belongs_to_the_default_tenant_of_now() -> None:
    """The two change places."""
    rig = busy_rig(replace(LIMITS, tenants=(TenantLimits("a"),), default_tenant=TenantLimits("b")))
    rig.submit("waits", tenant="stranger")
    assert rig.core.tenant_metrics()["b"]["queued"] == 1
    rig.core.set_limits(replace(LIMITS, tenants=(TenantLimits("b"),), default_tenant=TenantLimits("a")))
    metrics = rig.core.tenant_metrics()
    assert (metrics["a"]["queued"], metrics["b"]["queued"]) == (1, 0)


def test_what_waits_goes_by_arrival_alone_as_soon_as_limits_say_so() -> None:
    limits = replace(LIMITS, tenants=(TenantLimits("a"), TenantLimits("b")))
    rig = busy_rig(limits)
    for name in ("b0", "b1", "a0", "a1"):
        rig.clock.advance(0.01)
        rig.submit(name, tenant=name[0])
    rig.core.set_limits(replace(limits, tenant_order="arrival"))
    assert drain(rig) == ["b0", "b1", "a0", "a1"]


def test_a_new_policy_orders_what_waits_already() -> None:
    rig = busy_rig()
    for name, prompt in (("a", 300), ("b", 100), ("c", 200)):
        rig.submit(name, prompt=prompt)
    rig.core.set_policy(PolicySpec("shortest-prompt").make())
    rig.submit("d", prompt=150)
    assert drain(rig) == ["b", "d", "c", "a"]


def test_a_new_policy_orders_tenants_lanes_and_models_that_come_later() -> None:
    rig = busy_rig(replace(LIMITS, tenants=(TenantLimits("new"),)))
    rig.put(*(make_worker(f"{role}2", role, host="h2", model="m2", seqs=1) for role in ("prefill", "decode")))
    rig.submit("waits")
    rig.submit("runs", model="m2")
    rig.core.set_policy(PolicySpec("shortest-prompt").make())
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
        rig.core.set_policy(PolicySpec(policy).make())
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
        rig.core.set_policy(PolicySpec(policy).make())
    return [(request_id, rig.placement(request_id).scheduling.rank) for request_id in drain(rig)]


@pytest.mark.parametrize("policy", policy_names())
def test_what_waits_already_is_served_as_if_the_policy_had_been_there_from_the_start(policy: str) -> None:
    served = order_and_ranks(policy, from_the_start=False)
    assert served == order_and_ranks(policy, from_the_start=True)
    assert len(served) == 40


def test_who_waited_before_a_policy_came_gets_a_slot_over_the_number_by_its_rank_under_it() -> None:
    rig = Rig(replace(LIMITS, slot_overcommit=1.0))
    for name, predicted in (("long", 500.0), ("short", 5.0), ("middle", 50.0)):
        rig.submit(name, predicted_output_tokens=predicted)
    rig.core.set_policy(PolicySpec("srtf").make())
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


class OnceInALane:
    """Its queues take a request once, and none that comes from another queue."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def policy(self) -> Policy:
        return Policy("once", KeyedOrder(self._key), None, None)

    def _key(self, request: Waiting) -> tuple[float, ...]:
        if request.request_id in self._seen:
            raise RuntimeError(f"no place for {request.request_id}")
        self._seen.add(request.request_id)
        return ()


def test_a_policy_that_cannot_take_the_queue_leaves_everything_as_it_was() -> None:
    rig = busy_rig()
    for number in range(3):
        rig.submit(f"r{number}", tenant=f"t{number}")
    before = (rig.core.metrics(), rig.core.tenant_metrics(), rig.core.tenant_counters())
    broken = Policy("broken", BrokenOrder(), None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no place for r0"):
        rig.core.set_policy(broken)
    assert (rig.core.metrics(), rig.core.tenant_metrics(), rig.core.tenant_counters()) == before
    assert rig.core.check_integrity() == ()
    assert drain(rig) == ["r0", "r1", "r2"]


def test_limits_under_which_nothing_can_be_queued_leave_what_tenants_have_used_up_as_it_was() -> None:
    limits = replace(LIMITS, tenants=(TenantLimits("a", tokens_per_min=1000),))
    rig = busy_rig(limits)
    rig.core.set_policy(OnceInALane().policy())
    rig.submit("waits", tenant="a")
    before = rig.core.tenant_metrics()
    with pytest.raises(RuntimeError, match="no place for waits"):
        rig.core.set_limits(replace(limits, lanes=LANES[::-1], tenants=(TenantLimits("a", tokens_per_min=5000),)))
    assert rig.core.tenant_metrics() == before


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
    rig.core.set_policy(PolicySpec("srtf").make())
    rig.finish("running")
    rig.submit("short", predicted_output_tokens=5.0)
    rig.finish("short")
    rig.submit("long", predicted_output_tokens=500.0)
    assert rig.placement("short").scheduling.rank < rig.placement("long").scheduling.rank
