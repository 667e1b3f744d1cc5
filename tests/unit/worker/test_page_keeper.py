"""The page keeper between the engine's pool and the arena."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tests.unit.worker.in_memory_arena import InMemoryArena, InMemoryArenaClient

from weir.core.errors import Overloaded, Unavailable
from weir.engine.messages import Command, EngineReport, GivePages, PageBundle, PagesWanted, SetArenaSilent
from weir.kv.geometry import ArenaGeometry
from weir.kv.messages import Acquired, PageChain
from weir.worker.arena.page_keeper import PageKeeper

WORKER = "decode-0-00000000"


class Bench:
    """A keeper, its arena, and what it gave to the engine."""

    def __init__(self) -> None:
        self.arena = InMemoryArena(ArenaGeometry(64, num_pages=20, num_slots=4, max_context_tokens=64))
        self.client = InMemoryArenaClient(self.arena, WORKER, lambda handed_off: None)
        self.posted: list[Command] = []
        self.failures: list[str] = []
        self.keeper = PageKeeper(self.client, self.posted.append, self.failures.append)

    @property
    def given(self) -> list[PageBundle]:
        return [command.bundle for command in self.posted if isinstance(command, GivePages)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    made.keeper.start()
    yield made
    await made.keeper.stop()


def wanted(num_pages: int, least_pages: int = 1) -> PagesWanted:
    return PagesWanted(num_pages, 0, least_pages, 0)


async def settle() -> None:
    """Until all that waits for no time has happened."""
    for _ in range(50):
        await asyncio.sleep(0)


async def eventually_posted(bench: Bench, *commands: Command) -> None:
    async with asyncio.timeout(10):
        while len(bench.posted) < len(commands):  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0.01)
    assert bench.posted == list(commands)


async def test_demand_that_does_not_count_the_last_pages_yet_is_not_acquired_again(bench: Bench) -> None:
    bench.keeper.on_report(EngineReport(wanted=wanted(4)))
    await settle()
    bench.keeper.on_report(EngineReport(wanted=wanted(4), num_gives=0))
    await settle()
    assert [len(pages.page_ids) for pages in bench.given] == [4]
    bench.keeper.on_report(EngineReport(wanted=wanted(3), num_gives=1))
    await settle()
    assert [len(pages.page_ids) for pages in bench.given] == [4, 3]


async def test_of_a_full_arena_it_takes_the_least_that_helps(bench: Bench) -> None:
    bench.arena.acquire("another", 15, 0)
    bench.keeper.on_report(EngineReport(wanted=wanted(8, least_pages=2)))
    await settle()
    assert [len(pages.page_ids) for pages in bench.given] == [2]
    assert bench.keeper.metrics()["arena_refusals_total"] == 1


async def test_it_tries_again_until_others_have_given_back(bench: Bench) -> None:
    held = bench.arena.acquire("another", 20, 0)
    bench.keeper.on_report(EngineReport(wanted=wanted(8)))
    await settle()
    assert bench.given == []
    bench.arena.release("another", [PageChain(held.page_ids)], ())
    async with asyncio.timeout(10):
        while not bench.given:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0.01)


async def test_it_stops_trying_when_nothing_is_wanted_any_more(bench: Bench) -> None:
    bench.arena.acquire("another", 20, 0)
    bench.keeper.on_report(EngineReport(wanted=wanted(8)))
    await settle()
    bench.keeper.on_report(EngineReport())
    await asyncio.sleep(0.3)
    refusals = bench.keeper.metrics()["arena_refusals_total"]
    await asyncio.sleep(0.3)
    assert bench.keeper.metrics()["arena_refusals_total"] == refusals
    assert bench.given == []


async def test_an_arena_that_does_not_answer_is_asked_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Unavailable | Acquired] = [Unavailable("no answer"), Acquired((1, 2), ())]

    async def acquire(num_pages: int, num_slots: int) -> Acquired:
        answer = answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    monkeypatch.setattr(bench.client, "acquire", acquire)
    bench.keeper.on_report(EngineReport(wanted=wanted(2)))
    await eventually_posted(bench, GivePages(PageBundle((1, 2))))


async def test_the_engine_learns_when_the_arena_leaves_it_without_an_answer_and_when_it_is_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back, has_room = asyncio.Event(), asyncio.Event()

    async def acquire(num_pages: int, num_slots: int) -> Acquired:
        """Away, then full: a refusal is an answer."""
        await is_back.wait()
        if not has_room.is_set():
            raise Overloaded("full")
        return Acquired((1, 2), ())

    monkeypatch.setattr(bench.client, "acquire", acquire)
    began_s = time.monotonic()
    bench.keeper.on_report(EngineReport(wanted=wanted(2)))
    await eventually_posted(bench, SetArenaSilent(True))
    assert time.monotonic() - began_s > 0.4, "not for a moment without an answer"
    is_back.set()
    await eventually_posted(bench, SetArenaSilent(True), SetArenaSilent(False))
    has_room.set()
    await eventually_posted(bench, SetArenaSilent(True), SetArenaSilent(False), GivePages(PageBundle((1, 2))))
    assert bench.keeper.metrics()["arena_silences_total"] == 1


async def test_the_engine_is_not_left_believing_in_a_silence_that_nobody_waits_in(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = asyncio.Event()

    async def acquire(num_pages: int, num_slots: int) -> Acquired:
        await is_over.wait()
        raise Unavailable("no answer")

    monkeypatch.setattr(bench.client, "acquire", acquire)
    bench.keeper.on_report(EngineReport(wanted=wanted(2)))
    await eventually_posted(bench, SetArenaSilent(True))
    bench.keeper.on_report(EngineReport())
    is_over.set()
    await eventually_posted(bench, SetArenaSilent(True), SetArenaSilent(False))


async def test_surplus_goes_back_and_what_was_never_owned_is_a_failure(bench: Bench) -> None:
    held = bench.arena.acquire(WORKER, 6, 1)
    bench.keeper.on_report(EngineReport(surplus=PageBundle(held.page_ids, held.slots)))
    await settle()
    assert bench.arena.num_free_pages == 20
    assert bench.failures == []
    bench.keeper.give_back(PageBundle((19,)))
    await settle()
    assert "release pages failed" in bench.failures[0]


async def test_what_is_anticipated_is_acquired_once_and_not_insisted_on(bench: Bench) -> None:
    bench.keeper.anticipate(3, 1)
    bench.keeper.anticipate(4, 1)
    await settle()
    assert [(len(pages.page_ids), len(pages.slots)) for pages in bench.given] == [(7, 2)]
    bench.keeper.anticipate(14, 1)
    await asyncio.sleep(0.2)
    assert len(bench.given) == 1
    assert bench.keeper.metrics()["arena_refusals_total"] == 1


async def test_what_the_engine_wants_includes_what_was_anticipated(bench: Bench) -> None:
    bench.keeper.anticipate(3, 1)
    bench.keeper.on_report(EngineReport(wanted=wanted(5)))
    await settle()
    assert [len(pages.page_ids) for pages in bench.given] == [5]
