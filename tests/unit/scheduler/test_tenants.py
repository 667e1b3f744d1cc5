"""Tenants: quotas and their hints, bounds on what waits and what runs, targets, lanes that they may use."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler.rig import Rig, make_submit, make_worker

from weir.bus.messages import Held, HeldRequest, Outcome, Placement, RefusalReason, SubmitReply
from weir.bus.queue_report import QuotaLevel
from weir.core.bucket import Bucket
from weir.scheduling.commands import SendGrant
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits

LANES = (LaneLimits("high", 100, 60.0, ttft_slo_ms=500, itl_slo_ms=50), LaneLimits("low", 100, 60.0))


def make_rig(*tenants: TenantLimits, seqs: int = 1) -> Rig:
    limits = CoreLimits(lanes=LANES, default_lane="high", tenants=tenants, slot_overcommit=0.0)
    return Rig(limits).start(make_worker("p", "prefill", pages=1000), make_worker("d", "decode", pages=1000, seqs=seqs))


def refusal(reply: SubmitReply) -> tuple[RefusalReason | None, int]:
    return reply.reason, reply.retry_after_ms


def test_over_its_requests_a_minute_a_tenant_is_told_when_there_is_room_again() -> None:
    rig = make_rig(TenantLimits("a", requests_per_min=2))
    assert rig.submit("r1", tenant="a").queued
    assert rig.submit("r2", tenant="a").queued
    reply = rig.submit("r3", tenant="a")
    assert refusal(reply) == (RefusalReason.QUOTA, 30_001)
    assert "tenant a: over 2 requests a minute, its requests_per_min" in reply.message
    assert rig.submit("other").queued, "another tenant's bucket is its own"
    rig.run(30.5)
    assert rig.submit("r3", tenant="a").queued


def test_tokens_are_taken_for_prompt_and_most_that_may_be_answered_and_what_was_not_answered_is_given_back() -> None:
    rig = make_rig(TenantLimits("a", tokens_per_min=600), seqs=9)
    assert rig.submit("r1", tenant="a", prompt=100, max_tokens=400).queued
    reply = rig.submit("r2", tenant="a", prompt=100, max_tokens=100)
    assert refusal(reply) == (RefusalReason.QUOTA, 10_001)
    rig.finish("r1", num_output_tokens=50)
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 450
    assert rig.submit("r3", tenant="a", prompt=100, max_tokens=350).queued
    rig.cancel("r3")
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 450 - 100, "it had been granted: its prompt was read"


def test_what_is_refused_or_repeated_costs_nothing_and_what_never_ran_is_given_back() -> None:
    rig = make_rig(TenantLimits("a", tokens_per_min=600, requests_per_min=100))
    rig.submit("running")
    rig.submit("r1", tenant="a", prompt=100, max_tokens=100)
    rig.submit("r1", tenant="a", prompt=100, max_tokens=100)
    rig.submit("no-such-lane", "gold", tenant="a")
    metrics = rig.core.tenant_metrics()["a"]
    assert (metrics["tokens_left"], metrics["requests_left"]) == (400, 99)
    rig.cancel("r1")
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 600


def test_a_request_that_was_freed_and_comes_back_pays_again_what_it_was_given_back() -> None:
    """Its gateway was cut off for 6 s, in which 60 tokens came into the bucket. One ran, one waited."""
    rig = make_rig(TenantLimits("a", tokens_per_min=600, requests_per_min=60))
    rig.submit("runs", tenant="a", prompt=100, max_tokens=200)
    rig.submit("waits", tenant="a", prompt=50, max_tokens=100)
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 600 - 300 - 150
    rig.run(6, silent=("g",))
    assert rig.core.is_idle
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 600 - 100 + 60
    rig.say_held()
    rig.decide()
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 600 - 300 - 150 + 60
    rig.cancel("waits")
    rig.finish("runs", num_output_tokens=200)
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 600 - 300 + 60


def test_a_request_that_was_freed_and_is_submitted_again_pays_once() -> None:
    rig = make_rig(TenantLimits("a", tokens_per_min=600))
    rig.submit("running")
    rig.submit("waits", tenant="a", prompt=50, max_tokens=100)
    rig.run(6, silent=("g",))
    rig.core.submit(make_submit("waits", tenant="a", prompt=50, max_tokens=100))
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 450
    rig.cancel("waits")
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 600


def test_what_was_given_back_is_remembered_of_as_many_requests_as_of_those_that_are_over() -> None:
    """Two, and none of what got nothing back: r1, which was freed first, comes back for nothing, r2 for its 150 tokens.
    Of those of r3 the bucket had room for 95, since 55 had come into it meanwhile."""
    limits = CoreLimits(LANES, "high", (TenantLimits("a", tokens_per_min=600),), max_tombstones=2, slot_overcommit=0.0)
    rig = Rig(limits).start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running")
    for request_id in ("r1", "r2", "r3"):
        rig.submit(request_id, tenant="a", prompt=50, max_tokens=100)
    rig.run(6, silent=("g",))
    rig.say_held()
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 600 - 150 - 95


def test_a_request_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_off() -> None:
    rig = make_rig(TenantLimits("a", tokens_per_min=60))
    assert rig.submit("large", tenant="a", prompt=100, max_tokens=20).queued
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == -60
    assert refusal(rig.submit("next", tenant="a", prompt=10, max_tokens=20)) == (RefusalReason.QUOTA, 90_001)


@given(
    st.floats(1, 1e6),
    st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0, 100)), min_size=1, max_size=30),
)
def test_a_bucket_never_gives_more_than_its_rate_and_its_hint_is_neither_early_nor_late(
    per_min: float, asks: list[tuple[float, float]]
) -> None:
    bucket, now_s, taken = Bucket(per_min, 0.0), 0.0, 0.0
    for amount, pause_s in asks:
        now_s += pause_s
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0:
            assert bucket.wait_s(amount, now_s + 0.9 * wait_s) > 0
            now_s += wait_s * (1 + 1e-9) + 1e-6
            assert bucket.wait_s(amount, now_s) == pytest.approx(0, abs=1e-6)
        bucket.take(amount, now_s)
        taken += amount
        assert taken <= per_min * (1 + now_s / 60) * (1 + 1e-6) + max(0.0, amount - per_min) + 1e-3


def with_rate(rig: Rig, tokens_per_min: float) -> None:
    rig.core.set_limits(replace(rig.limits, tenants=(TenantLimits("a", tokens_per_min=tokens_per_min),)))


def test_what_was_taken_at_a_higher_rate_is_not_paid_off_at_a_lower_one() -> None:
    """1,000 of 1,200 are taken, so it is full again in 50 s; at 20 a minute as well, and not in 50 minutes."""
    rig = make_rig(TenantLimits("a", tokens_per_min=1200))
    rig.submit("r1", tenant="a", prompt=200, max_tokens=800)
    with_rate(rig, 20)
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == pytest.approx(200 / 60)
    assert rig.core.quota_debts()["a"].tokens_s == pytest.approx(50)
    assert refusal(rig.submit("r2", tenant="a", prompt=10, max_tokens=10)) == (RefusalReason.QUOTA, 50_001)
    rig.run(50.5)
    assert rig.submit("r2", tenant="a", prompt=10, max_tokens=10).queued


def test_a_higher_rate_gives_its_room_at_once_less_what_was_used_up() -> None:
    rig = make_rig(TenantLimits("a", tokens_per_min=600))
    assert rig.submit("r1", tenant="a", prompt=100, max_tokens=800).queued
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == -300
    with_rate(rig, 1000)
    assert rig.core.tenant_metrics()["a"]["tokens_left"] == 100
    assert rig.submit("r2", tenant="a", prompt=50, max_tokens=50).queued


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0, 3e6), st.floats(0, 200), st.floats(0.1, 1e6))
def test_a_changed_rate_makes_nobody_wait_longer_than_it_was_to_wait_for_a_full_bucket(
    before: float, after: float, taken: float, pause_s: float, amount: float
) -> None:
    bucket = Bucket(before, 0.0)
    bucket.take(taken, 0.0)
    full_in_s = bucket.full_in_s(pause_s)
    bucket.set_rate(after, pause_s)
    assert bucket.wait_s(amount, pause_s) <= full_in_s * (1 + 1e-9) + 1e-6
    assert bucket.level(pause_s) <= after


def test_no_more_of_a_tenant_wait_than_may() -> None:
    rig = make_rig(TenantLimits("a", max_queued=2))
    rig.submit("running")
    assert [rig.submit(f"a{number}", tenant="a").queued for number in range(3)] == [True, True, False]
    assert rig.submit("b").queued
    rig.cancel("a0")
    assert rig.submit("a3", tenant="a").queued


def test_over_its_number_in_flight_a_tenant_waits_and_others_pass() -> None:
    rig = make_rig(TenantLimits("a", max_in_flight=2), seqs=4)
    for number in range(4):
        rig.submit(f"a{number}", tenant="a")
    rig.submit("b0")
    assert rig.granted == ["a0", "a1", "b0"]
    rig.finish("a0")
    assert rig.granted[3:] == ["a2"]
    rig.cancel("a3")
    rig.finish("a1")
    rig.submit("a4", tenant="a")
    assert rig.granted[4:] == ["a4"]


def test_a_tenant_that_could_have_no_more_in_flight_has_saved_nothing_up() -> None:
    rig = make_rig(TenantLimits("a", max_in_flight=1), TenantLimits("b"), seqs=2)
    for number in range(4):
        rig.submit(f"a{number}", tenant="a", prompt=100)
    for number in range(9):
        rig.submit(f"b{number}", tenant="b", prompt=100)
    for number in range(6):
        rig.finish(f"b{number}")
    counters = rig.core.tenant_counters()["m", "high"]
    assert counters["b"] > 600
    rig.finish("a0")
    assert rig.granted[-1] == "a1"
    assert rig.core.tenant_counters()["m", "high"]["a"] >= 600


def test_a_lane_that_a_tenant_may_not_use_is_named() -> None:
    rig = make_rig(TenantLimits("a", lanes=("low",)))
    reply = rig.submit("r1", "high", tenant="a")
    assert refusal(reply) == (RefusalReason.LANE_FORBIDDEN, 0)
    assert reply.message == "lane 'high': tenant a may use low"
    assert rig.submit("r2", "low", tenant="a").queued


@pytest.mark.parametrize(
    ("lane", "tenant", "own_ms", "target_ms"),
    [("low", "", 0, 0), ("high", "", 0, 50), ("high", "slow", 0, 200), ("low", "slow", 0, 200), ("high", "slow", 7, 7)],
)
def test_a_requests_own_target_goes_before_its_tenants_and_that_before_its_lanes(
    lane: str, tenant: str, own_ms: int, target_ms: int
) -> None:
    rig = make_rig(TenantLimits("slow", itl_slo_ms=200))
    rig.submit("r", lane, tenant=tenant, itl_target_ms=own_ms)
    assert rig.placement("r").scheduling.itl_target_ms == target_ms


def test_service_is_charged_as_it_is_delivered_and_what_another_scheduler_charged_is_not_charged_again() -> None:
    rig = make_rig(TenantLimits("a", weight=2.0), seqs=4)
    rig.submit("r1", tenant="a", prompt=100, max_tokens=100)
    assert rig.core.tenant_counters()["m", "high"]["a"] == 100 / 2
    rig.core.progressed("r1", 10)
    rig.core.progressed("r1", 10)
    rig.core.progressed("r1", 4)
    assert rig.core.tenant_counters()["m", "high"]["a"] == (100 + 2 * 10) / 2
    rig.finish("r1", num_output_tokens=25)
    assert rig.core.tenant_counters()["m", "high"]["a"] == (100 + 2 * 25) / 2
    placement = Placement(1, "p", "address-of-p", "d", "address-of-d", 2)
    adopted = HeldRequest(make_submit("old", "high", tenant="a"), placement, num_output_tokens=40)
    rig.core.held(Held("g", 99, (adopted,)))
    assert rig.core.tenant_counters()["m", "high"]["a"] == 75
    rig.core.progressed("old", 45)
    assert rig.core.tenant_counters()["m", "high"]["a"] == 75 + 2 * 5 / 2


def test_an_unfinished_request_is_given_up_without_learning_from_its_length() -> None:
    rig = make_rig()
    rig.submit("r1")
    rig.finish("r1", Outcome.FAILED, num_output_tokens=9)
    assert rig.core.tenant_metrics()["default"]["in_flight"] == 0


def test_grants_and_refusals_say_what_is_left_of_the_tenants_quotas_and_which_bound_is_reached() -> None:
    rig = make_rig(TenantLimits("a", requests_per_min=2, tokens_per_min=600), TenantLimits("free"), seqs=9)
    rig.submit("r1", tenant="a", prompt=100, max_tokens=100)
    rig.submit("f1", tenant="free")
    quotas = {
        command.grant.request_id: command.grant.quota for command in rig.commands if isinstance(command, SendGrant)
    }
    assert quotas == {"r1": QuotaLevel(2, 1, 600, 400), "f1": None}
    reply = rig.submit("r2", tenant="a", prompt=500, max_tokens=100)
    assert (reply.bound, reply.quota) == ("tokens_per_min", QuotaLevel(2, 1, 600, 400))
    rig.submit("r3", tenant="a")
    rig.submit("r4", tenant="a")
    assert rig.submit("r5", tenant="a").bound == "requests_per_min"
