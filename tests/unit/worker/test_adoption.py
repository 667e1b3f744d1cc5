"""A decode worker dies amid its sequences: another one goes on at the next token and computes none again."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.worker.rig import (
    GATEWAY,
    MAX_CONTEXT_TOKENS,
    VOCAB_SIZE,
    Received,
    Rig,
    Stream,
    begin_together,
    connected,
    eventually,
    resume_command,
    running_rig,
    start_command,
)

from weir.core.sampling import SamplingParams
from weir.rpc.conversions import sampling_to_pb
from weir.testing.runner import reference_tokens
from weir.wire.v1 import worker_pb2

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=7),
    "with penalties": SamplingParams(temperature=0.7, seed=8, presence_penalty=0.5, repetition_penalty=1.2),
    "with log-probabilities": SamplingParams(temperature=0.7, seed=9, logprobs=2),
}
MAX_TOKENS = 250


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(gateway_gone_s=0.3, num_decode=2) as made:
        yield made


def start_of(rig: Rig, sampling: SamplingParams) -> worker_pb2.Start:
    return start_command(rig.decode.worker_id, sampling=sampling_to_pb(sampling), max_tokens=MAX_TOKENS)


async def read_some(stream: Stream, starts: list[worker_pb2.Start], num_tokens: int) -> dict[str, Received]:
    received = {start.request_id: Received() for start in starts}
    while min(len(one.tokens) for one in received.values()) < num_tokens:
        for update in (await stream.next_frame()).updates:
            received[update.request_id].add(update)
    return received


async def read_all(stream: Stream, starts: list[worker_pb2.Start]) -> dict[str, Received]:
    received = {start.request_id: Received() for start in starts}
    while not all(one.last.finish_reason for one in received.values()):
        for update in (await stream.next_frame()).updates:
            received[update.request_id].add(update)
    return received


async def test_every_kind_of_sequence_goes_on_with_the_same_tokens_and_nothing_computed_again(rig: Rig) -> None:
    starts = [start_of(rig, sampling) for sampling in KINDS.values()]
    dead, adopter = rig.workers[1:]
    async with connected(rig.prefill, GATEWAY) as prefill, connected(adopter, GATEWAY) as other:
        async with connected(dead, GATEWAY) as stream:
            await begin_together(rig, (prefill, stream), starts)
            received = await read_some(stream, starts, num_tokens=5)
            computed = rig.prefill.metrics()["prompt_tokens_computed_total"]
            await rig.kill(dead)
        for start in starts:
            next_index = len(received[start.request_id].tokens)
            await other.send(resume=resume_command(start, next_index))
        rest = await read_all(other, starts)
        for start, sampling in zip(starts, KINDS.values(), strict=True):
            assert rest[start.request_id].last.attempt.adoption == 1
            tokens = received[start.request_id].tokens | rest[start.request_id].tokens
            expected = reference_tokens(tuple(start.prompt_token_ids), sampling, MAX_TOKENS, VOCAB_SIZE)
            assert [tokens[index] for index in range(MAX_TOKENS)] == expected
        await rig.wait_idle()
    metrics = adopter.metrics()
    assert metrics["adopted_total"] == len(KINDS)
    assert metrics["prompt_tokens_computed_total"] == metrics["tokens_recomputed_total"] == 0
    assert rig.prefill.metrics()["prompt_tokens_computed_total"] == computed


async def test_one_that_its_gateway_cancels_meanwhile_is_not_gone_on_with(rig: Rig) -> None:
    start = start_of(rig, KINDS["greedy"])
    dead, adopter = rig.workers[1:]
    async with connected(rig.prefill, GATEWAY) as prefill, connected(adopter, GATEWAY) as other:
        async with connected(dead, GATEWAY) as stream:
            await begin_together(rig, (prefill, stream), [start])
            await read_some(stream, [start], num_tokens=2)
            await other.send(cancel=worker_pb2.Cancel(request_id=start.request_id, attempt=start.attempt))
            await other.next_update(start.request_id)
            await rig.kill(dead)
        await rig.wait_idle()
    assert adopter.metrics()["unwanted_hand_offs_total"] == 1


async def test_more_than_the_adopter_may_run_at_a_time_wait_with_their_pages(rig: Rig) -> None:
    """It runs eight at a time, and has some of its own."""
    dead, adopter = rig.workers[1:]
    starts = [start_of(rig, KINDS["greedy"]) for _ in range(6)]
    own = [start_command(adopter.worker_id, max_tokens=MAX_TOKENS) for _ in range(6)]
    assert MAX_TOKENS < MAX_CONTEXT_TOKENS
    async with connected(rig.prefill, GATEWAY) as prefill, connected(adopter, GATEWAY) as other:
        async with connected(dead, GATEWAY) as stream:
            await begin_together(rig, (prefill, stream), starts)
            await read_some(stream, starts, num_tokens=2)
            await begin_together(rig, (prefill, other), own)
            await rig.kill(dead)
        for start in starts:
            await other.send(resume=resume_command(start))
        ended = set[str]()
        while len(ended) < len(starts) + len(own):
            ended.update(update.request_id for update in (await other.next_frame()).updates if update.finish_reason)
        await eventually(lambda: adopter.metrics()["adopted_total"] == len(starts))
        await rig.wait_idle()
