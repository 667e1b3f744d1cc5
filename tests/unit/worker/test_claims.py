"""A gateway goes away amid its sequences, and another one goes on with them: real streams, engine and records."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.worker.rig import GATEWAY, VOCAB_SIZE, Rig, begin_together, connected, eventually, running_rig
from tests.unit.worker.test_adoption import KINDS, MAX_TOKENS, read_all, read_some, start_of

from weir.testing.runner import reference_tokens
from weir.wire.v1 import types_pb2, worker_pb2

OTHER = "gateway-1-22222222"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(gateway_gone_s=0.3, num_decode=2) as made:
        yield made


def claim_of(start: worker_pb2.Start, next_index: int = 0) -> worker_pb2.Resume:
    attempt = types_pb2.Attempt(dispatch=1001)
    return worker_pb2.Resume(
        request_id=start.request_id, attempt=attempt, next_index=next_index, awaits_hand_off=True, claims=True
    )


async def test_what_has_a_key_goes_on_for_another_gateway_and_after_that_at_another_worker(rig: Rig) -> None:
    starts = [start_of(rig, sampling) for sampling in KINDS.values()]
    for start in starts:
        start.keep_ms = 30_000
    plain = start_of(rig, KINDS["greedy"])
    first, adopter = rig.workers[1:]
    async with connected(rig.prefill, GATEWAY) as prefill, connected(first, GATEWAY) as stream:
        await begin_together(rig, (prefill, stream), [*starts, plain])
        await read_some(stream, [*starts, plain], num_tokens=5)
        computed = rig.prefill.metrics()["prompt_tokens_computed_total"]
    await eventually(lambda: first.metrics()["num_unclaimed"] == len(starts))
    await eventually(lambda: first.metrics()["num_live"] == len(starts))
    # However long the claims take: what came there without its log-probabilities is cancelled with its gateway.
    limits = adopter.shell._manager._limits
    adopter.shell._manager._limits = replace(limits, gateway_gone_s=60.0)

    async with connected(adopter, OTHER) as after:
        async with connected(first, OTHER) as stream:
            for start in starts:
                await stream.send(resume=claim_of(start))
            received = await read_some(stream, starts, num_tokens=20)
            assert {one.last.attempt.dispatch for one in received.values()} == {1001}
            await rig.kill(first)
        for start in starts:
            await after.send(resume=claim_of(start, next_index=len(received[start.request_id].tokens)))
        rest = await read_all(after, starts)
        await rig.wait_idle()  # with the stream: an end that none has taken is kept for long
    for start, sampling in zip(starts, KINDS.values(), strict=True):
        assert rest[start.request_id].last.attempt == types_pb2.Attempt(dispatch=1001, adoption=1)
        tokens = received[start.request_id].tokens | rest[start.request_id].tokens
        expected = reference_tokens(tuple(start.prompt_token_ids), sampling, MAX_TOKENS, VOCAB_SIZE)
        assert [tokens[index] for index in range(MAX_TOKENS)] == expected
    assert adopter.metrics()["claimed_total"] == len(starts)
    assert rig.prefill.metrics()["prompt_tokens_computed_total"] == computed
    assert adopter.metrics()["tokens_recomputed_total"] == 0
