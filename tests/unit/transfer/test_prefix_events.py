"""What the arena caches, as the scheduler comes to know it over the bus."""

import asyncio
from collections.abc import Sequence

import numpy as np
from opentelemetry.sdk.trace import TracerProvider
from tests.unit.transfer.host import until

from weir.bus.endpoint import BusEndpoint
from weir.bus.in_memory import InMemoryHub
from weir.bus.prefix_news import AskPrefixes, PrefixChanged, PrefixFetched, PrefixSnapshot
from weir.bus.protocol import Bus, BusUnavailable
from weir.bus.subjects import Subjects
from weir.core.clock import Clock, ManualClock, SystemClock
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.layout import NO_LEASE, PAGE_DTYPE, PageState
from weir.kv.prefixes import PrefixIndex, page_hashes, prefix_seed
from weir.scheduling.prefix_view import PrefixView, hashes_from
from weir_transfer.prefix_events import PrefixEventPublisher

SUBJECTS = Subjects("test")
TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("test")
PROMPT = page_hashes(tuple(range(10 * PAGE_TOKENS)), prefix_seed("digest"))
PACKED = b"".join(page_hash[:8] for page_hash in PROMPT)


class Listener:
    """The scheduler's side: a view, fed from the bus."""

    def __init__(self, bus: Bus) -> None:
        self.view = PrefixView()
        self.num_heard = 0
        self.fetched: list[PrefixFetched] = []
        self.endpoint = BusEndpoint(bus, TRACER)

    async def start(self) -> None:
        await self.endpoint.serve(SUBJECTS.prefixes, PrefixChanged, self._on_change)

    async def ask_for_unknown(self) -> None:
        for arena_id in self.view.take_unknown(1e9):
            subject = SUBJECTS.prefixes_of(arena_id)
            snapshot = await self.endpoint.ask(subject, AskPrefixes(arena_id), PrefixSnapshot, timeout_s=1.0)
            self.view.replace(snapshot, 0.0)

    def num_cached_pages(self) -> int:
        return self.view.look_up(hashes_from(PACKED)).num_tokens("arena") // PAGE_TOKENS

    async def _on_change(self, message: PrefixChanged) -> None:
        self.num_heard += 1
        self.fetched += message.fetched
        self.view.change(message, 0.0)


class _RewindableClock(ManualClock):
    def rewind(self, seconds: float) -> None:
        self._now_s -= seconds


class Arena:
    """An index of ten pages, and its events."""

    def __init__(self, hub: InMemoryHub, clock: Clock | None = None) -> None:
        self.hub = hub
        self.index = PrefixIndex(np.zeros(10, PAGE_DTYPE))
        self.is_reachable = True
        self.events = PrefixEventPublisher(
            self.connect, SUBJECTS, "arena", 1, self.index, TRACER, clock or SystemClock()
        )

    async def connect(self) -> Bus:
        if not self.is_reachable:
            raise BusUnavailable("no server")
        return self.hub.connect()

    def seal(self, pages: Sequence[int]) -> None:
        self.index.seal(NO_LEASE, np.array(pages), [PROMPT[page] for page in pages])
        self.index.touch(PROMPT)

    def evict(self, num_pages: int) -> None:
        evicted = self.index.try_evict(num_pages)
        assert evicted is not None
        self.index._rows["state"][evicted] = PageState.FREE


async def test_the_scheduler_learns_what_is_sealed_and_what_is_evicted() -> None:
    hub = InMemoryHub()
    listener, arena = Listener(hub.connect()), Arena(hub)
    await listener.start()
    arena.seal([0, 1])
    arena.events.start()
    await until(lambda: listener.num_cached_pages() == 2)
    arena.seal([2, 3, 4])
    await until(lambda: listener.num_cached_pages() == 5)
    arena.evict(2)
    await until(lambda: listener.num_cached_pages() == 3)
    assert listener.view.metrics()["prefix_gaps_total"] == 0
    await arena.events.stop()


async def test_a_scheduler_that_comes_later_asks_for_the_whole() -> None:
    hub = InMemoryHub()
    arena = Arena(hub)
    arena.events.start()
    arena.seal(range(7))
    await until(lambda: arena.events.metrics()["prefix_events_total"] >= 2)
    listener = Listener(hub.connect())
    await listener.start()
    await until(lambda: listener.num_heard >= 1)
    assert listener.num_cached_pages() == 0
    await listener.ask_for_unknown()
    assert listener.num_cached_pages() == 7
    arena.seal([7])
    await until(lambda: listener.num_cached_pages() == 8)
    await arena.events.stop()


async def test_more_changes_than_are_kept_are_a_gap_that_the_whole_fills() -> None:
    hub = InMemoryHub()
    listener, arena = Listener(hub.connect()), Arena(hub)
    await listener.start()
    arena.events.start()
    await until(lambda: listener.num_heard >= 1)
    arena.seal(range(6))
    arena.index.changes.forget()
    await until(lambda: listener.view.metrics()["prefix_gaps_total"] == 1)
    await listener.ask_for_unknown()
    assert listener.num_cached_pages() == 6
    await arena.events.stop()


async def test_fetches_are_told_with_what_is_cached_each_once() -> None:
    hub = InMemoryHub()
    listener, arena = Listener(hub.connect()), Arena(hub)
    await listener.start()
    fetched = [PrefixFetched("b:7000", 4096, 0.5, 0.01)]
    arena.events.tell_of_fetches(lambda: (fetched.pop(),) if fetched else ())
    arena.seal([0])
    arena.events.start()
    await until(lambda: listener.num_cached_pages() == 1)
    arena.seal([1, 2])
    await until(lambda: listener.num_cached_pages() == 3)
    assert listener.fetched == [PrefixFetched("b:7000", 4096, 0.5, 0.01)]
    await arena.events.stop()


async def test_without_a_bus_the_arena_goes_on_and_stops_in_time() -> None:
    arena = Arena(InMemoryHub())
    arena.is_reachable = False
    arena.events.start()
    await until(lambda: arena.events.metrics()["prefix_events_failures_total"] == 1)
    arena.seal([0])
    async with asyncio.timeout(10):
        await arena.events.stop()


async def test_a_change_is_published_though_nothing_else_has_to_be_said_for_long() -> None:
    hub, clock = InMemoryHub(), _RewindableClock(10_000.0)
    listener, arena = Listener(hub.connect()), Arena(hub, clock)
    await listener.start()
    arena.seal([0])
    arena.events.start()
    await until(lambda: listener.num_cached_pages() == 1)
    clock.rewind(9_000.0)  # the next word of an index that rests is 9,001 s away
    arena.seal([1, 2])
    await until(lambda: listener.num_cached_pages() == 3)
    await arena.events.stop()


def test_whoever_listens_to_an_index_hears_of_each_change_and_of_nothing_else() -> None:
    arena, heard = Arena(InMemoryHub()), []
    arena.index.changes.listen(lambda: heard.append(len(heard)))
    arena.seal(range(3))
    assert len(heard) == 1
    arena.index.find_prefix(PROMPT)
    arena.index.changes.take()
    assert len(heard) == 1
    arena.evict(2)
    arena.index.changes.forget()
    assert len(heard) == 3
