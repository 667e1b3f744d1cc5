"""The record of a sequence that has ended outlives the moment in which its worker could die with the last tokens."""

from dataclasses import replace

from tests.unit.engine.world import params
from tests.unit.worker.rig import GATEWAY, Rig, Stream, begin, eventually, start_command

from weir.core.life import Attempt, FinishReason
from weir.kv.records.record import SequenceSnapshot
from weir.wire.v1 import types_pb2
from weir_transfer.messages import HandOffRequest


def records_of(rig: Rig) -> list[SequenceSnapshot]:
    segment = rig.arena.segment
    snapshots = [segment.record(slot).read() for slot in range(segment.geometry.num_slots)]
    return [snapshot for snapshot in snapshots if snapshot is not None]


def hold_ends(rig: Rig) -> None:
    """Until the test has looked: the decode worker keeps the records of what has ended."""
    releases = rig.decode.shell._end_releases
    releases._kept_s = releases._max_kept_s = 3600.0


def let_ends_go(rig: Rig) -> None:
    """Each as soon as its gateway's stream has taken it."""
    rig.decode.shell._end_releases._kept_s = 0.0


async def test_what_a_client_has_just_got_can_still_be_read_and_is_gone_a_moment_later(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    local, split = start_command(rig.decode.worker_id), start_command(rig.decode.worker_id, max_tokens=3)
    short = start_command(rig.decode.worker_id, max_tokens=1)
    hold_ends(rig)
    await streams[1].send(start=local)
    received = [await streams[1].receive_all(local.request_id)]
    await begin(streams, split)
    received.append(await streams[1].receive_all(split.request_id))
    await streams[0].send(start=short)
    await streams[0].receive_all(short.request_id)
    found = {snapshot.params.request_id: snapshot for snapshot in records_of(rig)}
    assert short.request_id not in found, "nobody adopts what a prefill worker leaves"
    for start, got in zip((local, split), received, strict=True):
        snapshot = found[start.request_id]
        assert snapshot.finish_reason is FinishReason.LENGTH
        assert list(snapshot.output_token_ids)[-len(got.token_ids) :] == got.token_ids
        assert snapshot.block_table == ()
        assert snapshot.params.decode_worker_id == rig.decode.worker_id
    assert (rig.decode.metrics()["num_kept_ends"], rig.prefill.metrics()["num_kept_ends"]) == (2, 0)
    let_ends_go(rig)
    await rig.wait_idle()
    assert records_of(rig) == []


async def test_a_cancelled_request_leaves_no_record(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id, max_tokens=300, num_reserved_pages=25)
    await streams[1].send(start=start)
    await streams[1].next_update(start.request_id)
    await streams[1].send(cancel={"request_id": start.request_id, "attempt": start.attempt})
    received = await streams[1].receive_all(start.request_id)
    assert received.last.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    await eventually(lambda: records_of(rig) == [])
    assert rig.decode.metrics()["num_kept_ends"] == 0
    await rig.wait_idle()


async def test_the_end_that_a_dead_worker_left_is_sent_by_whoever_gets_its_record(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    hold_ends(rig)
    (slot,) = rig.arena.acquire("ghost", 0, 1).slots
    record = rig.arena.segment.record(slot)
    record.begin(replace(params((1, 2, 3)), gateway_id=GATEWAY, attempt=Attempt(1, 1)))
    for token_id in (7, 8, 9):
        record.append_token(token_id)
    record.end(FinishReason.STOP)
    request_id = f"{0:032x}"
    asked = types_pb2.Attempt(dispatch=1)
    await streams[1].send(resume={"request_id": request_id, "attempt": asked, "awaits_hand_off": True})
    rig.arena.hand_off("ghost", HandOffRequest(slot, request_id, Attempt(1, 1), rig.decode.worker_id))
    received = await streams[1].receive_all(request_id)
    assert received.token_ids == [7, 8, 9]
    assert received.last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert rig.decode.metrics()["steps_total"] == 0
    assert [snapshot.finish_reason for snapshot in records_of(rig)] == [FinishReason.STOP]
    let_ends_go(rig)
    await rig.wait_idle()
    assert records_of(rig) == []
