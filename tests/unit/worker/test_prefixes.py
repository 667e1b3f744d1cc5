"""Both workers with a prefix cache: what is found is not computed, the tokens stay the same, and nothing leaks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from tests.unit.engine.world import params
from tests.unit.worker.in_memory_arena import InMemoryArena, InMemoryArenaClient
from tests.unit.worker.rig import (
    Received,
    Rig,
    Stream,
    begin,
    cancel_command,
    eventually,
    expected_tokens,
    hold,
    resume_command,
    start_command,
)

from weir.core.errors import Unavailable
from weir.core.life import FinishReason
from weir.engine.loop import InboxFull
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    ChunkComputed,
    Command,
    EngineReport,
    Event,
    GivePages,
    HandOffReady,
    SequenceEnded,
    SequenceKey,
)
from weir.engine.plan import StepPlan
from weir.kv.geometry import ArenaGeometry
from weir.kv.messages import PageChain, PrefixSource
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.wire.v1 import types_pb2, worker_pb2
from weir.worker.arena.page_keeper import PageKeeper
from weir.worker.arena.prefixes import Prefixes

Streams = tuple[Stream, Stream]


@pytest.fixture(autouse=True)
async def nothing_is_left(rig: Rig) -> AsyncIterator[None]:
    yield
    await rig.wait_idle()
    assert list(rig.arena.prefixes.integrity_errors()) == []


async def answer(streams: Streams, start: worker_pb2.Start) -> Received:
    """What both workers send, checked against the model without a cache."""
    await begin(streams, start)
    first = await streams[0].receive_all(start.request_id)
    if not first.last.handed_off:
        return first
    received = await streams[1].receive_all(start.request_id)
    assert received.token_ids == expected_tokens(start)
    received.last.num_cached_tokens = first.last.num_cached_tokens
    return received


def client_of(num_pages: int) -> InMemoryArenaClient:
    """Of an arena of its own."""
    arena = InMemoryArena(ArenaGeometry(64, num_pages=num_pages, num_slots=4, max_context_tokens=64))
    return InMemoryArenaClient(arena, "prefill-0-00000000", lambda handed_off: None)


def computed(rig: Rig) -> float:
    return rig.prefill.metrics()["prompt_tokens_computed_total"]


def num_found(rig: Rig, token_ids: list[int], salt: str = "") -> int:
    hashes = page_hashes(token_ids, prefix_seed("", salt=salt))
    return len(rig.arena.prefixes.find_prefix(hashes))


async def test_the_second_turn_computes_its_new_tokens_and_at_most_a_page(rig: Rig, streams: Streams) -> None:
    first = start_command(rig.decode.worker_id, prompt_token_ids=range(100), max_tokens=50)
    received = await answer(streams, first)
    turn = [*range(100), *received.token_ids, *range(200, 220)]
    before = computed(rig)

    second = await answer(streams, start_command(rig.decode.worker_id, prompt_token_ids=turn, max_tokens=10))

    assert len(turn) == 170
    assert second.last.num_cached_tokens == 16 * ((100 + 50 - 1) // 16)
    assert computed(rig) - before == 170 - 144


async def test_what_an_earlier_dispatch_has_sampled_is_not_sampled_again_and_its_pages_are_found(
    rig: Rig, streams: Streams
) -> None:
    start = start_command(rig.decode.worker_id, prompt_token_ids=range(40), max_tokens=60)
    tokens = expected_tokens(start)
    await answer(streams, start_command(rig.decode.worker_id, prompt_token_ids=range(40), max_tokens=30))
    before = rig.prefill.metrics()

    again = start_command(
        rig.decode.worker_id,
        prompt_token_ids=range(40),
        max_tokens=60,
        output_token_ids=tokens[:25],
        attempt=types_pb2.Attempt(dispatch=2),
    )
    await streams[1].send(resume=resume_command(again, next_index=25))
    await streams[0].send(start=again)
    first, rest = [await stream.receive_all(again.request_id) for stream in streams]

    assert first.tokens == {25: tokens[25]}
    assert rest.tokens == {index: tokens[index] for index in range(25, 60)}
    assert first.last.num_cached_tokens == 64
    after = rig.prefill.metrics()
    assert after["prompt_tokens_computed_total"] == before["prompt_tokens_computed_total"]
    assert after["output_tokens_computed_total"] - before["output_tokens_computed_total"] == 40 + 25 - 64


async def test_the_end_is_sent_once_the_next_turn_would_find_the_pages(rig: Rig, streams: Streams) -> None:
    async def slowly() -> None:
        await asyncio.sleep(0.03)

    rig.arena.before_release = slowly
    start = start_command(rig.decode.worker_id, prompt_token_ids=range(64), max_tokens=33)
    received = await answer(streams, start)
    assert num_found(rig, [*range(64), *received.token_ids]) == 6


async def test_an_arena_that_does_not_answer_delays_no_end_for_long(rig: Rig, streams: Streams) -> None:
    release = asyncio.Event()
    rig.arena.before_release = release.wait
    start = start_command(rig.decode.worker_id, prompt_token_ids=range(64), max_tokens=33)
    await answer(streams, start)
    assert num_found(rig, list(range(64))) == 4  # by the hand-off
    assert not release.is_set()
    release.set()


async def test_the_arena_is_told_where_more_of_a_prompt_is(rig: Rig, streams: Streams) -> None:
    await answer(streams, start_command(rig.decode.worker_id, prefix_source="host-b:7000"))
    await answer(streams, start_command(rig.decode.worker_id))
    assert rig.arena.sources == [PrefixSource("host-b:7000"), None]


async def test_a_whole_cached_prompt_computes_its_last_page(rig: Rig, streams: Streams) -> None:
    for num_cached in (0, 48):
        start = start_command(rig.decode.worker_id, prompt_token_ids=range(64), max_tokens=5)
        assert (await answer(streams, start)).last.num_cached_tokens == num_cached


@pytest.mark.parametrize(
    ("changes", "num_cached"), [({"cache_salt": "a"}, 0), ({"skips_prefix_cache": True}, 0), ({}, 96)]
)
async def test_salts_and_a_request_that_skips_the_cache_keep_prompts_apart(
    rig: Rig, streams: Streams, changes: dict[str, object], num_cached: int
) -> None:
    prompt = list(range(100))
    await answer(streams, start_command(rig.decode.worker_id, prompt_token_ids=prompt, max_tokens=2))
    start = start_command(rig.decode.worker_id, prompt_token_ids=prompt, max_tokens=2, **changes)
    assert (await answer(streams, start)).last.num_cached_tokens == num_cached
    await rig.wait_idle()
    assert num_found(rig, prompt, salt="a") == (6 if "cache_salt" in changes else 0)


async def test_a_long_prompt_serves_others_while_its_rest_is_computed(rig: Rig, streams: Streams) -> None:
    release = threading.Event()

    def hold_second_chunk(plan: StepPlan) -> None:
        if plan.chunks[0].start >= 32:
            hold(release)

    rig.on_run["prefill"] = hold_second_chunk
    start = start_command(rig.decode.worker_id, prompt_token_ids=range(100), max_tokens=2)
    await begin(streams, start)
    await eventually(lambda: num_found(rig, list(range(100))) == 2)
    release.set()
    await streams[1].receive_all(start.request_id)


async def test_a_cancel_ends_a_prompt_whose_match_is_not_answered(rig: Rig, streams: Streams) -> None:
    answered = asyncio.Event()
    rig.arena.before_match = answered.wait
    start = start_command(rig.decode.worker_id)
    await streams[0].send(start=start)
    await eventually(lambda: rig.prefill.metrics()["num_matching"] == 1)
    await streams[0].send(cancel=cancel_command(start))
    update = await streams[0].next_update(start.request_id)
    assert update.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    answered.set()
    await rig.wait_idle()
    assert computed(rig) == 0


async def test_a_drain_ends_a_prompt_whose_match_is_not_answered(rig: Rig, streams: Streams) -> None:
    answered = asyncio.Event()
    rig.arena.before_match = answered.wait
    start = start_command(rig.decode.worker_id)
    await streams[0].send(start=start)
    await eventually(lambda: rig.prefill.metrics()["num_matching"] == 1)
    await rig.prefill.shell.drain(1.2)
    update = await streams[0].next_update(start.request_id)
    assert update.error.reason == worker_pb2.WORKER_ERROR_REASON_DRAINING
    answered.set()


async def test_a_prompt_whose_cancel_finds_the_inbox_full_waits_for_the_next_cancel() -> None:
    client = client_of(num_pages=20)
    arena = client._arena
    posted: list[Command] = []
    refusals = [InboxFull("full")]

    def post(command: Command) -> None:
        if refusals:
            raise refusals.pop()
        posted.append(command)

    arena.before_match = asyncio.Event().wait
    prefixes = Prefixes(client, PageKeeper(client, post, pytest.fail), post, pytest.fail)
    prompt = Arrival(replace(params(tuple(range(40))), prefix_seed=b"seed"))
    cancel = CancelSequence(SequenceKey.of(prompt.params))
    prefixes.post(AddSequence(prompt))
    with pytest.raises(InboxFull):
        prefixes.post(cancel)
    prefixes.post(cancel)
    assert posted == [AddSequence(prompt), cancel], "the engine ends what it has, and nothing else"
    await prefixes.stop()


async def prompt_of_60_tokens(monkeypatch: pytest.MonkeyPatch) -> tuple[Prefixes, SequenceKey, list[PageChain]]:
    """That the engine has, from an arena whose seals are only written down: in the list."""
    client, posted = client_of(num_pages=20), list[Command]()
    sealed: list[PageChain] = []

    async def seal(chain: PageChain) -> None:
        sealed.append(chain)

    monkeypatch.setattr(client, "seal", seal)
    prefixes = Prefixes(client, PageKeeper(client, posted.append, pytest.fail), posted.append, pytest.fail)
    prompt = Arrival(replace(params(tuple(range(60))), prefix_seed=b"seed"))
    prefixes.post(AddSequence(prompt))
    await eventually(lambda: AddSequence(prompt) in posted)
    return prefixes, SequenceKey.of(prompt.params), sealed


async def test_pages_of_a_prompt_are_sealed_chunk_by_chunk_with_the_hashes_of_all_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arena keeps them only while these are kept."""
    prefixes, key, sealed = await prompt_of_60_tokens(monkeypatch)
    hashes = page_hashes(range(60), b"seed")
    first, second = ChunkComputed(key, 0, 20, (5, 6)), ChunkComputed(key, 20, 40, (5, 6, 7, 8))
    prefixes.on_report(EngineReport((first,)))
    prefixes.on_report(EngineReport((second,)))
    await eventually(lambda: len(sealed) == 2)
    assert sealed == [PageChain((5,), hashes[:1]), PageChain((6, 7), hashes[1:], hashes[:1])]
    ended = SequenceEnded(key, FinishReason.CANCELLED)
    prefixes.on_report(EngineReport((ended,)))
    await prefixes.stop()


@pytest.mark.parametrize("ended", [None, SequenceEnded, HandOffReady], ids=["goes on", "ended", "handed off"])
@pytest.mark.parametrize("is_last", [False, True], ids=["before it", "behind it"])
async def test_what_a_report_says_of_a_prompt_counts_in_any_order(
    monkeypatch: pytest.MonkeyPatch, ended: type[SequenceEnded | HandOffReady] | None, is_last: bool
) -> None:
    """The release of what has ended seals its pages, and a hand-off those that go with it."""
    prefixes, key, sealed = await prompt_of_60_tokens(monkeypatch)
    hashes = page_hashes(range(60), b"seed")
    events: list[Event] = [ChunkComputed(key, 0, 60, (5, 6, 7, 8))]
    if ended is SequenceEnded:
        events.append(SequenceEnded(key, FinishReason.CANCELLED))
    elif ended is HandOffReady:
        events.append(HandOffReady(key, 0, (6, 7, 8), first_page=1))
    prefixes.on_report(EngineReport(tuple(events[::-1] if is_last else events)))
    for _ in range(3):
        await asyncio.sleep(0)
    num_sealed = {None: 3, SequenceEnded: 0, HandOffReady: 1}[ended]
    assert sealed == ([PageChain((5, 6, 7)[:num_sealed], hashes[:num_sealed])] if num_sealed else [])
    await prefixes.stop()


@pytest.mark.parametrize(
    ("num_cached", "most_pages", "num_given"),
    [(0, None, 20), (0, 6, 6), (4, 6, 6), (16, 6, 4), (4, None, 16), (4, 30, 16)],
)
async def test_a_prompt_gets_what_it_needs_at_a_time_behind_its_cached_prefix(
    num_cached: int, most_pages: int | None, num_given: int
) -> None:
    client, posted = client_of(num_pages=40), list[Command]()
    hashes = page_hashes(range(320), b"seed")
    cached = await client.acquire(num_cached, 0)
    await client.release((), (), [PageChain(cached.page_ids, hashes[:num_cached])])
    keeper = PageKeeper(client, posted.append, pytest.fail)
    prefixes = Prefixes(client, keeper, posted.append, pytest.fail, most_pages)
    prefixes.post(AddSequence(Arrival(replace(params(tuple(range(320))), prefix_seed=b"seed"))))
    await eventually(lambda: len(posted) == 2)
    given, added = posted
    assert isinstance(given, GivePages)
    assert isinstance(added, AddSequence)
    assert (len(given.bundle.page_ids), len(given.bundle.slots)) == (num_given, 1)
    assert added.arrival.block_table == cached.page_ids
    await prefixes.stop()


async def test_a_prompt_without_a_cache_asks_for_what_it_needs_at_a_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    client, posted = client_of(num_pages=40), list[Command]()
    keeper = PageKeeper(client, posted.append, pytest.fail)
    anticipated: list[tuple[int, int]] = []
    monkeypatch.setattr(keeper, "anticipate", lambda num_pages, num_slots: anticipated.append((num_pages, num_slots)))
    prefixes = Prefixes(client, keeper, posted.append, pytest.fail, most_pages_ahead=6)
    prefixes.post(AddSequence(Arrival(params(tuple(range(320))))))
    assert anticipated == [(6, 1)]
    await prefixes.stop()


async def test_without_the_arenas_answer_a_prompt_is_computed_as_a_whole(rig: Rig, streams: Streams) -> None:
    def fail() -> None:
        raise Unavailable("the transfer service does not answer")

    rig.arena.before_match = fail
    for _ in range(2):
        start = start_command(rig.decode.worker_id, prompt_token_ids=range(64), max_tokens=5)
        assert (await answer(streams, start)).last.num_cached_tokens == 0
    assert rig.prefill.metrics()["match_failures_total"] == 2


async def test_what_was_computed_before_a_failed_step_is_not_kept(rig: Rig, streams: Streams) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.chunks[0].start >= 100:
            raise RuntimeError("broken")

    rig.on_run["decode"] = fail
    start = start_command(rig.decode.worker_id, prompt_token_ids=range(64), max_tokens=80)
    await begin(streams, start)
    received = await streams[1].receive_all(start.request_id)
    assert received.last.error.reason == worker_pb2.WORKER_ERROR_REASON_INTERNAL
    await rig.wait_idle()
    assert num_found(rig, [*range(64), *expected_tokens(start)]) == 4  # the prompt, by the hand-off


async def test_many_turns_at_once_with_cancels_leak_nothing(rig: Rig, streams: Streams) -> None:
    texts: list[Callable[[int], list[int]]] = [
        lambda n: list(range(20 + 13 * n)),
        lambda n: [*range(48), *range(300, 310 + 9 * n)],
        lambda n: [7] * (16 * n + 1),
    ]
    starts = [
        start_command(
            rig.decode.worker_id, prompt_token_ids=texts[index % 3](index % 5), max_tokens=3 + 11 * (index % 4)
        )
        for index in range(14)
    ]
    for index, start in enumerate(starts):
        await begin(streams, start)
        if index % 4 == 3:
            for stream in streams:
                await stream.send(cancel=cancel_command(start))
    await rig.wait_idle()
    # were all read at the same time, none found what another had left
    again = start_command(rig.decode.worker_id, prompt_token_ids=texts[1](1), max_tokens=3)
    await begin(streams, again)
    await streams[1].receive_all(again.request_id)
    await rig.wait_idle()
    assert rig.prefill.metrics()["prompt_tokens_cached_total"] > 0
