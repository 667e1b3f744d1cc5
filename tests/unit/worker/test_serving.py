"""A gateway at both workers: prompts go in, tokens come out, whatever happens to streams in between."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from tests.unit.worker.rig import (
    INSTANCE,
    TIMEOUT_S,
    Rig,
    Stream,
    cancel_command,
    connected,
    eventually,
    expected_tokens,
    resume_command,
    running_rig,
    start_command,
)

from weir.bus.codec import decode
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import KvBucket
from weir.bus.subjects import Subjects
from weir.core.errors import DeadlineExceeded
from weir.engine.plan import StepPlan
from weir.wire.v1 import types_pb2, worker_pb2

GATEWAY = "gateway-0-11111111"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(gateway_gone_s=0.3) as made:
        yield made


@pytest.fixture
async def streams(rig: Rig) -> AsyncIterator[tuple[Stream, Stream]]:
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode_:
        yield prefill, decode_


def hold(release: threading.Event) -> None:
    """Keeps a step from ending."""
    assert release.wait(TIMEOUT_S)


async def begin(streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    """As a gateway does: the decode worker is asked first."""
    await streams[1].send(resume=resume_command(start))
    await streams[0].send(start=start)


async def test_a_prompt_is_prefilled_handed_off_and_decoded(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    first, rest = await asyncio.gather(
        streams[0].read_to_end(start.request_id), streams[1].read_to_end(start.request_id)
    )
    assert first.token_ids == expected_tokens(start)[:1]
    assert first.last.handed_off
    assert rest.token_ids == expected_tokens(start)
    assert rest.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    await rig.wait_idle()
    prefill, decode_ = rig.prefill.metrics(), rig.decode.metrics()
    assert prefill["prompt_tokens_computed_total"] == 40
    assert prefill["decode_steps_total"] == decode_["prompt_tokens_computed_total"] == 0
    assert prefill["handed_off_total"] == decode_["taken_over_total"] == 1
    assert prefill["page_fingerprint"] == decode_["page_fingerprint"] != 0


async def test_a_request_of_one_token_ends_where_it_was_prefilled(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id, max_tokens=1)
    await begin(streams, start)
    heard = await streams[0].read_to_end(start.request_id)
    assert heard.token_ids == expected_tokens(start)
    assert heard.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert not heard.last.handed_off
    await rig.wait_idle()
    assert rig.arena.num_hand_offs == 0


async def test_all_sequences_of_a_step_share_a_frame(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    starts = [start_command(rig.decode.worker_id, max_tokens=30) for _ in range(5)]
    for start in starts:
        await begin(streams, start)
    for start in starts[:1]:
        await streams[1].read_to_end(start.request_id)
    steps = [frame.step for frame in streams[1].frames if frame.step]
    assert len(steps) == len(set(steps)), "two frames of one step"
    assert max(len(frame.updates) for frame in streams[1].frames) == 5


async def test_after_a_break_everything_from_the_index_asked_for_is_said_again(rig: Rig) -> None:
    rig.on_run["decode"] = lambda plan: time.sleep(0.01)
    start = start_command(rig.decode.worker_id, max_tokens=30)
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(connected(rig.prefill, GATEWAY))
        first = await stack.enter_async_context(connected(rig.decode, GATEWAY))
        await begin((prefill, first), start)
        while (await first.next_update(start.request_id)).first_index < 5:
            pass
        first.call.cancel()
        second = await stack.enter_async_context(connected(rig.decode, GATEWAY))
        await second.send(resume=resume_command(start, next_index=3))
        heard = await second.read_to_end(start.request_id)
        assert min(heard.tokens) == 3
        assert [heard.tokens[index] for index in range(3, 30)] == expected_tokens(start)[3:]


async def test_an_ended_sequence_can_still_be_resumed_for_a_while(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    await streams[1].read_to_end(start.request_id)
    await streams[1].send(resume=resume_command(start, next_index=10))
    again = await streams[1].read_to_end(start.request_id)
    assert sorted(again.tokens) == [10, 11]
    assert again.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    await asyncio.sleep(2.6)  # the tail is kept for 2 s here
    await streams[1].send(resume=resume_command(start, next_index=10))
    update = await streams[1].next_update(start.request_id)
    assert update.error.reason == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST


async def test_a_start_that_is_said_twice_runs_once(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    await streams[0].send(start=start)
    await streams[1].read_to_end(start.request_id)
    await rig.wait_idle()
    assert rig.prefill.metrics()["tokens_generated_total"] == 1


async def test_a_gateway_that_reads_late_gets_every_token(rig: Rig) -> None:
    start = start_command(rig.decode.worker_id, max_tokens=300)
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode_:
        await begin((prefill, decode_), start)
        await eventually(lambda: rig.decode.metrics()["finished_total"] == 1)
        heard = await decode_.read_to_end(start.request_id)
        assert heard.token_ids == expected_tokens(start)


async def test_older_attempts_are_refused_and_newer_ones_replace_them(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    release = threading.Event()
    rig.on_run["prefill"] = lambda plan: hold(release)
    second = start_command(rig.decode.worker_id, attempt=types_pb2.Attempt(dispatch=2))
    await streams[0].send(start=second)
    older = start_command(rig.decode.worker_id, request_id=second.request_id)
    await streams[0].send(start=older)
    refused = await streams[0].next_update()
    assert refused.attempt.dispatch == 1
    assert refused.error.reason == worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT
    third = start_command(
        rig.decode.worker_id, request_id=second.request_id, attempt=types_pb2.Attempt(dispatch=3), max_tokens=1
    )
    await streams[0].send(start=third)
    await asyncio.sleep(0.1)
    release.set()
    heard = await streams[0].read_to_end(second.request_id)
    assert heard.last.attempt.dispatch == 3
    assert heard.token_ids == expected_tokens(third)
    await rig.wait_idle()


async def test_a_worker_with_too_much_to_do_says_so(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    release = threading.Event()
    rig.on_run["prefill"] = lambda plan: hold(release)
    starts = [start_command(rig.decode.worker_id, max_tokens=1) for _ in range(17)]
    for start in starts:
        await streams[0].send(start=start)
    refused = await streams[0].next_update()
    assert refused.request_id == starts[16].request_id
    assert refused.error.reason == worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY
    release.set()
    await eventually(lambda: rig.prefill.metrics()["finished_total"] == 16)
    await rig.wait_idle()


async def test_a_prompt_that_comes_during_a_step_has_its_pages_at_the_next(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    in_step, release = threading.Event(), threading.Event()

    def wait(plan: StepPlan) -> None:
        in_step.set()
        hold(release)

    rig.on_run["prefill"] = wait
    starts = [start_command(rig.decode.worker_id, max_tokens=1) for _ in range(2)]
    await streams[0].send(start=starts[0])
    await asyncio.to_thread(in_step.wait, TIMEOUT_S)
    await streams[0].send(start=starts[1])
    await asyncio.sleep(0.1)
    release.set()
    await streams[0].read_to_end(starts[1].request_id)
    assert rig.prefill.metrics()["steps_total"] == 3  # 32; 8 and 32; 8


async def test_a_refused_hand_off_is_told_and_leaves_nothing(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command("decode-9-00000000")
    await streams[0].send(start=start)
    heard = await streams[0].read_to_end(start.request_id)
    assert heard.token_ids == expected_tokens(start)[:1]
    assert heard.last.error.reason == worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED
    assert "decode-9-00000000" in heard.last.error.message
    await rig.wait_idle()


async def test_a_hand_off_in_doubt_is_told_and_its_pages_are_not_used_again(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    def lose_answer(request_id: str) -> None:
        raise DeadlineExceeded("no answer")

    rig.arena.before_hand_off = lose_answer
    start = start_command(rig.decode.worker_id)
    await streams[0].send(start=start)
    heard = await streams[0].read_to_end(start.request_id)
    assert heard.last.error.reason == worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED
    await rig.wait_idle()
    assert rig.prefill.metrics()["hand_offs_in_doubt_total"] == 1


async def test_a_hand_off_that_breaks_ends_its_request(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    def fail(request_id: str) -> None:
        raise RuntimeError("on purpose")

    rig.arena.before_hand_off = fail
    start = start_command(rig.decode.worker_id)
    await streams[0].send(start=start)
    heard = await streams[0].read_to_end(start.request_id)
    assert heard.last.error.reason == worker_pb2.WORKER_ERROR_REASON_INTERNAL
    await rig.wait_idle()


async def test_a_step_that_fails_ends_its_sequences_with_an_error(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    def fail_once(plan: StepPlan) -> None:
        del rig.on_run["decode"]
        raise ZeroDivisionError("on purpose")

    rig.on_run["decode"] = fail_once
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    heard = await streams[1].read_to_end(start.request_id)
    assert heard.last.error.reason == worker_pb2.WORKER_ERROR_REASON_INTERNAL
    assert "ZeroDivisionError" in heard.last.error.message
    await rig.wait_idle()
    again = start_command(rig.decode.worker_id)
    await begin(streams, again)
    assert (await streams[1].read_to_end(again.request_id)).token_ids == expected_tokens(again)


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
    heard = await streams[1].read_to_end(start.request_id)
    assert heard.last.error.reason == worker_pb2.WORKER_ERROR_REASON_DRAINING
    assert heard.token_ids == expected_tokens(start)[: len(heard.token_ids)]
    await rig.wait_idle()


@pytest.mark.parametrize("state", ["unknown", "waiting", "prefilling", "handing off", "decoding", "ended"])
async def test_a_cancel_frees_the_sequence_in_every_state(rig: Rig, streams: tuple[Stream, Stream], state: str) -> None:
    start = start_command(rig.decode.worker_id, max_tokens=300 if state != "ended" else 2)
    await CANCEL_IN[state](rig, streams, start)
    await rig.wait_idle()
    assert rig.decode.metrics()["finished_total"] == (1 if state == "ended" else 0)


async def cancel_both(streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    for stream in streams:
        await stream.send(cancel=cancel_command(start))


async def cancel_unknown(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    await cancel_both(streams, start)
    await streams[0].send(start=start)
    update = await streams[0].next_update(start.request_id)
    assert update.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert rig.prefill.metrics()["steps_total"] == 0


async def cancel_waiting(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    release = threading.Event()
    rig.on_run["prefill"] = lambda plan: hold(release)
    others = [start_command(rig.decode.worker_id, max_tokens=1) for _ in range(8)]
    for each in (*others, start):
        await streams[0].send(start=each)
    await cancel_both(streams, start)
    await asyncio.sleep(0.05)
    release.set()
    update = await streams[0].next_update(start.request_id)
    assert update.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert not update.token_ids


async def cancel_prefilling(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    in_step, release = threading.Event(), threading.Event()

    def wait(plan: StepPlan) -> None:
        in_step.set()
        hold(release)

    rig.on_run["prefill"] = wait
    await begin(streams, start)
    await asyncio.to_thread(in_step.wait, TIMEOUT_S)
    await cancel_both(streams, start)
    await asyncio.sleep(0.05)
    release.set()
    update = await streams[0].next_update(start.request_id)
    assert update.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert rig.prefill.metrics()["prompt_tokens_computed_total"] == 32


async def cancel_handing_off(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    handing_off, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request_id: str) -> None:
        handing_off.set()
        await go_on.wait()

    rig.arena.before_hand_off = wait
    await begin(streams, start)
    await asyncio.wait_for(handing_off.wait(), TIMEOUT_S)
    await cancel_both(streams, start)
    await asyncio.sleep(0.05)
    go_on.set()
    await eventually(lambda: rig.decode.metrics()["unwanted_hand_offs_total"] == 1)


async def cancel_decoding(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    await begin(streams, start)
    while (await streams[1].next_update(start.request_id)).first_index < 3:
        pass
    await cancel_both(streams, start)
    heard = await streams[1].read_to_end(start.request_id)
    assert heard.last.finish_reason == types_pb2.FINISH_REASON_CANCELLED


async def cancel_ended(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    await begin(streams, start)
    await streams[1].read_to_end(start.request_id)
    await cancel_both(streams, start)


CANCEL_IN = {
    "unknown": cancel_unknown,
    "waiting": cancel_waiting,
    "prefilling": cancel_prefilling,
    "handing off": cancel_handing_off,
    "decoding": cancel_decoding,
    "ended": cancel_ended,
}
