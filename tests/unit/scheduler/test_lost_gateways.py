"""Gateways that the scheduler does not hear any more: what is reserved for their requests, and for whom."""

from dataclasses import replace

import pytest
from tests.unit.scheduler.rig import Rig, make_submit, make_worker

from weir.bus.messages import Finish, HeldRequest, Outcome, Placement
from weir.core.life import NO_PREFERENCE

KEEP_MS = 20_000
SLOTS = 2


def rig_with_a_slot_left() -> Rig:
    """Gateway g has one request with a key and one without; "waiting" is another gateway's."""
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=SLOTS))
    rig.gateways["g2"] = []
    rig.submit("keyed", keep_ms=KEEP_MS)
    rig.submit("plain")
    for name in ("keyed", "plain"):
        rig.prefilled(name)
    rig.submit("waiting", gateway="g2")
    return rig


def lose_gateway(rig: Rig) -> None:
    rig.gateways["g"].clear()
    rig.run(rig.limits.gateway_ttl_s + 0.5, silent=["g"])


def claimed(rig: Rig, dispatch: int = 1001) -> HeldRequest:
    """As the gateway lists it that goes on with it, which does not know where its prompt was read."""
    granted = rig.placement("keyed")
    submit = make_submit("keyed", gateway="g2", dispatch=dispatch, keep_ms=KEEP_MS)
    placement = replace(
        granted,
        dispatch=dispatch,
        prefill_worker_id="d",
        prefill_address="",
        scheduling=NO_PREFERENCE,
        reason="claimed",
    )
    return HeldRequest(submit, placement, is_prefilled=True, num_output_tokens=3)


def reserved_for(rig: Rig, name: str) -> Placement | None:
    request = rig.core._requests.try_get(name)
    return None if request is None else request.placement


def test_what_workers_keep_for_another_gateway_stays_reserved_and_all_else_is_free_at_once() -> None:
    rig = rig_with_a_slot_left()
    lose_gateway(rig)
    assert reserved_for(rig, "plain") is None
    assert reserved_for(rig, "keyed") == rig.placement("keyed")
    assert rig.granted == ["keyed", "plain", "waiting"], "one of two slots is free"
    assert rig.metric("gateways_lost_total") == 1


def test_it_is_reserved_no_longer_than_workers_keep_it() -> None:
    rig = rig_with_a_slot_left()
    lose_gateway(rig)
    rig.submit("next", gateway="g2")
    rig.run(KEEP_MS / 1000 - 1, silent=["g"])
    assert "next" not in rig.granted
    rig.run(1.5, silent=["g"])
    assert rig.granted[-1] == "next"
    assert not rig.core.knows_gateway("g")
    assert rig.metric("gateways_lost_total") == 1


@pytest.mark.parametrize("is_missed", [True, False])
def test_the_gateway_that_goes_on_has_the_reservation_from_its_first_list_on(is_missed: bool) -> None:
    """Whether or not the scheduler had missed the one before by then."""
    rig = rig_with_a_slot_left()
    if is_missed:
        lose_gateway(rig)
    rig.gateways["g"].clear()
    rig.gateways["g2"].append(claimed(rig))
    rig.run(KEEP_MS / 1000 + rig.limits.gateway_ttl_s + 1, silent=["g"])
    assert reserved_for(rig, "keyed") == claimed(rig).placement
    assert rig.metric("ended_gateway_lost_total") == 1, "that without a key alone"
    rig.forget("keyed")
    rig.core.finish(Finish("keyed", "g2", 1001, Outcome.FINISHED, 9))
    rig.decide()
    assert reserved_for(rig, "keyed") is None
    assert rig.core.check_integrity() == ()


def test_a_gateway_that_was_only_cut_off_is_refused_what_another_one_goes_on_with() -> None:
    rig = rig_with_a_slot_left()
    back = list(rig.gateways["g"])
    lose_gateway(rig)
    rig.gateways["g2"].append(claimed(rig))
    rig.say_held()
    rig.gateways["g"] = [replace(entry, placement=rig.placement("keyed")) for entry in back[:1]]
    rig.run(2)
    assert reserved_for(rig, "keyed") == claimed(rig).placement


def test_a_gateway_that_is_back_in_time_has_its_own_again() -> None:
    rig = rig_with_a_slot_left()
    back = [replace(rig.gateways["g"][0], placement=rig.placement("keyed"))]
    lose_gateway(rig)
    rig.gateways["g"] = back
    rig.run(KEEP_MS / 1000 + rig.limits.gateway_ttl_s)
    assert reserved_for(rig, "keyed") == rig.placement("keyed")
    rig.gateways["g"] = []
    lose_gateway(rig)
    assert reserved_for(rig, "keyed") is not None, "its time begins anew"


def test_one_that_is_computed_again_frees_what_was_reserved_before() -> None:
    rig = rig_with_a_slot_left()
    lose_gateway(rig)
    rig.submit("keyed", gateway="g2", dispatch=1002, keep_ms=KEEP_MS)
    placement = reserved_for(rig, "keyed")
    assert placement is not None
    assert placement.dispatch == 1002
    assert rig.core.check_integrity() == ()
