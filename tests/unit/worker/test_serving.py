"""A gateway at both workers: prompts go in, tokens come out, whatever happens to streams in between."""

import asyncio
import threading
import time
from contextlib import AsyncExitStack

from tests.unit.worker.rig import (
    GATEWAY,
    TIMEOUT_S,
    Rig,
    Stream,
    begin,
    begin_together,
    connected,
    eventually,
    expected_tokens,
    hold,
    resume_command,
    start_command,
)

from weir.engine.plan import StepPlan
from weir.wire.v1 import types_pb2, worker_pb2


async def test_a_prompt_is_prefilled_handed_off_and_decoded(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    first, rest = await asyncio.gather(
        streams[0].receive_all(start.request_id), streams[1].receive_all(start.request_id)
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
    received = await streams[0].receive_all(start.request_id)
    assert received.token_ids == expected_tokens(start)
    assert received.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert not received.last.handed_off
    await rig.wait_idle()
    assert rig.arena.num_hand_offs == 0


async def test_all_sequences_of_a_step_share_a_frame(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    starts = [start_command(rig.decode.worker_id, max_tokens=30) for _ in range(5)]
    await begin_together(rig, streams, starts)
    await streams[1].receive_all(starts[0].request_id)
    steps = [frame.step for frame in streams[1].frames if frame.step]
    assert len(steps) == len(set(steps)), "two frames of one step"
    assert max(len(frame.updates) for frame in streams[1].frames) == 5


async def test_after_a_break_everything_from_the_index_asked_for_is_sent_again(rig: Rig) -> None:
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
        received = await second.receive_all(start.request_id)
        assert min(received.tokens) == 3
        assert [received.tokens[index] for index in range(3, 30)] == expected_tokens(start)[3:]


async def test_an_ended_sequence_can_still_be_resumed_for_a_while(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    await streams[1].receive_all(start.request_id)
    await streams[1].send(resume=resume_command(start, next_index=10))
    again = await streams[1].receive_all(start.request_id)
    assert sorted(again.tokens) == [10, 11]
    assert again.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    await asyncio.sleep(2.6)  # ended sequences are retained for 2 s here
    await streams[1].send(resume=resume_command(start, next_index=10, awaits_hand_off=False))
    update = await streams[1].next_update(start.request_id)
    assert update.error.reason == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST


async def test_a_start_that_is_sent_twice_runs_once(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await begin(streams, start)
    await streams[0].send(start=start)
    await streams[1].receive_all(start.request_id)
    await rig.wait_idle()
    assert rig.prefill.metrics()["tokens_generated_total"] == 1


async def test_a_slow_gateway_gets_every_token(rig: Rig) -> None:
    start = start_command(rig.decode.worker_id, max_tokens=300)
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode_:
        await begin((prefill, decode_), start)
        await eventually(lambda: rig.decode.metrics()["finished_total"] == 1)
        received = await decode_.receive_all(start.request_id)
        assert received.token_ids == expected_tokens(start)


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
    await streams[0].wait_taken()
    release.set()
    received = await streams[0].receive_all(second.request_id)
    assert received.last.attempt.dispatch == 3
    assert received.token_ids == expected_tokens(third)
    await rig.wait_idle()


async def test_a_worker_with_too_much_to_do_refuses(rig: Rig, streams: tuple[Stream, Stream]) -> None:
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
    num_free_pages = rig.arena.num_free_pages
    await streams[0].send(start=starts[1])
    await eventually(lambda: rig.arena.num_free_pages < num_free_pages)
    await streams[0].wait_taken()
    release.set()
    await streams[0].receive_all(starts[1].request_id)
    assert rig.prefill.metrics()["steps_total"] == 3  # 32; 8 and 32; 8


async def test_pages_in_use_and_pages_with_a_token_are_counted(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    in_second_step, release = threading.Event(), threading.Event()

    def wait(plan: StepPlan) -> None:
        if plan.step == 2:
            in_second_step.set()
            hold(release)

    rig.on_run["prefill"] = wait
    start = start_command(rig.decode.worker_id, max_tokens=1)
    await streams[0].send(start=start)
    await asyncio.to_thread(in_second_step.wait, TIMEOUT_S)
    metrics = rig.prefill.metrics()
    assert (metrics["num_used_pages"], metrics["num_filled_pages"]) == (2, 2), (
        "32 of 40 tokens; no page for the rest yet"
    )
    release.set()
    await streams[0].receive_all(start.request_id)
