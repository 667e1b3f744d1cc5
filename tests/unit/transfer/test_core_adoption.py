"""What a dead decode worker leaves goes to a living one, with all that is needed to go on; or is freed, in time."""

from dataclasses import replace

import pytest
from tests.unit.transfer.conftest import World

from weir.core.life import Attempt
from weir.kv.messages import Claims
from weir_transfer.messages import Attachment, HandOffRequest


@pytest.fixture
def adoption_wait_ms() -> int:
    return 3000


def attach(world: World, worker_id: str) -> Attachment:
    return world.core.attach(world.registration(worker_id))


def run_sequence(world: World, owner: Attachment, request_id: str, num_pages: int = 2) -> int:
    """Returns its slot."""
    acquired = world.core.acquire(owner.lease_id, owner.number, num_pages, 1)
    world.write_sequence(acquired.slots[0], acquired.page_ids, request_id)
    return acquired.slots[0]


def test_another_worker_gets_the_sequence_its_pages_and_a_newer_attempt(world: World) -> None:
    dead, living = attach(world, "dead"), attach(world, "living")
    slot = run_sequence(world, dead, "r1")
    before = world.segment.record(slot).read()
    assert before is not None
    world.core.end_lease(dead.lease_id)
    (announcement,) = world.core.adopt_orphans()
    world.core.tick()
    assert (announcement.lease_id, announcement.sequence.slot) == (living.lease_id, slot)
    assert announcement.sequence.attempt == Attempt(1, 1)
    after = world.segment.record(slot).read()
    assert after == replace(before, params=replace(before.params, attempt=Attempt(1, 1)))
    assert [lease.lease_id for lease in world.core.leases()] == [living.lease_id]
    world.core.release(living.lease_id, living.number, (), (slot,))
    again = world.core.attach(world.registration("living", living.lease_id, Claims(before.block_table)))
    assert again.handed_off == ()
    assert world.core.metrics()["adopted_total"] == 1


def test_sequences_go_to_the_workers_that_hold_the_fewest(world: World) -> None:
    dead, busy, idle = (attach(world, name) for name in ("dead", "busy", "idle"))
    run_sequence(world, busy, "other")
    for request_id in ("r1", "r2", "r3"):
        run_sequence(world, dead, request_id)
    world.core.end_lease(dead.lease_id)
    receivers = [announcement.lease_id for announcement in world.core.adopt_orphans()]
    assert sorted(receivers) == sorted([busy.lease_id, idle.lease_id, idle.lease_id])


def test_with_nobody_there_it_waits_for_a_successor_which_is_told_when_it_attaches_or_at_the_next_tick(
    world: World,
) -> None:
    dead = attach(world, "dead")
    slot = run_sequence(world, dead, "r1")
    world.core.end_lease(dead.lease_id)
    assert world.core.adopt_orphans() == []
    world.run(2.9)
    successor = attach(world, "successor")
    assert successor.handed_off == ()
    (announcement,) = world.core.adopt_orphans()
    assert (announcement.lease_id, announcement.sequence.slot) == (successor.lease_id, slot)


def test_one_for_whom_nobody_comes_is_freed_in_time(world: World) -> None:
    dead = attach(world, "dead")
    run_sequence(world, dead, "r1")
    world.core.end_lease(dead.lease_id)
    world.run(2.9)
    assert world.core.metrics()["orphaned_slots"] == 1
    world.run(0.2)
    assert world.core.metrics()["orphaned_slots"] == 0
    assert world.core.metrics()["free_pages"] == 40
    assert world.core.leases() == []


def test_a_restart_of_the_service_begins_the_wait_anew_and_forgets_nobody(world: World) -> None:
    dead = attach(world, "dead")
    run_sequence(world, dead, "r1")
    world.core.end_lease(dead.lease_id)
    world.run(2.0)
    world.restart()
    world.run(2.0)
    living = attach(world, "living")
    (announcement,) = world.core.adopt_orphans()
    assert announcement.lease_id == living.lease_id


def test_a_service_that_ends_waits_for_nobody(world: World) -> None:
    dead = attach(world, "dead")
    run_sequence(world, dead, "r1")
    world.core.end_lease(dead.lease_id)
    world.core.give_up_orphans()
    world.run(0.1)
    assert world.core.leases() == []


def test_a_silent_worker_gets_nothing_as_it_may_be_about_to_be_killed(world: World) -> None:
    dead, silent = attach(world, "dead"), attach(world, "silent")
    run_sequence(world, dead, "r1")
    world.core.break_stream(silent.lease_id, silent.number)
    world.core.end_lease(dead.lease_id)
    assert world.core.adopt_orphans() == []


def test_a_prompt_half_read_is_no_sequence_to_go_on_with(world: World) -> None:
    dead, _ = attach(world, "dead"), attach(world, "living")
    acquired = world.core.acquire(dead.lease_id, dead.number, 2, 1)
    world.write_sequence(acquired.slots[0], acquired.page_ids)
    record = world.segment.record(acquired.slots[0])
    snapshot = record.read()
    assert snapshot is not None
    record.begin(snapshot.params)
    record.set_block_table(acquired.page_ids)
    record.publish(num_computed_tokens=2)
    world.core.end_lease(dead.lease_id)
    assert world.core.adopt_orphans() == []
    world.run(0.1)
    assert world.core.metrics()["free_pages"] == 40


def test_what_prefill_workers_leave_is_for_nobody_to_adopt(world: World) -> None:
    registration = replace(world.registration("prefill"), role="prefill")
    dead, _ = world.core.attach(registration), attach(world, "living")
    run_sequence(world, dead, "r1")
    world.core.end_lease(dead.lease_id)
    assert world.core.adopt_orphans() == []


def test_a_sequence_that_may_have_killed_its_workers_is_adopted_a_bounded_number_of_times(world: World) -> None:
    owner = attach(world, "worker-0")
    slot = run_sequence(world, owner, "r1")
    for number in range(1, 5):
        successor = attach(world, f"worker-{number}")
        world.core.end_lease(owner.lease_id)
        adopted = [announcement.sequence.attempt for announcement in world.core.adopt_orphans()]
        assert adopted == ([Attempt(1, number)] if number <= world.settings.max_adoptions else [])
        owner = successor
    world.run(0.1)
    assert world.segment.record(slot).read() is None


def test_a_repeated_hand_off_to_a_receiver_that_has_died_since_finds_it_committed(world: World) -> None:
    sender = world.core.attach(replace(world.registration("sender"), role="prefill"))
    dead, _ = attach(world, "dead"), attach(world, "living")
    slot = run_sequence(world, sender, "r1")
    request = HandOffRequest(slot, "r1", Attempt(1, 0), "dead")
    world.core.hand_off(sender.lease_id, sender.number, request)
    world.core.end_lease(dead.lease_id)
    world.core.adopt_orphans()
    committed = world.core.hand_off(sender.lease_id, sender.number, request)
    assert committed.announcement is None
    assert committed.receipt.num_pages == 2
