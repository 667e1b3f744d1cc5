"""Leases: kept by heartbeats, suspect after silence, killed before anything of theirs is freed."""

from dataclasses import replace

import pytest
from tests.unit.transfer.conftest import TICK_S, World

from weir.core.errors import Overloaded
from weir.core.life import Attempt, FinishReason
from weir.core.process import ProcessIdentity
from weir.kv.arena.lease import LeaseState
from weir.kv.layout import MAX_LEASES
from weir.kv.messages import Claims, PageChain
from weir_transfer.messages import ArenaSettings, AttachRefused, HandOffRequest, StaleAttachment


def _state(world: World, lease_id: int) -> LeaseState | None:
    return next((lease.state for lease in world.core.leases() if lease.lease_id == lease_id), None)


def _slots_in_state(world: World, state: int) -> int:
    return int((world.segment.slot_rows["state"] == state).sum())


def test_heartbeats_keep_a_lease(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    fenced = world.run(60, on_tick=lambda: world.core.heartbeat(attachment.lease_id, attachment.number))
    assert fenced == []
    assert _state(world, attachment.lease_id) == LeaseState.ACTIVE


def test_silence_makes_suspect_and_then_kills_and_frees_nothing(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.core.acquire(attachment.lease_id, attachment.number, 5, 1)
    assert world.run(0.55) == []
    assert _state(world, attachment.lease_id) == LeaseState.ACTIVE
    assert world.run(0.1) == []
    assert _state(world, attachment.lease_id) == LeaseState.SUSPECT
    assert world.run(1.3) == []
    assert world.run(0.1) == [attachment.lease_id]
    assert world.run(600) == [], "a kill is asked for once"
    assert _state(world, attachment.lease_id) == LeaseState.FENCING
    assert world.core.metrics()["free_pages"] == 35


def test_a_heartbeat_in_time_ends_suspicion(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.run(1.5)
    world.core.heartbeat(attachment.lease_id, attachment.number)
    assert _state(world, attachment.lease_id) == LeaseState.ACTIVE
    assert world.run(1.9) == []


def test_a_broken_stream_starts_a_countdown_of_its_own(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.run(0.5)
    world.core.break_stream(attachment.lease_id, attachment.number)
    assert _state(world, attachment.lease_id) == LeaseState.SUSPECT
    assert world.run(1.9) == []
    assert world.run(0.15) == [attachment.lease_id]


def test_attaching_again_in_time_keeps_the_lease_and_what_it_owns(world: World) -> None:
    first = world.core.attach(world.registration("w"))
    acquired = world.core.acquire(first.lease_id, first.number, 5, 2)
    world.core.break_stream(first.lease_id, first.number)
    world.run(1.5)
    claims = Claims(page_ids=acquired.page_ids, slots=acquired.slots)
    second = world.core.attach(world.registration("w", first.lease_id, claims))
    assert second.lease_id == first.lease_id
    assert second.number > first.number
    assert world.core.metrics()["free_pages"] == 35
    world.core.break_stream(first.lease_id, first.number)
    assert _state(world, first.lease_id) == LeaseState.ACTIVE, "the end of the old stream does not concern the new one"


def test_a_lease_whose_process_is_being_killed_cannot_be_had_back(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.run(3)
    with pytest.raises(AttachRefused, match="FENCING"):
        world.core.attach(world.registration("w", attachment.lease_id))
    world.core.heartbeat(attachment.lease_id, attachment.number)
    assert _state(world, attachment.lease_id) == LeaseState.FENCING
    with pytest.raises(StaleAttachment):
        world.core.acquire(attachment.lease_id, attachment.number, 1, 0)


def test_the_exit_of_a_process_orphans_its_sequences_and_the_next_tick_frees_them(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    acquired = world.core.acquire(attachment.lease_id, attachment.number, 6, 2)
    world.write_sequence(acquired.slots[0], acquired.page_ids[:4])
    generations = world.segment.page_rows["generation"].copy()
    world.run(3)
    world.core.end_lease(attachment.lease_id)

    metrics = world.core.metrics()
    assert (metrics["orphaned_pages"], metrics["orphaned_slots"], metrics["free_pages"]) == (4, 1, 36)
    assert world.segment.record(acquired.slots[0]).read() is not None, "an adopter could go on from here"
    assert world.core.integrity_errors() == ()
    world.core.tick()
    metrics = world.core.metrics()
    assert (metrics["orphaned_pages"], metrics["free_pages"], metrics["free_slots"]) == (0, 40, 6)
    assert (metrics["leases"], metrics["fenced_total"], metrics["orphaned_total"]) == (0, 1, 1)
    assert world.segment.record(acquired.slots[0]).read() is None
    changed = world.segment.page_rows["generation"] != generations
    assert changed.nonzero()[0].tolist() == sorted(acquired.page_ids)


def test_an_ended_sequence_outlives_its_process_in_its_slot_without_pages(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    acquired = world.core.acquire(attachment.lease_id, attachment.number, 6, 3)
    slots = acquired.slots
    for slot, page_ids in zip(slots[:2], (acquired.page_ids[:4], acquired.page_ids[4:]), strict=True):
        world.write_sequence(slot, page_ids, f"r{slot}")
    ended = world.segment.record(slots[0])
    assert ended.read() is not None
    ended.end(FinishReason.STOP)
    chain = PageChain(acquired.page_ids[:4])
    world.core.release(attachment.lease_id, attachment.number, [chain], ())
    assert world.core.integrity_errors() == ()

    claims = Claims(page_ids=acquired.page_ids[4:], slots=slots)
    again = world.core.attach(world.registration("w", attachment.lease_id, claims))
    assert again.handed_off == ()
    assert world.core.integrity_errors() == ()
    world.core.end_lease(attachment.lease_id)

    metrics = world.core.metrics()
    assert (metrics["orphaned_pages"], metrics["orphaned_slots"], metrics["free_pages"]) == (2, 2, 38)
    assert world.core.integrity_errors() == ()
    snapshot = world.segment.record(slots[0]).read()
    assert snapshot is not None
    assert (snapshot.finish_reason, snapshot.output_token_ids) == (FinishReason.STOP, (4,))
    world.restart()
    assert world.core.integrity_errors() == ()


def test_an_ended_sequence_that_was_handed_off_is_announced_again_to_who_does_not_claim_it(world: World) -> None:
    sender, receiver = world.core.attach(world.registration("p")), world.core.attach(world.registration("d"))
    acquired = world.core.acquire(sender.lease_id, sender.number, 2, 1)
    world.write_sequence(acquired.slots[0], acquired.page_ids)
    request = HandOffRequest(acquired.slots[0], "r1", Attempt(1, 0), "d")
    world.core.hand_off(sender.lease_id, sender.number, request)
    record = world.segment.record(acquired.slots[0])
    assert record.read() is not None
    record.end(FinishReason.LENGTH)
    again = world.core.attach(world.registration("d", receiver.lease_id))
    assert [sequence.slot for sequence in again.handed_off] == list(acquired.slots)
    assert world.core.metrics()["free_pages"] == 40
    assert world.core.integrity_errors() == ()


def test_the_exit_of_a_process_before_any_silence_is_enough(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.core.acquire(attachment.lease_id, attachment.number, 5, 1)
    world.core.end_lease(attachment.lease_id)
    world.core.end_lease(attachment.lease_id)
    world.core.tick()
    metrics = world.core.metrics()
    assert (metrics["free_pages"], metrics["fenced_total"]) == (40, 0)


def test_a_worker_that_detaches_is_not_killed_and_leaves_nothing(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.core.acquire(attachment.lease_id, attachment.number, 5, 1)
    world.core.detach(attachment.lease_id, attachment.number)
    assert world.run(10) == []
    assert (world.core.metrics()["free_pages"], world.core.metrics()["leases"]) == (40, 0)


def test_time_in_which_the_service_did_not_run_is_no_silence(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.run(0.3)
    world.clock.advance(30)
    assert world.core.tick() == []
    assert _state(world, attachment.lease_id) == LeaseState.ACTIVE
    assert world.run(2.1) == [attachment.lease_id]


def test_after_a_restart_every_lease_gets_a_whole_countdown(world: World) -> None:
    kept, lost = world.core.attach(world.registration("kept")), world.core.attach(world.registration("lost"))
    acquired = world.core.acquire(kept.lease_id, kept.number, 3, 1)
    world.clock.advance(100)
    world.restart()
    assert world.run(1.9) == []
    claims = Claims(acquired.page_ids, acquired.slots)
    again = world.core.attach(world.registration("kept", kept.lease_id, claims))
    assert again.number > kept.number
    assert world.run(0.2) == [lost.lease_id]


def test_a_call_of_before_a_restart_is_refused_after_it(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.restart()
    with pytest.raises(StaleAttachment):
        world.core.acquire(attachment.lease_id, attachment.number, 1, 0)
    again = world.core.attach(world.registration("w", attachment.lease_id))
    with pytest.raises(StaleAttachment):
        world.core.acquire(attachment.lease_id, attachment.number, 1, 0)
    world.core.acquire(again.lease_id, again.number, 1, 0)


def test_a_restart_goes_on_with_a_kill_that_was_under_way(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.run(3)
    world.restart()
    assert world.core.tick() == [attachment.lease_id]


def test_a_restart_between_orphaning_and_freeing_frees(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    acquired = world.core.acquire(attachment.lease_id, attachment.number, 6, 1)
    world.write_sequence(acquired.slots[0], acquired.page_ids[:4])
    world.core.end_lease(attachment.lease_id)
    world.restart()
    assert world.core.metrics()["orphaned_slots"] == 1
    world.core.tick()
    assert world.core.metrics()["free_pages"] == 40


def test_a_worker_that_lost_the_answer_to_its_first_register_gets_the_same_lease(world: World) -> None:
    first = world.core.attach(world.registration("w"))
    assert world.core.attach(world.registration("w")).lease_id == first.lease_id


def test_a_worker_without_a_lease_that_claims_pages_is_refused_and_leaves_no_lease(world: World) -> None:
    with pytest.raises(AttachRefused, match="worker w claims pages or slots but has no lease"):
        world.core.attach(world.registration("w", claims=Claims(page_ids=(1,))))
    assert world.run(3) == []
    assert world.core.leases() == []


def test_lease_ids_are_not_used_again(world: World) -> None:
    first = world.core.attach(world.registration("w"))
    world.core.detach(first.lease_id, first.number)
    world.core.tick()
    world.restart()
    assert world.core.attach(world.registration("v")).lease_id > first.lease_id


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_bytes": 8192}, "page_bytes 8192: this arena has 4096; .* one model, on one device, in one precision"),
        ({"model_digest": "other"}, "model_digest 'other': this arena has 'digest'"),
        ({"lease_id": 99}, "lease 99 of worker w does not exist"),
        ({"worker_id": "w" * 65}, "worker_id .* 65 bytes, allowed are 1 to 64"),
        ({"worker_id": ""}, "worker_id '': 0 bytes"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_the_reason(
    world: World, change: dict[str, int | str], reason: str
) -> None:
    with pytest.raises(AttachRefused, match=reason):
        world.core.attach(replace(world.registration("w"), **change))  # type: ignore[arg-type]
    assert world.core.leases() == []


def test_another_process_cannot_take_a_lease(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    thief = replace(world.registration("w", attachment.lease_id), process=ProcessIdentity(1, 1))
    with pytest.raises(AttachRefused, match="belongs to ProcessIdentity"):
        world.core.attach(thief)


def test_a_full_lease_table_is_an_overload(world: World) -> None:
    for number in range(MAX_LEASES):
        world.core.attach(world.registration(f"w{number}"))
    with pytest.raises(Overloaded, match="lease table is full"):
        world.core.attach(world.registration("one more"))


def test_ticks_are_rare_while_all_are_well_and_close_once_one_is_silent(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.core.tick()
    assert world.core.plan_next_tick(TICK_S) == pytest.approx(0.2)  # a third of what makes it suspect
    world.core.break_stream(attachment.lease_id, attachment.number)
    assert world.core.plan_next_tick(TICK_S) == TICK_S


@pytest.mark.parametrize(
    ("heartbeat_interval_ms", "lease_ttl_ms"),
    [(100, 2000), (200, 400), (200, 600), (200, 700), (10, 40), (5000, 10_000), (5000, 15_000), (5000, 60_000)],
)
def test_a_silent_worker_is_killed_in_time_whatever_the_pauses(
    world: World, heartbeat_interval_ms: int, lease_ttl_ms: int
) -> None:
    world.settings = ArenaSettings(heartbeat_interval_ms, lease_ttl_ms, adoption_wait_ms=0)
    world.restart()
    for tenths in range(10):  # of a pause, after which the last heartbeat comes
        attachment = world.core.attach(world.registration("w"))
        world.core.tick()
        pause_s = world.core.plan_next_tick(TICK_S)
        assert TICK_S <= pause_s <= max(TICK_S, min(0.2, world.settings.suspect_after_s / 3))
        world.clock.advance(pause_s * tenths / 10)
        world.core.heartbeat(attachment.lease_id, attachment.number)
        silence_s = pause_s * (1 - tenths / 10)
        world.clock.advance(silence_s)
        while not (to_fence := world.core.tick()):
            pause_s = world.core.plan_next_tick(TICK_S)
            world.clock.advance(pause_s)
            silence_s += pause_s
        assert to_fence == [attachment.lease_id]
        assert 0 <= silence_s - lease_ttl_ms / 1000 + 1e-6 <= 2 * TICK_S + 2e-6
        world.core.end_lease(attachment.lease_id)
        world.core.tick()


def test_what_a_tick_comes_later_than_expected_is_nobodys_silence(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    world.core.tick()
    for _ in range(5):  # the next tick is planned anew, and not later each time
        pause_s = world.core.plan_next_tick(TICK_S)
    world.clock.advance(pause_s + TICK_S + 5.0)  # so late the service itself was
    assert world.core.tick() == []
    assert _state(world, attachment.lease_id) == LeaseState.ACTIVE


def test_the_end_of_a_lease_is_told_once_since_no_tick_may_come_soon(world: World) -> None:
    attachment = world.core.attach(world.registration("w"))
    assert world.num_lease_ends == 0
    world.core.detach(attachment.lease_id, attachment.number)
    world.core.end_lease(attachment.lease_id)
    assert world.num_lease_ends == 1
