"""A worker that drains at an operator's word: it takes nothing new, what it has ends or goes on elsewhere, and it stays
empty until it is told to take work again."""

import asyncio
import time

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
    resume_command,
    start_command,
)

from weir.bus.codec import decode
from weir.bus.messages import WorkerRecord
from weir.bus.subjects import Subjects
from weir.wire.v1 import worker_pb2
from weir.worker.requests.drain import Duty

DRAINING = worker_pb2.WORKER_ERROR_REASON_DRAINING


async def run_one(rig: Rig, streams: tuple[Stream, Stream], max_tokens: int) -> worker_pb2.Start:
    """A sequence that decodes slowly, and has begun to."""
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    start = start_command(rig.decode.worker_id, max_tokens=max_tokens)
    await begin(streams, start)
    await streams[1].next_update(start.request_id)
    return start


async def test_what_runs_may_end_within_the_grace_period(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = await run_one(rig, streams, max_tokens=20)
    rig.decode.shell.begin_drain(20.0)
    assert rig.decode.shell.duty is Duty.DRAINING
    received = await streams[1].receive_all(start.request_id)
    assert not received.last.HasField("error")
    assert max(received.tokens) == 19
    await eventually(lambda: rig.decode.shell.duty is Duty.DRAINED)
    await rig.wait_idle()


async def test_what_has_not_ended_then_is_interrupted_and_nothing_is_left(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    start = await run_one(rig, streams, max_tokens=300)
    rig.decode.shell.begin_drain(0.2)
    received = await streams[1].receive_all(start.request_id)
    assert received.last.error.reason == DRAINING
    await eventually(lambda: rig.decode.shell.duty is Duty.DRAINED)
    await rig.wait_idle()


async def test_a_second_drain_sets_the_grace_period_anew_and_one_of_a_drained_worker_changes_nothing(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    start = await run_one(rig, streams, max_tokens=300)
    rig.decode.shell.begin_drain(3600.0)
    rig.decode.shell.begin_drain(0.0)
    assert (await streams[1].receive_all(start.request_id)).last.error.reason == DRAINING
    await eventually(lambda: rig.decode.shell.duty is Duty.DRAINED)
    rig.decode.shell.begin_drain(3600.0)
    assert rig.decode.shell.duty is Duty.DRAINED


async def test_what_is_prefilled_for_a_draining_worker_still_comes(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    handing_off, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request_id: str) -> None:
        handing_off.set()
        await go_on.wait()

    rig.arena.before_hand_off = wait
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    await handing_off.wait()
    await eventually(lambda: rig.decode.shell._manager.num_expected == 1)
    rig.decode.shell.begin_drain(20.0)
    await asyncio.sleep(0.1)
    assert rig.decode.shell.duty is Duty.DRAINING, "one is expected"
    go_on.set()
    received = await streams[1].receive_all(start.request_id)
    assert received.token_ids == expected_tokens(start)
    await eventually(lambda: rig.decode.shell.duty is Duty.DRAINED)


async def test_what_comes_after_the_grace_period_is_freed_and_its_gateway_is_told(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    handing_off, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request_id: str) -> None:
        handing_off.set()
        await go_on.wait()

    rig.arena.before_hand_off = wait
    start, late = start_command(rig.decode.worker_id), start_command(rig.decode.worker_id)
    await begin(streams, start)
    await handing_off.wait()
    rig.decode.shell.begin_drain(0.0)
    assert (await streams[1].receive_all(start.request_id)).last.error.reason == DRAINING
    await streams[1].send(resume=resume_command(late))
    assert (await streams[1].receive_all(late.request_id)).last.error.reason == DRAINING
    go_on.set()
    await rig.wait_idle()
    assert rig.decode.metrics()["unwanted_hand_offs_total"] == 1


async def test_a_drained_worker_takes_work_again_once_it_is_told_to(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    rig.decode.shell.begin_drain(0.0)
    await eventually(lambda: rig.decode.shell.duty is Duty.DRAINED)
    local = start_command(rig.decode.worker_id)
    await streams[1].send(start=local)
    assert (await streams[1].receive_all(local.request_id)).last.error.reason == DRAINING
    rig.decode.shell.end_drain()
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    assert (await streams[1].receive_all(start.request_id)).token_ids == expected_tokens(start)


async def test_a_drain_that_is_taken_back_interrupts_nothing(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = await run_one(rig, streams, max_tokens=40)
    rig.decode.shell.begin_drain(0.3)
    rig.decode.shell.end_drain()
    received = await streams[1].receive_all(start.request_id)
    assert not received.last.HasField("error")


async def test_the_registry_says_that_it_drains_and_that_it_is_drained(rig: Rig) -> None:
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    bucket = await rig.hub.connect().bucket(Subjects(INSTANCE).workers_bucket, ttl_s=3.0)

    async def record() -> WorkerRecord:
        entry = await bucket.get(rig.decode.worker_id)
        assert entry is not None
        assert entry.value is not None
        return decode(WorkerRecord, entry.value)

    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode_:
        start = start_command(rig.decode.worker_id, max_tokens=300)
        await begin((prefill, decode_), start)
        await decode_.next_update(start.request_id)
        rig.decode.shell.begin_drain(3600.0)
        async with asyncio.timeout(TIMEOUT_S):
            while not (await record()).is_draining:  # noqa: ASYNC110 - a bucket has no event
                await asyncio.sleep(0.02)
        assert (await record()).num_live == 1
        assert not (await record()).is_drained
        rig.decode.shell.begin_drain(0.0)
        async with asyncio.timeout(TIMEOUT_S):
            while not (await record()).is_drained:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await record()).num_live == 0


async def test_a_spare_is_known_as_one_until_it_takes_work_or_an_operator_drains_it(rig: Rig) -> None:
    shell = rig.decode.shell
    shell.begin_drain(0.0, is_spare=True)
    await eventually(lambda: shell.duty is Duty.DRAINED)
    assert shell._record().is_spare
    shell.begin_drain(0.0)
    assert (shell.duty, shell._record().is_spare) == (Duty.DRAINED, False), "an operator's drain takes it away"
    shell.begin_drain(0.0, is_spare=True)
    shell.end_drain()
    assert (shell.duty, shell._record().is_spare) == (Duty.SERVING, False)
