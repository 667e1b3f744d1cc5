"""Lanes: guarantees, slots over a worker's number, ageing, weights, bounds on what runs, workers of their own."""

import dataclasses

import pytest
from tests.unit.scheduler.rig import Rig, make_worker

from weir.bus.messages import RefusalReason, WorkerRecord
from weir.policy.registry import PolicySpec
from weir.scheduling.limits import CoreLimits, LaneLimits, MemoryFitName, PlacingLimits, TenantLimits


def make_rig(*lanes: LaneLimits, workers: tuple[WorkerRecord, ...] = (), **changes: float | str | PlacingLimits) -> Rig:
    """Lanes named high and low are enough for most."""
    values = {"max_prefills": 100, "max_prefill_tokens": 10**6, "slot_overcommit": 0.0} | changes
    limits = CoreLimits(lanes=lanes, default_lane=lanes[0].name, **values)  # type: ignore[arg-type]
    return Rig(limits).start(*(workers or (make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))))


def lane(name: str, **changes: float | str) -> LaneLimits:
    return LaneLimits(name, 100, 3600.0, **changes)  # type: ignore[arg-type]


def granted_in_turn(rig: Rig) -> list[str]:
    """The order in which what waits is granted, one at a time."""
    before = len(rig.granted)
    while rig.metric("granted"):
        rig.finish(rig.granted[-1])
    return rig.granted[before:]


def pair(pages: int, seqs: int = 99) -> tuple[WorkerRecord, ...]:
    return make_worker("p", "prefill", pages=pages), make_worker("d", "decode", pages=pages, seqs=seqs)


def test_a_lane_takes_its_guarantee_back_from_less_urgent_borrowers_at_once() -> None:
    rig = make_rig(lane("high", guaranteed_share=0.3), lane("low"), workers=pair(100))
    for number in range(11):
        rig.submit(f"low-{number}", "low", prompt=150, max_tokens=10)
    assert rig.granted == [f"low-{number}" for number in range(10)], "all of it is lent while nobody wants it"
    for number in range(4):
        rig.submit(f"high-{number}", "high", prompt=150, max_tokens=10)
    assert rig.granted[10:] == ["high-0", "high-1", "high-2"], "30 of 100 pages, 10 each"
    assert rig.metric("reserved_pages") == 130, "decode workers preempt the borrowers"


@pytest.mark.parametrize("memory_fit", ["conservative", "past-future"])
def test_a_guarantee_is_taken_back_whatever_is_expected_of_the_borrowers(memory_fit: MemoryFitName) -> None:
    lanes = lane("high", guaranteed_share=0.3), lane("low")
    limits = CoreLimits(
        lanes, "high", max_prefills=100, max_prefill_tokens=10**6, placing=PlacingLimits(memory_fit=memory_fit)
    )
    rig = Rig(limits).start(*pair(400))
    for number in range(60):
        rig.submit(f"low-{number}", "low", prompt=16, max_tokens=200)
    assert len(rig.granted) < 60, "memory is full"
    for number in range(8):
        rig.submit(f"high-{number}", "high", prompt=16, max_tokens=200)
    assert rig.granted[-8:] == [f"high-{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("memory_fit", "prompt", "first"),
    [("aggressive", 16, "low"), ("aggressive", 900, "high"), ("conservative", 16, "high")],
)
def test_a_request_is_inside_its_lanes_guarantee_as_it_is_charged(
    memory_fit: MemoryFitName, prompt: int, first: str
) -> None:
    """The guarantee is 50 pages. Its worst case is 64 pages and more, its prompt 2 pages or 57."""
    lanes = lane("high"), lane("low", guaranteed_share=0.25)
    placing = PlacingLimits(memory_fit=memory_fit)
    rig = make_rig(*lanes, workers=pair(200, seqs=1), placing=placing)
    rig.submit("running", "high")
    rig.submit("high", "high")
    assert rig.submit("low", "low", prompt=prompt, max_tokens=1000).queued
    rig.finish("running")
    assert rig.granted == ["running", first]


def test_what_a_more_urgent_lane_has_borrowed_comes_back_as_its_requests_end() -> None:
    rig = make_rig(lane("high"), lane("low", guaranteed_share=0.2), workers=pair(100))
    for number in range(30):
        rig.submit(f"high-{number:02d}", "high", prompt=150, max_tokens=10)
    rig.submit("low-0", "low", prompt=150, max_tokens=10)
    rig.submit("low-1", "low", prompt=150, max_tokens=10)
    rig.submit("low-2", "low", prompt=150, max_tokens=10)
    assert len(rig.granted) == 10
    rig.finish("high-00")
    assert rig.granted[10:] == ["low-0"]
    rig.finish("high-01")
    assert rig.granted[11:] == ["low-1"]
    rig.finish("high-02")
    assert rig.granted[12:] == ["high-10"], "beyond its guarantee the more urgent lane is before it"


def test_an_idle_guarantee_is_kept_while_its_owner_waits_for_it() -> None:
    rig = make_rig(lane("high"), lane("low", guaranteed_share=0.2), workers=pair(100))
    for number in range(10):
        rig.submit(f"high-{number}", "high", prompt=150, max_tokens=10)
    rig.submit("high-next", "high", prompt=150, max_tokens=10)
    rig.submit("low-large", "low", prompt=310, max_tokens=10)
    rig.finish("high-0")
    assert len(rig.granted) == 10, "10 free pages are half of what the owner's request needs"
    rig.finish("high-1")
    assert rig.granted[10:] == ["low-large"]


def test_an_idle_guarantee_is_lent_as_soon_as_its_owner_waits_no_more() -> None:
    rig = make_rig(lane("high", guaranteed_share=0.5, max_batch=1), lane("low"), workers=pair(100))
    for name in ("running", "waiting"):
        rig.submit(name, "high", prompt=16, max_tokens=16)
    rig.submit("large", "low", prompt=512, max_tokens=500)
    assert rig.granted == ["running"]
    rig.cancel("waiting")
    assert rig.granted == ["running", "large"]


@pytest.mark.parametrize(("memory_fit", "starts"), [("conservative", False), ("aggressive", True)])
def test_a_request_for_more_than_its_lane_ever_gets_is_given_up_and_holds_up_nobody(
    memory_fit: MemoryFitName, starts: bool
) -> None:
    """30 of 100 pages are never lent. It needs 75 to its end, and 7 for its prompt."""
    lanes, placing = (lane("high", guaranteed_share=0.3), lane("low")), PlacingLimits(memory_fit=memory_fit)
    rig = make_rig(*lanes, workers=pair(100), lent_share=0.0, placing=placing)
    rig.submit("runs", "high", prompt=1500, max_tokens=10)
    for name, lane_name, max_tokens in (("over", "low", 1100), ("under", "low", 1020), ("owner", "high", 1100)):
        rig.submit(name, lane_name, prompt=100, max_tokens=max_tokens)
    rig.finish("runs")
    rig.finish("owner")
    assert rig.granted[1:] == ["owner", *(["over"] if starts else []), "under"]
    told = [(revoke.reason, revoke.retry_after_ms) for revoke in rig.revoked.values()]
    assert told == ([] if starts else [(RefusalReason.TOO_LARGE, 0)])


def test_over_its_guarantee_a_lane_that_waits_is_overtaken_by_no_less_urgent_one() -> None:
    rig = make_rig(lane("high", guaranteed_share=0.1), lane("low"), workers=pair(100))
    for number in range(9):
        rig.submit(f"high-{number}", "high", prompt=150, max_tokens=10)
    rig.submit("high-large", "high", prompt=310, max_tokens=10)
    rig.submit("low-tiny", "low", prompt=1, max_tokens=1)
    assert rig.granted[9:] == []
    rig.finish("high-0")
    assert rig.granted[9:] == ["high-large"]


def test_an_urgent_request_gets_a_slot_at_once_when_all_are_reserved_by_less_urgent_ones() -> None:
    rig = make_rig(lane("high"), lane("low"), workers=pair(1000, seqs=4), slot_overcommit=0.5)
    for number in range(6):
        rig.submit(f"low-{number}", "low")
    for number in range(5):
        rig.submit(f"high-{number}", "high")
    assert rig.granted == ["low-0", "low-1", "low-2", "low-3", "high-0", "high-1"], "at most half as many again"
    rig.finish("low-0")
    assert rig.granted[6:] == ["high-2"]
    rig.finish("high-0")
    assert rig.granted[7:] == ["high-3"]


def test_a_request_that_waited_long_counts_as_one_lane_more_urgent() -> None:
    rig = make_rig(lane("high"), lane("middle"), lane("low", ageing_s=10.0))
    rig.submit("running", "high")
    rig.submit("low-0", "low")
    rig.run(5)
    rig.submit("low-1", "low")
    rig.submit("middle-0", "middle")
    rig.submit("high-0", "high")
    rig.run(4)
    assert granted_in_turn(rig) == ["high-0", "middle-0", "low-0", "low-1"]


def test_after_twice_that_time_it_counts_as_two_and_goes_by_when_it_came_to_be_as_urgent() -> None:
    rig = make_rig(lane("high"), lane("middle"), lane("low", ageing_s=10.0))
    rig.submit("running", "high")
    rig.submit("low-0", "low")
    rig.run(12)
    rig.submit("middle-late", "middle")
    rig.finish("running")
    assert rig.granted[-1] == "low-0", "one lane up since 2 s"
    rig.submit("low-1", "low")
    rig.run(15)
    rig.submit("middle-0", "middle")
    rig.submit("high-0", "high")
    rig.run(6)
    rig.submit("high-1", "high")
    rig.finish("low-0")
    # low-1 has been as urgent as the highest lane for 1 s: later than high-0, earlier than high-1.
    assert granted_in_turn(rig) == ["low-1", "high-1", "middle-late", "middle-0"]
    assert rig.granted[2] == "high-0"


def test_who_may_have_no_more_in_flight_does_not_age_for_others_of_the_lane() -> None:
    """a-1 has waited for long, since its tenant has one in flight, as many as it may; b has come just now."""
    lanes = lane("high"), lane("low", ageing_s=10.0)
    limits = CoreLimits(lanes, "high", tenants=(TenantLimits("a", max_in_flight=1),), slot_overcommit=0.0)
    rig = Rig(limits).start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=2))
    rig.submit("a-0", "low", tenant="a")
    rig.submit("a-1", "low", tenant="a")
    rig.submit("running", "high")
    rig.run(25)
    rig.submit("b", "low")
    rig.submit("urgent", "high")
    rig.finish("running")
    assert rig.granted[2:] == ["urgent"]
    rig.finish("a-0")
    rig.finish("b")
    assert rig.granted[3:] == ["b", "a-1"], "inside the lane tenants go by what they were served"


def test_nobody_comes_to_be_more_urgent_than_the_most_urgent_lane() -> None:
    rig = make_rig(lane("high"), lane("low", ageing_s=10.0))
    rig.submit("running", "high")
    rig.submit("low-0", "low")
    rig.run(5)
    rig.submit("high-0", "high")
    rig.run(10)
    rig.submit("high-1", "high")
    rig.run(10)
    assert granted_in_turn(rig) == ["high-0", "low-0", "high-1"]


def test_inside_a_lane_whoever_waited_longer_than_ageing_goes_before_the_policys_choice() -> None:
    rig = make_rig(lane("only", ageing_s=10.0))
    rig.core.set_policy(PolicySpec("shortest-prompt").make())
    rig.submit("running")
    rig.submit("long", prompt=500)
    rig.run(11)
    rig.submit("short", prompt=1)
    assert granted_in_turn(rig) == ["long", "short"]


def test_weighted_lanes_share_what_is_served_by_their_weights() -> None:
    rig = make_rig(lane("high", weight=1.0), lane("low", weight=3.0), lane_order="weighted")
    rig.submit("running", "high")
    for number in range(12):
        rig.submit(f"high-{number:02d}", "high")
        rig.submit(f"low-{number:02d}", "low")
    first = granted_in_turn(rig)[:12]
    assert sum(name.startswith("low") for name in first) == 9


def test_what_lanes_have_had_counts_on_under_another_policy() -> None:
    rig = make_rig(lane("high", weight=1.0), lane("low", weight=3.0), lane_order="weighted")
    rig.submit("running", "high")
    for number in range(12):
        rig.submit(f"high-{number:02d}", "high")
        rig.submit(f"low-{number:02d}", "low")
    for _ in range(12):
        rig.core.set_policy(PolicySpec("fcfs").make())
        rig.finish(rig.granted[-1])
    assert sum(name.startswith("low") for name in rig.granted[1:]) == 9


def test_no_more_of_a_lane_run_than_may_and_others_pass_it() -> None:
    rig = make_rig(lane("high", max_batch=2), lane("low"), workers=pair(1000, seqs=5))
    for number in range(4):
        rig.submit(f"high-{number}", "high")
    rig.submit("low-0", "low")
    assert rig.granted == ["high-0", "high-1", "low-0"]
    rig.finish("high-0")
    assert rig.granted[3:] == ["high-2"]


def test_a_lane_with_workers_of_its_own_uses_them_alone_and_holds_up_nobody() -> None:
    own = [
        dataclasses.replace(make_worker(f"{role}-own", role, host="h2", seqs=1), group="fast")
        for role in ("prefill", "decode")
    ]
    common = (make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig = make_rig(lane("high", worker_group="fast"), lane("low"), workers=(*common, *own))
    for name, where in (("high-0", "high"), ("high-1", "high"), ("low-0", "low"), ("low-1", "low")):
        rig.submit(name, where)
    assert rig.granted == ["high-0", "low-0"]
    assert rig.placement("high-0").decode_worker_id == "decode-own"
    assert rig.placement("low-0").decode_worker_id == "d"
    for record in own:
        del rig.workers[record.worker_id]
        rig.core.worker_gone(record.worker_id)
    rig.finish("low-0")
    assert rig.granted[2:] == ["high-1"], "with its own workers gone it goes to the common ones"
    assert rig.placement("high-1").decode_worker_id == "d"


def test_figures_of_lanes_say_what_waits_runs_and_for_how_long() -> None:
    rig = make_rig(lane("high"), lane("low"))
    rig.submit("a", "low")
    rig.submit("b", "low")
    rig.run(3)
    metrics = rig.core.lane_metrics()
    assert metrics["low"] == {
        "queued": 1.0,
        "in_flight": 1.0,
        "granted_total": 1.0,
        "oldest_wait_s": 3.0,
        "priority": 0.0,
    }
    assert metrics["high"]["queued"] == 0.0
