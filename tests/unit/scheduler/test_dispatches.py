"""Dispatches are the gateway's numbers, and a scheduler that took over believes it of what it runs."""

from dataclasses import replace

import pytest
from tests.unit.scheduler.rig import LANES, Rig, make_limits, make_submit, make_worker

from weir.bus.messages import Cancel, Finish, Held, HeldRequest, Outcome, Placement, Prefilled, RefusalReason
from weir.policy.registry import PolicySpec
from weir.scheduling.commands import EnteredQueue, SendGrant

ELSEWHERE = Placement(1, "p", "address-of-p", "d2", "address-of-d2", 2)
"""What another scheduler granted."""


def queued_and_granted() -> Rig:
    """One decode slot that this scheduler can use, and request a has it."""
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("a")
    return rig


def test_a_grant_carries_the_dispatch_of_the_submit() -> None:
    rig = Rig().start()
    rig.core.submit(make_submit("a", dispatch=4))
    rig.decide()
    assert rig.placement("a").dispatch == 4


def test_a_grant_that_is_declined_for_another_one_buries_nothing_and_the_running_request_is_adopted() -> None:
    rig = queued_and_granted()
    rig.core.grant_answered("a", rig.placement("a"), accepted=False)
    rig.gateways["g"] = [HeldRequest(make_submit("a"), ELSEWHERE)]
    reply = rig.core.held(Held("g", 1, tuple(rig.gateways["g"])))
    rig.decide()
    assert (reply.num_adopted, reply.refused_request_ids) == (1, ())
    assert rig.core.is_granted("a", ELSEWHERE)


def test_what_its_gateway_runs_replaces_the_reservation_of_the_same_dispatch_before_the_grant_is_answered() -> None:
    rig = queued_and_granted()
    mine = rig.placement("a")
    rig.core.held(Held("g", 1, (HeldRequest(make_submit("a"), ELSEWHERE, is_prefilled=True),)))
    assert not rig.core.is_granted("a", mine), "nobody is told of it any more"
    rig.core.grant_answered("a", mine, accepted=False)
    rig.decide()
    assert rig.core.is_granted("a", ELSEWHERE), "the answer was to another grant"
    assert (rig.metric("granted"), rig.metric("reserved_pages"), rig.metric("prefills_in_flight")) == (1, 2, 0)
    rig.submit("b")
    assert rig.placement("b").decode_worker_id == "d", "its slot is free"
    rig.finish("a")
    assert rig.metric("granted") == 1


def test_a_request_that_is_submitted_again_frees_its_reservation_and_goes_before_what_came_since() -> None:
    rig = queued_and_granted()
    rig.submit("b")
    assert rig.core.submit(make_submit("a", dispatch=2)).queued
    decided = rig.decide()
    assert [(c.grant.request_id, c.grant.placement.dispatch) for c in decided if isinstance(c, SendGrant)] == [("a", 2)]
    assert (rig.metric("granted"), rig.metric("queued"), rig.metric("submitted_total")) == (1, 1, 2)


def test_a_request_that_comes_again_is_charged_once_for_its_prompt_and_each_token() -> None:
    """What its lost workers computed in vain is not its tenant's doing."""
    rig = queued_and_granted()
    rig.core.progressed("a", 8)
    before = rig.core.tenant_counters()
    assert before["m", "standard"]["default"] > 0
    rig.core.submit(make_submit("a", dispatch=2))
    rig.decide()
    assert rig.placement("a").dispatch == 2
    rig.core.progressed("a", 8)
    assert rig.core.tenant_counters() == before
    rig.core.progressed("a", 9)
    assert rig.core.tenant_counters() != before


def test_a_submit_that_comes_again_has_its_request_enter_a_queue_unless_it_waits_in_one() -> None:
    rig = queued_and_granted()
    rig.submit("b")
    for request_id in ("a", "b"):
        rig.core.submit(make_submit(request_id, dispatch=2))
    entered = [command.request_id for command in rig.decide() if isinstance(command, EnteredQueue)]
    assert entered == ["a"]


def test_what_comes_again_is_as_old_as_it_was_so_that_a_policy_of_deadlines_does_not_take_it_for_late() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.core.set_policy(PolicySpec("hybrid").make())
    rig.run(60)
    rig.submit("a")
    rig.submit("b")
    rig.core.submit(make_submit("a", dispatch=2))
    rig.decide()
    rig.finish("a", dispatch=2)
    assert rig.granted == ["a", "a", "b"]


def test_what_an_older_dispatch_still_says_changes_nothing() -> None:
    rig = queued_and_granted()
    first = rig.placement("a")
    rig.core.submit(make_submit("a", dispatch=2))
    rig.decide()
    second = rig.placement("a")
    rig.core.grant_answered("a", first, accepted=False)
    rig.core.prefilled(Prefilled("a", "g", 1))
    rig.finish("a", Outcome.FAILED, dispatch=1)
    rig.core.submit(make_submit("a"))
    rig.core.held(Held("g", 1, (HeldRequest(make_submit("a"), first, is_prefilled=True, num_output_tokens=5),)))
    rig.decide()
    assert rig.core.is_granted("a", second)
    assert (rig.metric("granted"), rig.metric("prefills_in_flight")) == (1, 1)
    assert len(rig.granted) == 2


def test_a_list_says_the_newer_dispatch_if_its_submit_was_lost() -> None:
    rig = queued_and_granted()
    reply = rig.core.held(Held("g", 1, (HeldRequest(make_submit("a", dispatch=2), None),)))
    rig.decide()
    assert (reply.num_adopted, rig.placement("a").dispatch) == (1, 2)


def test_a_newer_dispatch_in_a_lane_that_is_no_more_frees_the_reservation_and_is_refused() -> None:
    rig = queued_and_granted()
    again = make_submit("a", "standard", dispatch=2)
    rig.core.set_limits(replace(rig.limits, lanes=(LANES[0],), default_lane="interactive"))
    reply = rig.core.submit(again)
    assert (reply.queued, reply.reason) == (False, RefusalReason.UNKNOWN_LANE)
    rig.decide()
    assert rig.core.is_idle


def test_a_newer_dispatch_that_the_scheduler_never_knew_waits_however_full_its_lane_is() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    for number in range(5):
        rig.submit(f"r{number}", "batch")
    assert rig.submit("one-too-many", "batch").reason is RefusalReason.QUEUE_FULL
    assert rig.core.submit(make_submit("a", "batch", dispatch=2)).queued
    rig.finish("r0")
    assert rig.granted == ["r0", "a"], "it was admitted before"


def test_what_was_given_up_waiting_may_come_again_under_the_next_dispatch_but_not_what_its_gateway_ended() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running")
    rig.submit("a", deadline_ms=1000)
    rig.run(2)
    held = [HeldRequest(make_submit("a", dispatch=dispatch), None) for dispatch in (1, 3)]
    assert rig.core.held(Held("g", 98, (held[0],))).refused_request_ids == ("a",)
    assert rig.core.submit(make_submit("a", dispatch=2)).queued
    rig.decide()
    rig.cancel("a")
    assert not rig.core.submit(make_submit("a", dispatch=3)).queued
    assert rig.core.held(Held("g", 99, (held[1],))).refused_request_ids == ("a",)


@pytest.mark.parametrize("num_new", [0, 2, 4])
def test_what_was_accepted_before_is_adopted_however_many_submits_came_while_gathering(num_new: int) -> None:
    rig = Rig(make_limits(max_prefills=16))
    new = [rig.submit(f"new-{number}", "batch").queued for number in range(num_new)]
    assert all(new)
    old = [HeldRequest(make_submit(f"old-{number}", "batch"), None) for number in range(4)]
    reply = rig.core.held(Held("g", 1, tuple(old)))
    assert (reply.num_adopted, reply.refused_request_ids) == (4, ())
    rig.decide()
    rig.start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=8))
    assert rig.granted == [f"old-{number}" for number in range(4)] + [f"new-{number}" for number in range(num_new)]


def test_a_lane_over_its_bound_takes_nothing_new_until_there_is_room() -> None:
    rig = Rig()
    for number in range(4):
        rig.submit(f"new-{number}", "batch")
    rig.core.held(Held("g", 1, tuple(HeldRequest(make_submit(f"old-{n}", "batch"), None) for n in range(4))))
    assert rig.submit("late", "batch").reason is RefusalReason.QUEUE_FULL
    rig.start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=4))
    assert len(rig.granted) == 4
    assert rig.submit("later", "batch").reason is RefusalReason.QUEUE_FULL
    rig.finish("old-0")
    assert rig.submit("in-time", "batch").queued


def test_another_gateway_takes_over_what_one_had_and_that_one_is_told_and_has_no_say_in_it() -> None:
    rig = queued_and_granted()
    taken = make_submit("a", gateway="other", dispatch=1001)
    assert rig.core.submit(taken).queued
    rig.decide()
    assert rig.placement("a").dispatch == 1001
    assert (rig.metric("granted"), rig.metric("reserved_pages")) == (1, 2), "the old reservation is free"

    assert rig.core.held(Held("g", 1, (HeldRequest(make_submit("a"), ELSEWHERE),))).refused_request_ids == ("a",)
    rig.core.cancel(Cancel("a", "g"))
    rig.core.finish(Finish("a", "g", 1, Outcome.CANCELLED, 3))

    assert rig.core.is_granted("a", rig.placement("a"))
    rig.core.cancel(Cancel("a", "other"))
    assert rig.metric("granted") == 0
