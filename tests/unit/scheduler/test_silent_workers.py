"""Workers that the scheduler does not hear: they get nothing new, and what they have ends on its gateway's word."""

import pytest
from tests.unit.scheduler.rig import Rig, make_submit, make_worker

from weir.bus.messages import HeldRequest, Outcome, Placement, RefusalReason


def test_a_silent_worker_gets_nothing_new_and_keeps_what_it_has_as_long_as_gateways_hold_it() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode"), make_worker("d2", "decode"))
    rig.submit("a")
    rig.submit("b")
    kept = next(name for name in "ab" if rig.placement(name).decode_worker_id == "d")
    rig.run(60, silent=["d"])
    assert (rig.revoked, rig.metric("granted"), rig.metric("workers")) == ({}, 2, 2)
    for name in "cdef":
        rig.submit(name)
        assert rig.placement(name).decode_worker_id == "d2"
    rig.finish(kept, Outcome.FAILED)
    assert (rig.metric("ended_failed_total"), rig.metric("granted")) == (1, 5)


def test_a_silent_worker_that_speaks_again_is_used_again_with_all_that_is_reserved_on_it() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=2))
    rig.submit("a")
    rig.run(10, silent=["d"])
    rig.submit("refused")
    assert rig.granted == ["a"]
    rig.run(0.5)
    rig.submit("b")
    rig.submit("c")
    assert rig.granted == ["a", "b"], "two slots, and one has been taken all the time"


def test_a_worker_that_a_gateway_has_lost_gets_nothing_new_until_it_is_heard_again() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode"))
    rig.submit("a")
    again = make_submit("a", dispatch=2, lost_worker_id="d")
    assert rig.core.submit(again).queued
    rig.decide()
    assert rig.granted == ["a"], "its first grant"
    rig.run(0.5, silent=["d"])
    assert rig.granted == ["a"]
    rig.run(1.5)
    assert rig.granted == ["a", "a"]


def test_pages_of_a_silent_worker_stay_reserved_in_the_memory_that_it_shares() -> None:
    workers = [make_worker(name, "decode", pages=4) for name in ("d", "d2")]
    rig = Rig().start(make_worker("p", "prefill", pages=4), *workers)
    rig.submit("a", max_tokens=48)
    silent = rig.placement("a").decode_worker_id
    rig.run(5, silent=[silent])
    rig.submit("b")
    assert rig.granted == ["a"], "the arena has four pages, and all are taken"
    rig.finish("a", Outcome.FAILED)
    assert rig.granted == ["a", "b"]


def test_pages_of_a_forgotten_worker_are_reserved_again_when_its_gateway_is_back_with_a_request_on_it() -> None:
    workers = [make_worker(name, "decode", pages=4) for name in ("d", "d2")]
    rig = Rig().start(make_worker("p", "prefill", pages=4), *workers)
    rig.submit("a", max_tokens=48)
    lost_id = rig.placement("a").decode_worker_id
    del rig.workers[lost_id]
    rig.core.worker_gone(lost_id)
    rig.run(rig.limits.gateway_ttl_s + 0.5, silent=["g"])
    assert rig.core.is_idle
    rig.gateways["g"] = [HeldRequest(make_submit("a", max_tokens=48), rig.placement("a"))]
    rig.say_held()
    rig.submit("b")
    assert rig.granted == ["a"], "the arena has four pages, and all are taken"
    rig.finish("a", Outcome.FAILED)
    assert rig.granted == ["a", "b"]


@pytest.mark.parametrize("says_it_ended", [True, False])
def test_a_dead_worker_is_forgotten_with_its_last_reservation_and_its_gateways_death_is_enough(
    says_it_ended: bool,
) -> None:
    rig = Rig().start()
    rig.submit("a")
    del rig.workers["d"]
    rig.core.worker_gone("d")
    rig.run(20)
    assert rig.metric("reserved_pages") == 2
    if says_it_ended:
        rig.finish("a", Outcome.FAILED)
    else:
        rig.run(rig.limits.gateway_ttl_s + 0.5, silent=["g"])
    assert (rig.metric("reserved_pages"), rig.core.is_idle) == (0, True)
    rig.core.tick()
    assert "d" not in rig.core._workers


def test_a_prefill_worker_that_takes_its_entry_back_takes_nothing_with_it() -> None:
    rig = Rig().start(make_worker("p", "prefill", running=9), make_worker("d", "decode"))
    rig.submit("read")
    rig.submit("unread")
    rig.prefilled("read")
    rig.core.worker_gone("p")
    rig.decide()
    assert (rig.revoked, rig.metric("granted")) == ({}, 2)


def test_waiting_requests_wait_for_a_worker_to_come_back() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("a")
    rig.submit("b")
    del rig.workers["d"]
    rig.core.worker_gone("d")
    rig.run(5)
    assert rig.granted == ["a"]
    rig.finish("a", Outcome.FAILED)
    assert rig.granted == ["a"]
    rig.put(make_worker("d-reborn", "decode", seqs=1))
    rig.decide()
    assert rig.placement("b").decode_worker_id == "d-reborn"


def test_an_entry_that_is_told_again_is_no_sign_of_life() -> None:
    rig = Rig().start()
    record = rig.workers.pop("d")
    rig.core.worker_seen(record, 99)
    for _ in range(8):
        rig.clock.advance(0.5)
        rig.core.worker_seen(record, 99)
        rig.core.tick()
    assert rig.submit("a").reason is RefusalReason.NO_WORKER


def test_an_adopted_grant_whose_worker_never_shows_itself_ends_on_its_gateways_word() -> None:
    rig = Rig()
    entry = HeldRequest(make_submit("a"), Placement(1, "p", "address-of-p", "unheard", "address-of-d", 2))
    rig.gateways["g"] = [entry]
    rig.start()
    rig.run(20)
    assert (rig.revoked, rig.metric("reserved_pages")) == ({}, 2)
    rig.finish("a", Outcome.FAILED)
    assert rig.metric("reserved_pages") == 0


def test_counters_that_alerts_and_dashboards_need_begin_at_zero() -> None:
    metrics = Rig().core.metrics()
    lanes = {f"granted_{lane.name}_total" for lane in Rig().limits.lanes}
    assert lanes
    assert {metrics[name] for name in {"workers_lost_total", "gateways_lost_total", *lanes}} == {0.0}
