"""Who is refused on arrival, and when to try again: by the scheduler's report and by what was let in since."""

from dataclasses import replace
from typing import NamedTuple

from hypothesis import assume, given
from hypothesis import strategies as st

from weir.bus.queue_report import LaneReport, QueueReport, TenantQueue
from weir_gateway.entry.gate import EntryGate, EntryRefusal
from weir_gateway.entry.queue_view import QueueKey, Ticket

LANE = LaneReport("m", "standard", 0, 0, max_queued=1000, max_wait_s=10.0, s_per_request=0.1)
NOW_S = 100.0
MAX_REQUESTS = 100


class Peer(NamedTuple):
    tenant: str
    has_peers: bool = False


ALONE = Peer("a")
A, B = Peer("a", has_peers=True), Peer("b", has_peers=True)


def lane_of(num_queued: int, *, tenant: str = "a", num_free: int = 0, s_per_request: float = 0.1) -> LaneReport:
    return replace(
        LANE,
        num_queued=num_queued,
        num_queued_of_all_models=num_queued,
        s_per_request=s_per_request,
        num_free=num_free,
        tenants=(TenantQueue(tenant, num_queued),) if num_queued else (),
    )


def gate_after(
    *lanes: LaneReport,
    draw: float = 0.0,
    max_requests: int = MAX_REQUESTS,
    tenants: tuple[TenantQueue, ...] = (),
) -> EntryGate:
    gate = EntryGate(max_requests, lambda: draw)
    assert gate.report(QueueReport(7, lanes, tenants), NOW_S)
    return gate


def verdict_of(gate: EntryGate, caller: Peer = ALONE, num: int = 1, now_s: float = NOW_S) -> EntryRefusal | None:
    return gate.try_refuse(caller, "m", "standard", num, now_s)


def refusal(gate: EntryGate, caller: Peer = ALONE) -> EntryRefusal:
    verdict = verdict_of(gate, caller)
    assert verdict is not None
    return verdict


def enter(gate: EntryGate, num: int = 1, tenant: str = "a") -> Ticket:
    return gate.enter(QueueKey("m", "standard", tenant), num)


lanes = st.builds(
    lane_of,
    st.integers(0, 900),
    num_free=st.integers(0, 50),
    s_per_request=st.floats(0.0, 5.0),
)


def test_who_would_wait_for_too_long_is_refused_with_the_wait_and_a_time_to_come_back() -> None:
    verdict = refusal(gate_after(lane_of(100)))
    assert verdict.reason == "long_wait"
    assert verdict.message == (
        "lane standard: with 100 requests before it, it would wait for about 10 s, which may be 10 s; try again later"
    )
    assert verdict.retry_after_s == 6.0  # until half of the 8 s that are allowed are left
    assert verdict_of(gate_after(lane_of(79))) is None


def test_nobody_is_refused_before_anything_is_heard_or_once_it_is_long_ago() -> None:
    assert verdict_of(EntryGate(MAX_REQUESTS, lambda: 0.0)) is None
    gate = gate_after(lane_of(500))
    assert verdict_of(gate, now_s=NOW_S + 9.9) is not None
    assert verdict_of(gate, now_s=NOW_S + 10.1) is None


def test_a_report_of_a_scheduler_that_was_replaced_changes_nothing() -> None:
    gate = gate_after(lane_of(500))
    assert not gate.report(QueueReport(6), NOW_S)
    assert verdict_of(gate) is not None


@given(lane=lanes)
def test_nobody_is_refused_whose_queue_is_empty(lane: LaneReport) -> None:
    empty = replace(lane, num_queued=0, num_queued_of_all_models=0, tenants=())
    assert verdict_of(gate_after(empty), A) is None


@given(lane=lanes, more=st.integers(1, 100))
def test_a_longer_queue_never_lets_in_whom_a_shorter_one_refuses_and_never_asks_to_come_back_earlier(
    lane: LaneReport, more: int
) -> None:
    longer = lane_of(lane.num_queued + more, num_free=lane.num_free, s_per_request=lane.s_per_request)
    first, second = verdict_of(gate_after(lane)), verdict_of(gate_after(longer))
    if first is not None:
        assert second is not None
        assert second.retry_after_s >= first.retry_after_s


@given(lane=lanes, draw=st.floats(0, 1))
def test_the_time_to_come_back_is_bounded(lane: LaneReport, draw: float) -> None:
    verdict = verdict_of(gate_after(lane, draw=draw))
    assume(verdict is not None)
    assert verdict is not None
    assert 1.0 <= verdict.retry_after_s <= 75.0


def test_the_times_to_come_back_are_spread_by_a_quarter() -> None:
    assert refusal(gate_after(lane_of(100), draw=1.0)).retry_after_s == 1.25 * 6.0


def test_what_was_let_in_counts_until_the_second_report_after_the_scheduler_has_answered() -> None:
    gate = gate_after(lane_of(0))
    tickets = [enter(gate) for _ in range(81)]
    assert refusal(gate).reason == "long_wait"
    gate.report(QueueReport(7, (lane_of(0),)), NOW_S)
    assert refusal(gate).reason == "long_wait"
    for ticket in tickets:
        ticket.is_submitted = lambda: True
    gate.report(QueueReport(7, (lane_of(0),)), NOW_S)
    assert refusal(gate).reason == "long_wait"
    gate.report(QueueReport(7, (lane_of(0),)), NOW_S)
    assert verdict_of(gate) is None
    assert gate.num_held == 81


def test_as_many_as_would_start_at_once_are_not_waited_for() -> None:
    gate = gate_after(lane_of(0, num_free=32, s_per_request=1.0))
    while (verdict := verdict_of(gate)) is None:
        enter(gate)
    assert (verdict.reason, gate.num_held) == ("long_wait", 32 + 9)


def test_another_tenant_waits_for_its_turns_alone() -> None:
    gate = gate_after(lane_of(500))
    assert refusal(gate, A).reason == "long_wait"
    assert verdict_of(gate, B) is None


def test_where_tenants_do_not_take_turns_all_wait_for_all() -> None:
    assert refusal(gate_after(lane_of(500, tenant="")), B).reason == "long_wait"


def test_a_full_lane_and_a_tenants_own_bound_are_named() -> None:
    full = replace(lane_of(1000, s_per_request=0.0), tenants=())
    assert refusal(gate_after(full)).message == "lane standard is full: 1000 requests wait"
    bounded = gate_after(lane_of(5), tenants=(TenantQueue("a", 5, 5),))
    assert refusal(bounded).message == "tenant a: 5 requests wait, its max_queued"
    assert verdict_of(bounded, B) is None


def test_a_tenant_alone_may_take_all_that_the_gateway_has() -> None:
    gate = gate_after()
    enter(gate, MAX_REQUESTS)
    verdict = refusal(gate)
    assert verdict.message == "100 requests are in flight, at most 100; try again later"
    assert verdict.retry_after_s == 2.0  # not known


def test_one_of_several_tenants_cannot_take_all_that_the_gateway_has_or_all_of_a_lane() -> None:
    gate = gate_after()
    while verdict_of(gate, A) is None:
        enter(gate)
    assert gate.num_held == 80
    assert refusal(gate, A).reason == "tenant_share"
    assert verdict_of(gate, B, 10) is None
    filled = lane_of(801, s_per_request=0.0)
    assert refusal(gate_after(filled), A).reason == "tenant_share"
    assert verdict_of(gate_after(filled), B) is None


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 8)), max_size=200))
def test_never_more_are_held_than_the_gateway_takes_and_all_are_given_back(wishes: list[tuple[str, int]]) -> None:
    gate = gate_after(max_requests=20)
    tickets = []
    for tenant, num in wishes:
        if verdict_of(gate, Peer(tenant, has_peers=True), num) is None:
            tickets.append(enter(gate, num, tenant))
        assert gate.num_held <= 20
    for ticket in tickets:
        gate.leave(ticket, NOW_S)
    assert gate.num_held == 0


def test_a_full_gateway_says_by_what_ended_lately_when_half_has_gone() -> None:
    gate = gate_after()
    for number in range(10):
        gate.leave(enter(gate), NOW_S - 10 + number)
    enter(gate, MAX_REQUESTS)
    assert refusal(gate).retry_after_s == 50.0  # one a second


def test_before_a_request_is_read_only_that_is_refused_which_none_of_its_lanes_would_take() -> None:
    batch = replace(lane_of(0), lane="batch")
    gate = gate_after(lane_of(500), batch)
    assert gate.try_refuse_any(ALONE, ["m"], ["standard"], NOW_S) is not None
    assert gate.try_refuse_any(ALONE, ["m"], ["standard", "batch"], NOW_S) is None
    assert gate.try_refuse_any(ALONE, ["m"], ["standard", "unknown"], NOW_S) is None


def test_before_a_request_is_read_only_the_queues_of_the_models_that_are_served_here_count() -> None:
    gate = gate_after(lane_of(500))
    assert gate.try_refuse_any(ALONE, ["idle"], ["standard"], NOW_S) is None
    assert gate.try_refuse_any(ALONE, ["m", "idle"], ["standard"], NOW_S) is None
    two_models = gate_after(lane_of(500), replace(lane_of(0), model="other"))
    assert two_models.try_refuse_any(ALONE, ["m"], ["standard"], NOW_S) is not None
