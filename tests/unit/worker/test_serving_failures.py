"""Hand-offs, steps, gateways and leases fail under a worker; the gateway gets an error, and nothing is left."""

import asyncio
import time

import pytest
from tests.unit.worker.rig import (
    GATEWAY,
    INSTANCE,
    TIMEOUT_S,
    Rig,
    Stream,
    begin,
    connected,
    eventually,
    expected_tokens,
    start_command,
)

from weir.bus.codec import decode
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import KvBucket
from weir.bus.subjects import Subjects
from weir.core.errors import DeadlineExceeded
from weir.engine.loop import InboxFull
from weir.engine.messages import Command
from weir.engine.plan import StepPlan
from weir.wire.v1 import worker_pb2
from weir.worker.roles.prefill import PrefillRole


async def test_a_refused_hand_off_is_an_error_and_leaves_nothing(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command("decode-9-00000000")
    await streams[0].send(start=start)
    received = await streams[0].receive_all(start.request_id)
    assert received.token_ids == expected_tokens(start)[:1]
    assert received.last.error.reason == worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED
    assert "decode-9-00000000" in received.last.error.message
    await rig.wait_idle()


async def test_a_hand_off_in_doubt_is_an_error_and_its_pages_are_not_used_again(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    def lose_answer(request_id: str) -> None:
        raise DeadlineExceeded("no answer")

    rig.arena.before_hand_off = lose_answer
    start = start_command(rig.decode.worker_id)
    await streams[0].send(start=start)
    received = await streams[0].receive_all(start.request_id)
    assert received.last.error.reason == worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED
    await rig.wait_idle()
    assert rig.prefill.metrics()["hand_offs_in_doubt_total"] == 1


async def test_a_hand_off_that_breaks_ends_its_request(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    def fail(request_id: str) -> None:
        raise RuntimeError("on purpose")

    rig.arena.before_hand_off = fail
    start = start_command(rig.decode.worker_id)
    await streams[0].send(start=start)
    received = await streams[0].receive_all(start.request_id)
    assert received.last.error.reason == worker_pb2.WORKER_ERROR_REASON_INTERNAL
    await rig.wait_idle()


async def test_a_hand_off_whose_outcome_the_engine_does_not_take_ends_the_process(
    rig: Rig, streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot and pages would count as those of a prompt that is being handed off for ever."""

    def refuse(command: Command) -> None:
        raise InboxFull("0 commands wait for the engine")

    role = rig.prefill.shell._role
    assert isinstance(role, PrefillRole)
    monkeypatch.setattr(role._hand_offs, "_post", refuse)
    await begin(streams, start_command(rig.decode.worker_id))
    await eventually(lambda: bool(rig.prefill.shutdowns))
    assert "0 commands wait for the engine" in rig.prefill.shutdowns[0]


async def test_a_step_that_fails_ends_its_sequences_with_an_error(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    def fail_once(plan: StepPlan) -> None:
        del rig.on_run["decode"]
        raise ZeroDivisionError("on purpose")

    rig.on_run["decode"] = fail_once
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    received = await streams[1].receive_all(start.request_id)
    assert received.last.error.reason == worker_pb2.WORKER_ERROR_REASON_INTERNAL
    assert "ZeroDivisionError" in received.last.error.message
    await rig.wait_idle()
    again = start_command(rig.decode.worker_id)
    await begin(streams, again)
    assert (await streams[1].receive_all(again.request_id)).token_ids == expected_tokens(again)


async def test_sequences_of_a_vanished_gateway_are_freed(rig: Rig) -> None:
    rig.on_run["decode"] = lambda plan: time.sleep(0.05)
    start = start_command(rig.decode.worker_id, max_tokens=300)
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode_:
        await begin((prefill, decode_), start)
        await decode_.next_update(start.request_id)
    await rig.wait_idle()
    assert rig.decode.metrics()["cancelled_total"] == 1


async def test_what_is_handed_off_after_its_gateway_vanished_is_freed(rig: Rig) -> None:
    handing_off, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request_id: str) -> None:
        handing_off.set()
        await go_on.wait()

    rig.arena.before_hand_off = wait
    start = start_command(rig.decode.worker_id, max_tokens=300)
    rig.on_run["decode"] = lambda plan: time.sleep(0.05)
    async with connected(rig.prefill, GATEWAY) as prefill:
        await prefill.send(start=start)
        await handing_off.wait()
    go_on.set()
    await eventually(lambda: rig.decode.metrics()["taken_over_total"] == 1)
    await rig.wait_idle()


async def test_a_worker_is_registered_while_it_lives(rig: Rig) -> None:
    bucket = await rig.hub.connect().bucket(Subjects(INSTANCE).workers_bucket, ttl_s=3.0)
    records = [decode(WorkerRecord, entry.value) for entry in await bucket.list_entries() if entry.value]
    assert {(record.worker_id, record.role) for record in records} == {
        (rig.prefill.worker_id, "prefill"),
        (rig.decode.worker_id, "decode"),
    }
    assert {record.num_arena_pages for record in records} == {112}
    await rig.prefill.shell.drain(0.2)
    async with asyncio.timeout(TIMEOUT_S):
        while not await is_draining(bucket, rig.prefill.worker_id):  # noqa: ASYNC110 - a bucket has no event
            await asyncio.sleep(0.05)


async def is_draining(bucket: KvBucket, worker_id: str) -> bool:
    entry = await bucket.get(worker_id)
    return entry is not None and entry.value is not None and decode(WorkerRecord, entry.value).is_draining


async def test_the_lost_lease_ends_the_process_and_no_step_runs_after_it(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    num_steps = 0

    def count(plan: StepPlan) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.01)

    rig.on_run["decode"] = count
    start = start_command(rig.decode.worker_id, max_tokens=300)
    await begin(streams, start)
    await streams[1].next_update(start.request_id)
    rig.decode.arena.lost.set()
    await eventually(lambda: bool(rig.decode.shutdowns))
    assert "lease" in rig.decode.shutdowns[0]
    steps_then = num_steps
    await asyncio.sleep(0.1)
    assert num_steps == steps_then


async def test_a_draining_worker_refuses_starts_and_ends_what_runs_at_the_deadline(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    go_on = asyncio.Event()

    async def wait(request_id: str) -> None:
        await go_on.wait()

    rig.on_run["decode"] = lambda plan: time.sleep(0.05)
    rig.arena.before_hand_off = wait
    start = start_command(rig.decode.worker_id, max_tokens=300)
    await begin(streams, start)
    await streams[0].next_update(start.request_id)
    prefill_drain = asyncio.create_task(rig.prefill.shell.drain(5.0))
    await asyncio.sleep(0.05)
    late = start_command(rig.decode.worker_id)
    await streams[0].send(start=late)
    refused = await streams[0].next_update(late.request_id)
    assert refused.error.reason == worker_pb2.WORKER_ERROR_REASON_DRAINING
    go_on.set()
    await prefill_drain
    await rig.decode.shell.drain(1.5)
    received = await streams[1].receive_all(start.request_id)
    assert received.last.error.reason == worker_pb2.WORKER_ERROR_REASON_DRAINING
    assert received.token_ids == expected_tokens(start)[: len(received.token_ids)]
    await rig.wait_idle()
