"""What the scheduler keeps of a request: its targets in time, prefills before it, what its tenant owes."""

from math import inf

import pytest
from tests.unit.scheduler.rig import make_submit

from weir.bus.messages import Placement
from weir.policy.registry import PolicySpec
from weir.scheduling.fairness import VirtualCounters
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits
from weir.scheduling.request import PlacementPlan, RequestFactory, ScheduledRequest
from weir.scheduling.request_table import RequestTable
from weir.scheduling.reservations import Reservations

LANES = (LaneLimits("urgent", 10, 60.0, ttft_slo_ms=400, itl_slo_ms=40), LaneLimits("batch", 10, 90.0))
LIMITS = CoreLimits(LANES, "batch", tenants=(TenantLimits("paying", ttft_slo_ms=250, itl_slo_ms=25),))


def taken_in(lane: str, tenant: str, *, ttft_ms: int = 0, itl_ms: int = 0, deadline_ms: int = 0) -> ScheduledRequest:
    """At 100 s."""
    hints = {"ttft_target_ms": ttft_ms, "itl_target_ms": itl_ms}
    submit = make_submit("r", lane, tenant=tenant, deadline_ms=deadline_ms, **hints)  # type: ignore[arg-type]
    return RequestFactory(LIMITS, PolicySpec("fcfs").make()).request(submit, lane, 100.0, 100.0, 16)


@pytest.mark.parametrize(
    ("lane", "tenant", "own_ms", "ttft_due_s", "itl_ms"),
    [
        ("urgent", "paying", (150, 15), 100.15, 15),
        ("urgent", "paying", (0, 0), 100.25, 25),
        ("urgent", "other", (0, 0), 100.4, 40),
        ("batch", "other", (0, 0), inf, 0),
    ],
)
def test_a_requests_own_target_goes_before_its_tenants_and_that_before_its_lanes(
    lane: str, tenant: str, own_ms: tuple[int, int], ttft_due_s: float, itl_ms: int
) -> None:
    request = taken_in(lane, tenant, ttft_ms=own_ms[0], itl_ms=own_ms[1])
    assert request.waiting.ttft_deadline_s == pytest.approx(ttft_due_s)
    assert request.scheduling.itl_target_ms == itl_ms


def test_a_request_waits_as_long_as_its_lane_allows_or_its_client_if_that_is_less() -> None:
    assert taken_in("urgent", "other").expires_at_s == 160.0
    assert taken_in("urgent", "other", deadline_ms=2500).expires_at_s == 102.5
    assert taken_in("urgent", "other", deadline_ms=99_000).expires_at_s == 160.0


def test_what_was_prefilled_is_waited_for_no_more() -> None:
    """Three prompts of 300 ms each; the first is prefilled, and 100 ms of the second."""
    reservations = Reservations()
    requests = []
    for number in range(3):
        request = RequestFactory(LIMITS, PolicySpec("fcfs").make()).request(
            make_submit(f"r{number}"), "batch", 5.0, 5.0, 16
        )
        request.plan = PlacementPlan(Placement(1, "p", "p:1", "d", "d:1", 2), 2, prefill_ms=300.0)
        reservations.add(request, 10.0)
        requests.append(request)
    load = reservations.prefill_load("p")
    assert load.queue_ms(10.0) == pytest.approx(900.0)
    assert load.queue_ms(10.2) == pytest.approx(700.0)
    reservations.mark_prefilled(requests[0], 10.4)
    assert load.queue_ms(10.5) == pytest.approx(500.0)
    reservations.remove(requests[1], 10.6)
    reservations.mark_prefilled(requests[2], 10.7)
    assert load.queue_ms(10.7) == 0.0


def test_who_comes_when_nobody_waits_is_lifted_to_the_last_one_that_did_with_all_that_it_was_charged_since() -> None:
    """The last one's request goes on after it has stopped waiting: those tokens count as well."""
    counters = VirtualCounters()
    counters.lift("a", None)
    counters.charge("a", 100.0)
    counters.leave("a")
    counters.charge("a", 40.0)
    counters.lift("b", None)
    assert counters["b"] == 140.0
    counters.keep_only(["b"])
    counters.lift("c", None)
    assert counters["c"] == 100.0, "forgotten, but for what it had when it left"


def test_nobody_is_put_back_by_a_lift() -> None:
    counters = VirtualCounters()
    counters.charge("a", 500.0)
    counters.lift("a", 20.0)
    assert counters["a"] == 500.0


def test_only_what_is_computed_of_a_prompt_is_charged() -> None:
    """90 of 100 tokens are cached; of a prompt that is cached as a whole one token is computed for its logits."""
    for num_cached, charged in ((0, 100.0), (90, 10.0), (100, 1.0)):
        table = RequestTable(LIMITS, PolicySpec("fcfs").make(), 0.0)
        request = table.enqueue(make_submit("r", "batch", tenant="paying", prompt=100), 1.0, 100)
        placement = Placement(1, "p", "p:1", "d", "d:1", 8)
        table.place(request, PlacementPlan(placement, 8, num_cached_tokens=num_cached), 2.0)
        assert table.fairness.group("m", "batch")["paying"] == charged


@pytest.mark.parametrize(("is_ahead", "counter"), [(True, 5.0), (False, 100.0)])
def test_who_waited_before_the_scheduler_changed_keeps_its_place_among_tenants(is_ahead: bool, counter: float) -> None:
    """Whoever comes anew is lifted to the least of those that wait."""
    table = RequestTable(LIMITS, PolicySpec("fcfs").make(), 0.0)
    table.fairness.restore({("m", "batch"): {"paying": 5.0, "default": 100.0}}, ["batch"], ["paying", "default"])
    table.enqueue_ahead(make_submit("first", "batch", tenant="default"), 1.0)
    second = make_submit("second", "batch", tenant="paying")
    if is_ahead:
        table.enqueue_ahead(second, 1.0)
    else:
        table.enqueue(second, 1.0, 16)
    assert table.fairness.group("m", "batch")["paying"] == counter
