"""A worker that is being emptied names nobody: the service chooses who goes on with its sequence."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.transfer.conftest import World

from weir.core.life import Attempt
from weir.kv.messages import Claims
from weir_transfer.messages import (
    AdoptionOff,
    Attachment,
    CommittedHandOff,
    HandOffRequest,
    ReceiverGone,
    RecordMismatch,
)


@pytest.fixture
def adoption_wait_ms() -> int:
    return 3000


def attach(world: World, worker_id: str, role: str = "decode") -> Attachment:
    return world.core.attach(replace(world.registration(worker_id), role=role))


def run_sequence(world: World, owner: Attachment, request_id: str = "r1") -> int:
    acquired = world.core.acquire(owner.lease_id, owner.number, 2, 1)
    world.write_sequence(acquired.slots[0], acquired.page_ids, request_id)
    return acquired.slots[0]


def give(world: World, owner: Attachment, slot: int, request_id: str = "r1") -> CommittedHandOff:
    request = HandOffRequest(slot, request_id, Attempt(1, 0), "")
    return world.core.hand_off(owner.lease_id, owner.number, request)


def receiver_of(committed: CommittedHandOff) -> int:
    assert committed.announcement is not None
    return committed.announcement.lease_id


def attempt_in(world: World, slot: int) -> Attempt:
    summary = world.segment.record(slot).summarize()
    assert summary is not None
    return summary.attempt


def test_it_goes_on_at_another_worker_under_a_newer_attempt_and_as_it_was(world: World) -> None:
    giver, other = attach(world, "giver"), attach(world, "other")
    slot = run_sequence(world, giver)
    before = world.segment.record(slot).read()
    assert before is not None
    committed = give(world, giver, slot)
    assert committed.announcement is not None
    assert (receiver_of(committed), committed.announcement.sequence.attempt) == (other.lease_id, Attempt(1, 1))
    assert world.segment.record(slot).read() == replace(before, params=replace(before.params, attempt=Attempt(1, 1)))
    again = world.core.attach(world.registration("other", other.lease_id))
    assert [sequence.slot for sequence in again.handed_off] == [slot]
    world.core.attach(world.registration("giver", giver.lease_id, Claims()))
    assert world.core.metrics()["handed_over_total"] == 1


def test_it_goes_to_the_decode_worker_with_the_fewest_that_is_there_and_not_being_emptied(world: World) -> None:
    giver = attach(world, "giver")
    attach(world, "prefill", role="prefill")
    draining, silent, busy, idle = (attach(world, name) for name in ("draining", "silent", "busy", "idle"))
    world.core.heartbeat(draining.lease_id, draining.number, is_draining=True)
    world.core.break_stream(silent.lease_id, silent.number)
    run_sequence(world, busy, "other")
    assert receiver_of(give(world, giver, run_sequence(world, giver))) == idle.lease_id


def test_what_an_ended_attachment_says_of_being_emptied_is_not_heard(world: World) -> None:
    giver, before = attach(world, "giver"), attach(world, "other")
    other = world.core.attach(world.registration("other", before.lease_id))
    world.core.heartbeat(before.lease_id, before.number, is_draining=True)
    assert receiver_of(give(world, giver, run_sequence(world, giver))) == other.lease_id
    world.core.heartbeat(other.lease_id, other.number, is_draining=True)
    world.core.heartbeat(before.lease_id, before.number, is_draining=False)
    with pytest.raises(ReceiverGone):
        give(world, giver, run_sequence(world, giver, "r2"), "r2")


def test_with_nobody_there_nothing_changes_and_it_can_be_given_once_somebody_is(world: World) -> None:
    giver, draining = attach(world, "giver"), attach(world, "draining")
    world.core.heartbeat(draining.lease_id, draining.number, is_draining=True)
    slot = run_sequence(world, giver)
    with pytest.raises(ReceiverGone):
        give(world, giver, slot)
    assert attempt_in(world, slot) == Attempt(1, 0)
    assert world.core.metrics()["handed_over_total"] == 0
    world.core.heartbeat(draining.lease_id, draining.number)
    assert receiver_of(give(world, giver, slot)) == draining.lease_id


def test_a_repeated_call_finds_it_done(world: World) -> None:
    giver, _ = attach(world, "giver"), attach(world, "other")
    slot = run_sequence(world, giver)
    give(world, giver, slot)
    again = give(world, giver, slot)
    assert (again.announcement, again.receipt.num_pages) == (None, 2)
    assert attempt_in(world, slot) == Attempt(1, 1)


def test_a_service_that_died_between_the_record_and_the_owner_is_made_good_by_the_repeated_call(world: World) -> None:
    giver, other = attach(world, "giver"), attach(world, "other")
    slot = run_sequence(world, giver)
    world.segment.record(slot).raise_adoption()
    world.restart()
    giver = world.core.attach(world.registration("giver", giver.lease_id, Claims(handing_off_slots=(slot,))))
    world.core.attach(world.registration("other", other.lease_id))
    committed = give(world, giver, slot)
    assert receiver_of(committed) == other.lease_id
    assert attempt_in(world, slot) > Attempt(1, 1)


def test_the_record_of_another_sequence_is_not_given_away(world: World) -> None:
    giver, _ = attach(world, "giver"), attach(world, "other")
    slot = run_sequence(world, giver)
    with pytest.raises(RecordMismatch):
        give(world, giver, slot, "r2")


def test_where_nobody_adopts_that_is_said(tmp_path: Path) -> None:
    world = World(tmp_path / "off", adoption_wait_ms=0)
    giver, _ = attach(world, "giver"), attach(world, "other")
    with pytest.raises(AdoptionOff, match="adoption_wait_ms"):
        give(world, giver, run_sequence(world, giver))
    world.segment.close()


def test_what_a_dead_worker_leaves_is_not_for_one_that_is_being_emptied(world: World) -> None:
    dead, draining = attach(world, "dead"), attach(world, "draining")
    world.core.heartbeat(draining.lease_id, draining.number, is_draining=True)
    run_sequence(world, dead)
    world.core.end_lease(dead.lease_id)
    assert world.core.adopt_orphans() == []
    idle = attach(world, "idle")
    assert [announcement.lease_id for announcement in world.core.adopt_orphans()] == [idle.lease_id]
