"""Workers and gateways that die, messages that are lost, a scheduler that takes over."""

import dataclasses

import pytest
from tests.unit.scheduler.rig import Rig, make_limits, make_submit, make_worker

from weir.bus.messages import Held, HeldRequest, Outcome, Placement, RefusalReason
from weir.scheduling.limits import LaneLimits

GRANTED = Placement(1, "p", "address-of-p", "d", "address-of-d", 2)


@pytest.mark.parametrize("guaranteed_share", [0.0, 1.0])
def test_what_no_worker_that_is_left_can_hold_is_told_so_though_all_slots_are_taken(guaranteed_share: float) -> None:
    hosts = {"small": 10, "large": 100}
    lane = LaneLimits("standard", 100, 30.0, guaranteed_share=guaranteed_share)
    rig = Rig(dataclasses.replace(make_limits(), lanes=(lane,))).start(
        *(make_worker(f"p-{h}", "prefill", host=h, pages=pages) for h, pages in hosts.items()),
        *(make_worker(f"d-{h}", "decode", host=h, pages=pages, seqs=1) for h, pages in hosts.items()),
    )
    rig.submit("a", max_tokens=64)
    rig.submit("b", max_tokens=64)
    rig.submit("long", max_tokens=400)
    assert {rig.placement(request_id).decode_worker_id for request_id in "ab"} == {"d-small", "d-large"}
    rig.core.worker_gone("d-large")
    rig.decide()
    assert rig.revoked["long"].reason is RefusalReason.NO_WORKER


def test_while_the_bus_is_away_nobody_is_judged_nor_for_one_time_to_live_after() -> None:
    rig = Rig().start()
    rig.submit("a")
    rig.core.bus_changed(is_connected=False)
    rig.run(20, silent=["p", "d", "g"])
    assert (rig.revoked, rig.metric("granted"), rig.metric("gateways")) == ({}, 1, 1)
    rig.core.bus_changed(is_connected=True)
    rig.run(2.5, silent=["p", "d", "g"])
    assert (rig.revoked, rig.metric("granted")) == ({}, 1)
    assert rig.metric("workers") == 2
    rig.run(1.0, silent=["p", "d"])
    assert (rig.metric("workers"), rig.revoked) == (0, {})


def test_while_the_bus_is_away_nothing_is_granted() -> None:
    rig = Rig().start()
    rig.core.bus_changed(is_connected=False)
    rig.submit("a")
    assert rig.granted == []
    rig.core.bus_changed(is_connected=True)
    rig.decide()
    assert rig.granted == ["a"]


def test_a_scheduler_that_stood_still_itself_judges_nobody_for_that_time() -> None:
    rig = Rig().start()
    rig.submit("a")
    rig.clock.advance(60)
    rig.core.tick()
    rig.decide()
    assert (rig.revoked, rig.metric("granted")) == ({}, 1)


def test_a_silent_gateway_loses_what_waits_and_what_runs() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running")
    rig.submit("waiting")
    rig.submit("other", gateway="g2")
    rig.run(4.5, silent=["g"])
    assert rig.metric("gateways") == 2
    rig.run(1.0, silent=["g"])
    assert rig.granted == ["running", "other"]
    assert (rig.metric("gateways"), rig.metric("queued"), rig.metric("granted")) == (1, 0, 1)
    assert rig.revoked == {}, "there is nobody to tell"


def test_a_gateway_that_was_only_cut_off_brings_its_requests_back() -> None:
    rig = Rig().start()
    rig.submit("a")
    rig.gateways["g"][0] = dataclasses.replace(rig.gateways["g"][0], placement=rig.placement("a"))
    rig.run(6, silent=["g"])
    assert rig.core.is_idle
    rig.say_held()
    rig.decide()
    assert (rig.metric("granted"), rig.metric("reserved_pages")) == (1, 2)


def test_what_its_gateway_does_not_list_for_two_seconds_is_freed() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running")
    rig.submit("waiting")
    rig.gateways["g"].clear()
    rig.run(2.0)
    assert rig.metric("granted") + rig.metric("queued") == 2
    rig.run(1.0)
    assert rig.core.is_idle
    assert rig.metric("ended_missing_total") == 2


def test_a_list_that_crossed_a_submit_frees_nothing() -> None:
    rig = Rig().start()
    rig.submit("a")
    held = list(rig.gateways["g"])
    rig.gateways["g"].clear()
    rig.run(1.0)
    rig.gateways["g"] = held
    rig.run(1.0)
    rig.gateways["g"] = []
    rig.run(2.0)
    assert rig.metric("granted") == 1, "the two seconds count from the last list that lacked it"


def test_a_late_list_says_nothing() -> None:
    rig = Rig().start()
    rig.submit("a")
    rig.run(1.0)
    for _ in range(10):
        rig.clock.advance(0.5)
        assert rig.core.held(Held("g", 1, ())).num_adopted == 0
        rig.say_held()
        rig.keep_workers()
        rig.core.tick()
    assert rig.metric("granted") == 1
    stale = HeldRequest(make_submit("ghost"), None)
    assert rig.core.held(Held("g", 1, (stale,))).num_adopted == 0
    assert rig.metric("queued") == 0


def test_a_list_in_parts_is_judged_when_all_have_come() -> None:
    rig = Rig().start()
    rig.submit("a")
    rig.submit("b")
    one, two = rig.gateways.pop("g")

    def say(sequences: range, *parts: tuple[int, tuple[HeldRequest, ...]]) -> None:
        for sequence in sequences:
            rig.clock.advance(0.5)
            rig.keep_workers()
            for part, requests in parts:
                rig.core.held(Held("g", sequence, requests, part, num_parts=2))
            rig.core.tick()

    say(range(50, 60), (1, (two,)), (1, (two,)))
    assert rig.metric("granted") == 2, "part 0 was lost each time"
    say(range(60, 70), (1, (two,)), (0, (one,)))
    assert rig.metric("granted") == 2
    say(range(70, 80), (1, (two,)), (0, ()))
    assert rig.metric("granted") == 1


def test_a_new_scheduler_takes_over_what_gateways_hold_and_keeps_their_order() -> None:
    rig = Rig(epoch=8)
    rig.submit("new", "interactive")
    running = HeldRequest(make_submit("running"), GRANTED)
    waiting = [HeldRequest(make_submit(f"old-{number}", "interactive"), None) for number in range(2)]
    rig.put(make_worker("p", "prefill"), make_worker("d", "decode", seqs=2))
    reply = rig.core.held(Held("g", 41, (running, *waiting, *rig.gateways["g"])))
    assert (reply.epoch, reply.num_adopted, reply.refused_request_ids) == (8, 3, ())
    rig.gateways["g"] = [running, *waiting, *rig.gateways["g"]]
    assert rig.decide() == (), "still gathering"
    rig.say_held(sequence=42)
    rig.run(1.5)
    assert rig.granted == ["old-0"], "one slot of two is taken by what runs already"
    rig.finish("running")
    rig.finish("old-0")
    assert rig.granted == ["old-0", "old-1", "new"]


def test_what_was_given_up_is_not_taken_over_again_from_a_gateway_that_has_not_heard_of_it() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running")
    rig.submit("a", deadline_ms=1000)
    rig.run(2)
    assert rig.revoked["a"].dispatch == 1
    assert rig.core.held(Held("g", 99, (HeldRequest(make_submit("a"), None),))).refused_request_ids == ("a",)
    assert rig.metric("queued") == 0


def test_what_was_given_up_in_the_queue_is_taken_over_if_its_gateway_runs_it_under_another_schedulers_grant() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running")
    rig.submit("a", deadline_ms=1000)
    rig.run(2)
    assert list(rig.revoked) == ["a"]
    reply = rig.core.held(Held("g", 99, (HeldRequest(make_submit("a"), GRANTED),)))
    assert (reply.refused_request_ids, reply.num_adopted) == ((), 1)
    assert rig.core.check_integrity() == ()


def test_a_list_that_names_what_ended_or_what_cannot_wait_is_answered_with_it() -> None:
    rig = Rig().start()
    rig.submit("a")
    rig.finish("a", Outcome.CANCELLED)
    ended = HeldRequest(make_submit("a"), GRANTED)
    strange = HeldRequest(make_submit("b", "vip"), None)
    foreign = HeldRequest(make_submit("c", gateway="another"), None)
    full = [HeldRequest(make_submit(f"f{number}", "batch", model="absent"), None) for number in range(5)]
    reply = rig.core.held(Held("g", 1, (ended, strange, foreign, *full)))
    assert reply.refused_request_ids == ("a", "b", "c")
    assert reply.num_adopted == 5
    assert rig.core.check_integrity() == ()


def test_a_grant_that_another_scheduler_made_wins_over_the_queue() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running")
    rig.submit("a")
    reply = rig.core.held(Held("g", 1, (HeldRequest(make_submit("a"), GRANTED, is_prefilled=True),)))
    assert reply.num_adopted == 1
    rig.decide()
    assert (rig.metric("queued"), rig.metric("granted"), rig.metric("prefills_in_flight")) == (0, 2, 1)
    rig.finish("running")
    rig.finish("a")
    assert rig.core.is_idle


def test_a_finish_of_an_older_dispatch_frees_nothing() -> None:
    rig = Rig()
    rig.gateways["g"] = [HeldRequest(make_submit("a"), dataclasses.replace(GRANTED, dispatch=3))]
    rig.start()
    rig.say_held()
    rig.finish("a", dispatch=2)
    assert rig.metric("granted") == 1
    rig.finish("a", dispatch=3)
    assert rig.core.is_idle


def test_a_record_of_an_unknown_role_is_counted_and_ignored() -> None:
    rig = Rig().start()
    rig.put(make_worker("x", "juggler", model="new"))
    assert rig.metric("worker_malformed_total") == 1
    assert rig.submit("a", model="new").reason is RefusalReason.NO_WORKER
