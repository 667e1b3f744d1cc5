"""Workers whose model sees a window only: pages before it are the arena's again, and no token is another one."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.worker.rig import (
    GATEWAY,
    VOCAB_SIZE,
    Rig,
    RunningWorker,
    Stream,
    begin,
    begin_together,
    connected,
    resume_command,
    running_rig,
    start_command,
)
from tests.unit.worker.test_adoption import read_all, read_some

from weir.core.sampling import SamplingParams
from weir.engine.plan import StepPlan
from weir.kv.geometry import ATTENTION_BLOCK_TOKENS, num_pages_for
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.testing.runner import reference_tokens
from weir.wire.v1 import worker_pb2

WINDOW = 40
PROMPT = tuple((place * place + 3) % VOCAB_SIZE for place in range(260))
MAX_TOKENS = 120


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(gateway_gone_s=0.3, num_decode=2, window=WINDOW) as made:
        yield made
        await made.wait_idle()
        assert list(made.arena.prefixes.integrity_errors()) == []


@pytest.fixture
async def streams(rig: Rig) -> AsyncIterator[tuple[Stream, Stream]]:
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode:
        yield prefill, decode


def start_of(rig: Rig, prompt: tuple[int, ...] = PROMPT) -> worker_pb2.Start:
    return start_command(rig.decode.worker_id, prompt_token_ids=prompt, max_tokens=MAX_TOKENS)


def expected(prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return reference_tokens(prompt, SamplingParams(seed=1), MAX_TOKENS, VOCAB_SIZE, window=WINDOW)


def watch(rig: Rig, worker: RunningWorker) -> list[int]:
    """How many pages its sequences hold, by its report before each of its steps."""
    held: list[int] = []

    def look(plan: StepPlan) -> None:
        del plan
        held.append(int(worker.metrics()["num_used_pages"]))

    rig.on_run[worker.worker_id.split("-")[0]] = look
    return held


def num_found(rig: Rig, token_ids: list[int]) -> int:
    return len(rig.arena.prefixes.find_prefix(page_hashes(token_ids, prefix_seed(""))))


async def test_a_long_request_takes_the_pages_of_its_window_and_the_next_one_finds_all_of_it(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    of_prefill, of_decode = watch(rig, rig.prefill), watch(rig, rig.decode)
    for num_cached_tokens in (0, 256):
        start = start_of(rig)
        await begin(streams, start)
        first, rest = [await stream.receive_all(start.request_id) for stream in streams]
        assert first.tokens | rest.tokens == dict(enumerate(expected()))
        assert first.last.num_cached_tokens == num_cached_tokens
        assert num_found(rig, [*PROMPT, *expected()]) == (260 + MAX_TOKENS - 1) // 16
        if not num_cached_tokens:
            most = num_pages_for(WINDOW + ATTENTION_BLOCK_TOKENS)
            assert max(of_prefill) <= most + num_pages_for(32), "and a chunk"
            assert max(of_decode) <= most + 1
    assert rig.prefill.metrics()["pages_behind_window_total"] == 2 * 8
    assert rig.decode.metrics()["pages_behind_window_total"] == 2 * 8


async def test_a_sequence_without_its_first_pages_is_adopted_and_nothing_is_computed_again(rig: Rig) -> None:
    starts = [start_of(rig, PROMPT[index:]) for index in range(3)]
    dead, adopter = rig.workers[1:]
    async with connected(rig.prefill, GATEWAY) as prefill, connected(adopter, GATEWAY) as other:
        async with connected(dead, GATEWAY) as stream:
            await begin_together(rig, (prefill, stream), starts)
            received = await read_some(stream, starts, num_tokens=60)
            await rig.kill(dead)
        for start in starts:
            await other.send(resume=resume_command(start, len(received[start.request_id].tokens)))
        rest = await read_all(other, starts)
    for index, start in enumerate(starts):
        tokens = received[start.request_id].tokens | rest[start.request_id].tokens
        assert tokens == dict(enumerate(expected(PROMPT[index:])))
    metrics = adopter.metrics()
    assert metrics["adopted_total"] == 3
    assert metrics["prompt_tokens_computed_total"] == metrics["tokens_recomputed_total"] == 0


async def test_a_prompt_that_one_worker_computes_and_decodes_takes_no_more(
    rig: Rig, streams: tuple[Stream, Stream]
) -> None:
    held = watch(rig, rig.decode)
    start = start_of(rig)
    await streams[1].send(start=start)
    assert (await streams[1].receive_all(start.request_id)).token_ids == expected()
    assert max(held) <= num_pages_for(WINDOW + ATTENTION_BLOCK_TOKENS) + num_pages_for(64)
    assert num_found(rig, [*PROMPT, *expected()]) == (260 + MAX_TOKENS - 1) // 16
