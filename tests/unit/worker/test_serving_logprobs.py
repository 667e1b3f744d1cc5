"""Log-probabilities from prefill and decode worker to a gateway, through hand-offs and new streams."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from tests.unit.worker.rig import (
    GATEWAY,
    TIMEOUT_S,
    VOCAB_SIZE,
    Rig,
    Stream,
    begin,
    connected,
    resume_command,
    start_command,
)

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.rpc.conversions import logprobs_from_pb, sampling_from_pb, sampling_to_pb
from weir.testing.runner import reference_tokens
from weir.wire.v1 import worker_pb2

PARAMS = SamplingParams(0.7, top_p=0.9, seed=3, frequency_penalty=0.5, logprobs=2, prompt_logprobs=1)


def asking_start(rig: Rig, **changes: Any) -> worker_pb2.Start:
    return start_command(rig.decode.worker_id, sampling=sampling_to_pb(PARAMS), **changes)


def logprobs_by_index(frames: list[worker_pb2.StepFrame], request_id: str) -> dict[int, TokenLogprobs]:
    """By output index; an update has one entry a token, and what is sent twice is the same."""
    found: dict[int, TokenLogprobs] = {}
    for frame in frames:
        for update in frame.updates:
            if update.request_id == request_id:
                assert len(update.logprobs) == len(update.token_ids)
                for index, entry in enumerate(update.logprobs, update.first_index):
                    assert entry.token_id == update.token_ids[index - update.first_index]
                    assert found.setdefault(index, logprobs_from_pb(entry)) == logprobs_from_pb(entry)
    return found


async def test_every_token_has_one_and_both_workers_send_the_same_for_the_first(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    start = asking_start(rig)
    await begin(streams, start)
    await asyncio.gather(*(stream.receive_all(start.request_id) for stream in streams))
    from_prefill, from_decode = (logprobs_by_index(stream.frames, start.request_id) for stream in streams)
    assert from_prefill == {0: from_decode[0]}
    # the wire carries parameters as 32-bit floats
    expected = reference_tokens(tuple(range(40)), sampling_from_pb(start.sampling), 12, VOCAB_SIZE)
    assert [entry.token_id for _, entry in sorted(from_decode.items())] == expected
    assert all(entry.rank > 0 and len(entry.top) == 2 for entry in from_decode.values())


async def test_those_of_the_prompt_come_before_the_first_token(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    start = asking_start(rig)
    await begin(streams, start)
    await asyncio.gather(*(stream.receive_all(start.request_id) for stream in streams))
    updates = [update for frame in streams[0].frames for update in frame.updates]
    found = [entry for update in updates for entry in update.prompt_logprobs]
    assert [entry.token_id for entry in found] == list(range(1, 40))
    first_token = next(place for place, update in enumerate(updates) if update.token_ids)
    assert not any(update.prompt_logprobs for update in updates[first_token + 1 :])


async def test_a_prompt_that_is_scored_is_not_looked_up_in_the_cache(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    for _ in range(2):
        start = asking_start(rig)
        await begin(streams, start)
        await asyncio.gather(*(stream.receive_all(start.request_id) for stream in streams))
    assert {update.num_cached_tokens for frame in streams[0].frames for update in frame.updates} == {0}
    await rig.wait_idle()
    assert rig.prefill.metrics()["prompt_tokens_computed_total"] == 80


async def test_a_gateway_that_comes_back_is_sent_them_again(rig: Rig) -> None:
    rig.on_run["decode"] = lambda plan: time.sleep(0.01)
    start = asking_start(rig, max_tokens=30)
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(connected(rig.prefill, GATEWAY))
        first = await stack.enter_async_context(connected(rig.decode, GATEWAY))
        await begin((prefill, first), start)
        async with asyncio.timeout(TIMEOUT_S):
            while (await first.next_update(start.request_id)).first_index < 5:
                pass
        first.call.cancel()
        second = await stack.enter_async_context(connected(rig.decode, GATEWAY))
        await second.send(resume=resume_command(start, 3))
        await second.receive_all(start.request_id)
        before, after = (logprobs_by_index(stream.frames, start.request_id) for stream in (first, second))
        assert sorted(after) == list(range(3, 30))
        shared = before.keys() & after.keys()
        assert len(shared) >= 3
        assert {index: before[index] for index in shared} == {index: after[index] for index in shared}
