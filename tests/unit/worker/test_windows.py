"""Workers whose model sees a window only: pages before it are the arena's again, and no token is another one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

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
    eventually,
    resume_command,
    running_rig,
    start_command,
)
from tests.unit.worker.test_adoption import read_all, read_some

from weir.core.sampling import SamplingParams
from weir.engine.plan import StepPlan
from weir.kv.geometry import ATTENTION_BLOCK_TOKENS, num_pages_for
from weir.kv.messages import PrefixMatch
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


async def test_a_long_prompt_asks_for_the_pages_of_its_window_alone(
    rig: Rig, streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    matches: list[PrefixMatch] = []
    match = rig.prefill.arena.match

    async def note(*request: Any) -> PrefixMatch:
        matches.append(await match(*request))
        return matches[-1]

    monkeypatch.setattr(rig.prefill.arena, "match", note)
    for _ in range(2):
        start = start_of(rig)
        await begin(streams, start)
        for stream in streams:
            await stream.receive_all(start.request_id)
    first, again = matches
    assert (len(first.page_ids), len(first.acquired.page_ids)) == (
        0,
        num_pages_for(WINDOW + ATTENTION_BLOCK_TOKENS + 32),
    )
    assert (len(again.page_ids), len(again.acquired.page_ids)) == (16, 1)


async def test_pages_of_an_answer_are_found_too(rig: Rig, streams: tuple[Stream, Stream]) -> None:
    """They go back while it is still being written."""
    prompt, num_tokens = PROMPT[:100], 280
    start = start_command(rig.decode.worker_id, prompt_token_ids=prompt, max_tokens=num_tokens)
    await begin(streams, start)
    first, rest = [await stream.receive_all(start.request_id) for stream in streams]
    tokens = list((first.tokens | rest.tokens).values())
    assert tokens == reference_tokens(prompt, SamplingParams(seed=1), num_tokens, VOCAB_SIZE, window=WINDOW)
    assert rig.decode.metrics()["pages_behind_window_total"] == 2 * 8
    assert num_found(rig, [*prompt, *tokens]) == (100 + num_tokens - 1) // 16
    turn = start_command(rig.decode.worker_id, prompt_token_ids=[*prompt, *tokens[:270]], max_tokens=5)
    await begin(streams, turn)
    again = await streams[0].receive_all(turn.request_id)
    assert again.last.num_cached_tokens == 368
    rest = await streams[1].receive_all(turn.request_id)
    assert list((again.tokens | rest.tokens).values()) == reference_tokens(
        tuple(turn.prompt_token_ids), SamplingParams(seed=1), 5, VOCAB_SIZE, window=WINDOW
    )


async def test_a_prompt_is_whole_for_others_when_it_is_handed_off_although_its_beginning_is_still_on_its_way_back() -> (
    None
):
    """The window is shorter than a chunk, so pages go back that were computed in the same step."""
    released = asyncio.Event()
    async with running_rig(window=1) as rig:
        rig.arena.before_release = released.wait
        async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode:
            start = start_command(rig.decode.worker_id, prompt_token_ids=PROMPT[:128], max_tokens=20)
            await begin((prefill, decode), start)
            await eventually(lambda: rig.arena.num_hand_offs == 1)
            assert rig.prefill.metrics()["pages_behind_window_total"] == 8
            assert num_found(rig, list(PROMPT[:128])) == 8
            released.set()
            await decode.receive_all(start.request_id)
        await rig.wait_idle()


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
