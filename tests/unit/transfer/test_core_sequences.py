"""Pages, slots and hand-offs: all or nothing, once, and healed when an answer gets lost."""

from pathlib import Path

import pytest
from tests.contract.test_mover import CopyingMover
from tests.unit.transfer.conftest import TICK_S, World

from weir.core.errors import Overloaded
from weir.core.life import Attempt
from weir.kv.arena.ownership import NotOwned
from weir.kv.messages import Acquired, Claims, HandedOff, HandOffReceipt, PageChain
from weir_transfer.core import ArenaCore
from weir_transfer.lease_keeper import Countdowns
from weir_transfer.messages import (
    Attachment,
    AttachRefused,
    HandOffRequest,
    ReceiverGone,
    ReceiverSilent,
    RecordMismatch,
    StaleAttachment,
)

_ATTEMPT = Attempt(1, 0)


def _request(slot: int, request_id: str = "r1", attempt: Attempt = _ATTEMPT, to: str = "decode") -> HandOffRequest:
    return HandOffRequest(slot, request_id, attempt, to)


@pytest.fixture
def prefill(world: World) -> Attachment:
    return world.core.attach(world.registration("prefill"))


@pytest.fixture
def decode(world: World) -> Attachment:
    return world.core.attach(world.registration("decode"))


@pytest.fixture
def acquired(world: World, prefill: Attachment) -> Acquired:
    """Six pages and two slots of prefill; slot 0 has the sequence r1 in the first four pages."""
    made = world.core.acquire(prefill.lease_id, prefill.number, 6, 2)
    world.write_sequence(made.slots[0], made.page_ids[:4])
    return made


def _owners(world: World, acquired: Acquired) -> list[int]:
    return [int(owner) for owner in world.segment.page_rows["owner"][list(acquired.page_ids)]]


def test_acquire_gives_all_or_nothing(world: World, prefill: Attachment) -> None:
    with pytest.raises(Overloaded, match="asked for 41 pages and 0 slots, free are 40 and 6") as caught:
        world.core.acquire(prefill.lease_id, prefill.number, 41, 0)
    assert caught.value.retry_after_s is not None
    with pytest.raises(Overloaded):
        world.core.acquire(prefill.lease_id, prefill.number, 1, 7)
    assert world.core.metrics()["free_pages"] == 40
    assert world.core.acquire(prefill.lease_id, prefill.number, 0, 0) == Acquired((), ())


def test_release_takes_all_or_nothing_and_clears_records(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    with pytest.raises(NotOwned):
        world.core.release(prefill.lease_id, prefill.number, [PageChain((*acquired.page_ids, 39))], acquired.slots)
    with pytest.raises(NotOwned):
        world.core.release(decode.lease_id, decode.number, [PageChain(acquired.page_ids)], acquired.slots)
    assert world.segment.record(acquired.slots[0]).read() is not None
    world.core.release(prefill.lease_id, prefill.number, [PageChain(acquired.page_ids)], acquired.slots)
    assert world.segment.record(acquired.slots[0]).read() is None
    assert (world.core.metrics()["free_pages"], world.core.metrics()["free_slots"]) == (40, 6)


def test_a_hand_off_passes_slot_and_pages_under_their_ids(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    committed = world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[0]))
    assert committed.receipt == HandOffReceipt(num_pages=4, num_bytes_copied=0)
    assert committed.announcement is not None
    assert committed.announcement.lease_id == decode.lease_id
    assert committed.announcement.sequence == HandedOff(acquired.slots[0], 1, "r1", _ATTEMPT)
    assert _owners(world, acquired) == [decode.lease_id] * 4 + [prefill.lease_id] * 2
    assert world.core.metrics()["handoff_pages_total"] == 4


def test_bytes_copied_are_counted_for_a_mover_that_copies_and_are_none_on_one_host(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    world.write_sequence(acquired.slots[1], acquired.page_ids[4:], request_id="r2")
    world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[0]))
    assert world.core.metrics()["handoff_bytes_copied_total"] == 0

    mover = CopyingMover(world.segment.pages)
    countdowns = Countdowns(world.clock, TICK_S)
    copying = ArenaCore(world.segment, mover, countdowns, world.settings, lambda: None, lambda: None)
    held = Claims(page_ids=acquired.page_ids[4:], slots=(acquired.slots[1],))
    sender = copying.attach(world.registration("prefill", prefill.lease_id, held))
    copying.attach(world.registration("decode", decode.lease_id))
    world.segment.pages[acquired.page_ids[4]] = 123
    copying.hand_off(sender.lease_id, sender.number, _request(acquired.slots[1], "r2"))
    assert copying.metrics()["handoff_bytes_copied_total"] == 2 * 4096
    assert (mover.receiver_pages[acquired.page_ids[4]] == 123).all()


def test_a_hand_off_whose_answer_was_lost_can_be_asked_for_again(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    request = _request(acquired.slots[0])
    world.core.hand_off(prefill.lease_id, prefill.number, request)
    again = world.core.hand_off(prefill.lease_id, prefill.number, request)
    assert again.receipt.num_pages == 4
    assert again.announcement is None
    world.core.release(decode.lease_id, decode.number, [PageChain(acquired.page_ids[:4])], acquired.slots[:1])
    assert world.core.hand_off(prefill.lease_id, prefill.number, request).receipt.num_pages == 4
    assert world.core.metrics()["handoffs_total"] == 1


def test_it_can_be_asked_for_again_although_its_slot_has_come_back_meanwhile(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    """Its receiver has finished the sequence, and the sender has acquired the slot anew before it repeats the call."""
    slot, page_ids = acquired.slots[0], acquired.page_ids[:4]
    first = world.core.hand_off(prefill.lease_id, prefill.number, _request(slot))
    world.core.release(decode.lease_id, decode.number, [PageChain(page_ids)], [slot])
    assert world.core.acquire(prefill.lease_id, prefill.number, 0, 5).slots[0] == slot
    repeated = world.core.hand_off(prefill.lease_id, prefill.number, _request(slot))
    assert (repeated.receipt, repeated.announcement) == (first.receipt, None)
    world.write_sequence(slot, acquired.page_ids[4:], "another")
    assert world.core.hand_off(prefill.lease_id, prefill.number, _request(slot)).receipt == first.receipt
    with pytest.raises(RecordMismatch, match="has the record of another"):
        world.core.hand_off(prefill.lease_id, prefill.number, _request(slot, attempt=Attempt(2, 0)))


def test_the_same_holds_over_a_restart(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[0]))
    world.restart()
    claims = Claims(acquired.page_ids[4:], acquired.slots[1:], handing_off_slots=acquired.slots[:1])
    sender = world.core.attach(world.registration("prefill", prefill.lease_id, claims))
    again = world.core.hand_off(sender.lease_id, sender.number, _request(acquired.slots[0]))
    assert again.receipt.num_pages == 4
    receiver = world.core.attach(world.registration("decode", decode.lease_id))
    assert [sequence.request_id for sequence in receiver.handed_off] == ["r1"]


def test_a_hand_off_that_was_not_committed_before_a_restart_is_done_after_it(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    world.restart()
    world.core.attach(world.registration("decode", decode.lease_id))
    claims = Claims(acquired.page_ids[4:], acquired.slots[1:], handing_off_slots=acquired.slots[:1])
    sender = world.core.attach(world.registration("prefill", prefill.lease_id, claims))
    committed = world.core.hand_off(sender.lease_id, sender.number, _request(acquired.slots[0]))
    assert committed.announcement is not None
    assert _owners(world, acquired) == [decode.lease_id] * 4 + [prefill.lease_id] * 2


def test_what_a_receiver_does_not_hold_is_announced_again(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    world.write_sequence(acquired.slots[1], acquired.page_ids[4:], request_id="r2")
    world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[0]))
    world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[1], "r2"))
    claims = Claims(page_ids=acquired.page_ids[:4], slots=acquired.slots[:1])
    again = world.core.attach(world.registration("decode", decode.lease_id, claims))
    assert [sequence.request_id for sequence in again.handed_off] == ["r2"]
    assert _owners(world, acquired) == [decode.lease_id] * 6


def test_a_sequence_that_its_receiver_has_finished_is_not_announced_again_but_taken_back(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[0]))
    world.segment.record(acquired.slots[0]).clear()  # what a worker does before its Release, which got lost
    again = world.core.attach(world.registration("decode", decode.lease_id))
    assert again.handed_off == ()
    assert world.core.metrics()["free_pages"] == 40 - 2


def test_pages_whose_acquire_was_never_answered_are_taken_back(world: World, prefill: Attachment) -> None:
    known = world.core.acquire(prefill.lease_id, prefill.number, 5, 1)
    world.core.acquire(prefill.lease_id, prefill.number, 7, 2)
    claims = Claims(known.page_ids, known.slots)
    world.core.attach(world.registration("prefill", prefill.lease_id, claims))
    metrics = world.core.metrics()
    assert (metrics["free_pages"], metrics["free_slots"]) == (35, 5)
    assert (metrics["reclaimed_pages_total"], metrics["reclaimed_slots_total"]) == (7, 2)


def test_a_late_call_of_an_ended_attachment_cannot_take_away_what_was_given_anew(
    world: World, prefill: Attachment
) -> None:
    first = world.core.acquire(prefill.lease_id, prefill.number, 5, 0)
    again = world.core.attach(world.registration("prefill", prefill.lease_id))
    second = world.core.acquire(again.lease_id, again.number, 5, 0)
    assert second.page_ids == first.page_ids
    with pytest.raises(StaleAttachment):
        world.core.release(prefill.lease_id, prefill.number, [PageChain(first.page_ids)], ())
    assert world.core.metrics()["leased_pages"] == 5


def test_a_worker_that_holds_what_is_not_its_own_loses_its_lease(
    world: World, prefill: Attachment, acquired: Acquired
) -> None:
    claims = Claims(page_ids=(*acquired.page_ids, 39), slots=acquired.slots)
    with pytest.raises(AttachRefused, match="holds what is not its own"):
        world.core.attach(world.registration("prefill", prefill.lease_id, claims))


@pytest.mark.parametrize(
    ("hand_off", "refusal"),
    [
        (_request(0, request_id="r9"), RecordMismatch),
        (_request(0, attempt=Attempt(2, 0)), RecordMismatch),
        (_request(1), RecordMismatch),
        (_request(0, to="nobody"), ReceiverGone),
        (_request(5), NotOwned),
        (_request(6), NotOwned),
    ],
)
def test_a_hand_off_that_cannot_be_is_refused_and_changes_nothing(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired, hand_off: HandOffRequest, refusal: type
) -> None:
    del decode
    before = (world.segment.page_rows.copy(), world.segment.slot_rows.copy())
    with pytest.raises(refusal):
        world.core.hand_off(prefill.lease_id, prefill.number, hand_off)
    assert (world.segment.page_rows == before[0]).all()
    assert (world.segment.slot_rows == before[1]).all()
    assert acquired.slots == (0, 1)


def test_a_receiver_that_reconnects_may_be_tried_again_and_a_dead_one_not(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    world.core.break_stream(decode.lease_id, decode.number)
    with pytest.raises(ReceiverSilent):
        world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[0]))
    world.core.end_lease(decode.lease_id)
    with pytest.raises(ReceiverGone):
        world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[0]))
    assert _owners(world, acquired) == [prefill.lease_id] * 6


def test_a_record_that_names_pages_of_others_is_not_handed_off(
    world: World, prefill: Attachment, decode: Attachment, acquired: Acquired
) -> None:
    foreign = world.core.acquire(decode.lease_id, decode.number, 1, 0)
    world.write_sequence(acquired.slots[1], foreign.page_ids, request_id="r2")
    with pytest.raises(NotOwned):
        world.core.hand_off(prefill.lease_id, prefill.number, _request(acquired.slots[1], "r2"))
    assert world.core.integrity_errors() == (
        f"page {foreign.page_ids[0]} is in the block table of slot {acquired.slots[1]} but has another owner",
    )
    world.segment.record(acquired.slots[1]).clear()


def test_the_segment_alone_is_enough_to_go_on(tmp_path: Path, world: World, prefill: Attachment) -> None:
    acquired = world.core.acquire(prefill.lease_id, prefill.number, 3, 1)
    world.write_sequence(acquired.slots[0], acquired.page_ids)
    metrics = world.core.metrics()
    world.restart()
    names = ("leased_pages", "free_pages", "free_slots", "leases", "total_pages")
    assert {name: world.core.metrics()[name] for name in names} == {name: metrics[name] for name in names}
    assert world.segment.path == tmp_path / "arena"
