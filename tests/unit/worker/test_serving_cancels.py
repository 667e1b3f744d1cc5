"""A cancel frees a sequence wherever it is."""

import asyncio
import threading
import time

import pytest
from tests.unit.worker.rig import (
    TIMEOUT_S,
    Rig,
    Stream,
    begin,
    cancel_command,
    eventually,
    hold,
    start_command,
)

from weir.engine.plan import StepPlan
from weir.wire.v1 import types_pb2, worker_pb2


@pytest.mark.parametrize("state", ["unknown", "waiting", "prefilling", "handing off", "decoding", "ended"])
async def test_a_cancel_frees_the_sequence_in_every_state(rig: Rig, streams: tuple[Stream, Stream], state: str) -> None:
    start = start_command(rig.decode.worker_id, max_tokens=300 if state != "ended" else 2)
    await CANCEL_IN[state](rig, streams, start)
    await rig.wait_idle()
    assert rig.decode.metrics()["finished_total"] == (1 if state == "ended" else 0)


async def cancel_both(streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    for stream in streams:
        await stream.send(cancel=cancel_command(start))


async def cancel_both_and_wait(streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    """While a step or a hand-off is held: until both workers have the Cancel."""
    await cancel_both(streams, start)
    for stream in streams:
        await stream.wait_taken()


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
    await cancel_both_and_wait(streams, start)
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
    await cancel_both_and_wait(streams, start)
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
    await cancel_both_and_wait(streams, start)
    go_on.set()
    await eventually(lambda: rig.decode.metrics()["unwanted_hand_offs_total"] == 1)


async def cancel_decoding(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    await begin(streams, start)
    while (await streams[1].next_update(start.request_id)).first_index < 3:
        pass
    await cancel_both(streams, start)
    received = await streams[1].receive_all(start.request_id)
    assert received.last.finish_reason == types_pb2.FINISH_REASON_CANCELLED


async def cancel_ended(rig: Rig, streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    await begin(streams, start)
    await streams[1].receive_all(start.request_id)
    await cancel_both(streams, start)


CANCEL_IN = {
    "unknown": cancel_unknown,
    "waiting": cancel_waiting,
    "prefilling": cancel_prefilling,
    "handing off": cancel_handing_off,
    "decoding": cancel_decoding,
    "ended": cancel_ended,
}
