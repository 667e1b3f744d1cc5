"""A decode worker prefills prompts itself, beside sequences that are handed to it."""

import asyncio
import threading

from tests.unit.worker.rig import (
    TIMEOUT_S,
    Rig,
    Stream,
    begin,
    cancel_command,
    expected_tokens,
    hold,
    resume_command,
    start_command,
)

from weir.engine.plan import StepPlan
from weir.wire.v1 import types_pb2, worker_pb2


async def test_a_prompt_is_prefilled_and_decoded_by_one_worker(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await streams[1].send(start=start)
    received = await streams[1].receive_all(start.request_id)
    assert received.token_ids == expected_tokens(start)
    assert received.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    await rig.wait_idle()
    decode = rig.decode.metrics()
    assert decode["prompt_tokens_computed_total"] == 40
    assert decode["served_locally_total"] == 1
    assert rig.arena.num_hand_offs == rig.prefill.metrics()["prompt_tokens_computed_total"] == 0


async def test_prompts_and_hand_offs_share_a_batch_and_keep_their_tokens(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    split = [start_command(rig.decode.worker_id, max_tokens=40, prompt_token_ids=range(i, i + 30)) for i in range(3)]
    local = [start_command(rig.decode.worker_id, max_tokens=40, prompt_token_ids=range(i, i + 90)) for i in range(3)]
    for start in split:
        await begin(streams, start)
    for start in local:
        await streams[1].send(start=start)
    for start in (*split, *local):
        tokens: dict[int, int] = {}
        for frame in streams[1].frames:
            for update in frame.updates:
                if update.request_id == start.request_id:
                    tokens |= dict(enumerate(update.token_ids, update.first_index))
        if len(tokens) < 40:
            tokens |= (await streams[1].receive_all(start.request_id)).tokens
        assert [tokens[index] for index in range(40)] == expected_tokens(start)
    await rig.wait_idle()


async def test_a_second_prompt_with_the_same_beginning_computes_only_the_rest(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    for _ in range(2):
        start = start_command(rig.decode.worker_id, prompt_token_ids=range(100))
        await streams[1].send(start=start)
        received = await streams[1].receive_all(start.request_id)
        assert received.token_ids == expected_tokens(start)
    assert received.last.num_cached_tokens in (0, 96)  # sent with the first token
    await rig.wait_idle()
    assert rig.decode.metrics()["prompt_tokens_computed_total"] == 100 + 4


async def test_a_prompt_for_another_worker_is_refused_by_name(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command("decode-9-other")
    await streams[1].send(start=start)
    received = await streams[1].receive_all(start.request_id)
    assert received.last.error.reason == worker_pb2.WORKER_ERROR_REASON_INTERNAL
    assert "start.decode_worker_id: decode-9-other" in received.last.error.message


async def test_a_prompt_that_is_cancelled_during_its_prefill_leaves_nothing(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    in_step, release = threading.Event(), threading.Event()

    def wait(plan: StepPlan) -> None:
        in_step.set()
        hold(release)

    rig.on_run["decode"] = wait
    start = start_command(rig.decode.worker_id, prompt_token_ids=range(300), num_reserved_pages=25)
    await streams[1].send(start=start)
    await asyncio.to_thread(in_step.wait, TIMEOUT_S)
    await streams[1].send(cancel=cancel_command(start))
    await streams[1].wait_taken()
    release.set()
    received = await streams[1].receive_all(start.request_id)
    assert received.last.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert not received.tokens
    await rig.wait_idle()


async def test_a_start_that_is_sent_again_is_resumed(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = start_command(rig.decode.worker_id)
    await streams[1].send(start=start)
    await streams[1].send(start=start)
    await streams[1].send(resume=resume_command(start))
    received = await streams[1].receive_all(start.request_id)
    assert received.token_ids == expected_tokens(start)
    await rig.wait_idle()
    assert rig.decode.metrics()["prompt_tokens_computed_total"] == 40
