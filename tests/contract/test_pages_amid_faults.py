"""Whatever happens to a prefix on its way between two transfer services: what is used of it is what was computed, the
fetch has one end within its time, no page is left at either of them, and the next prefix comes whole.

Their memory, gRPC and TCP are real; relays stand before the port of `Pages` and that of page streams.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tests.chaos.relay import Direction, Relay
from tests.chaos.stream_faults import Fault, FlipBit, Repeat, Reset, Stall, Truncate
from tests.unit.transfer.host import Host, until

from weir.core.addresses import split_port
from weir.core.life import Attempt
from weir.kv.messages import PageChain, PrefixMatch, PrefixSource
from weir.kv.movers.pipes import connect_tcp
from weir.kv.movers.pull import WantedPage
from weir.kv.movers.source import PageSource
from weir.kv.movers.stream_pull import PagePull, PullHello
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.rpc.arena.client import ArenaClient
from weir.rpc.channel import make_channel
from weir.wire.v1 import pages_pb2, pages_pb2_grpc

_NUM_PAGES = 10
_PAGE_BYTES = 4096
_FRAME = 64 + _PAGE_BYTES
_PREFIXES = [page_hashes(range(first, first + 160), prefix_seed("digest")) for first in (0, 1000)]
_RELAY_HOST = "127.0.0.2"
_LIMITS = {
    "weir_transfer.exchange.prefix_fetcher.LONGEST_FETCH_S": 0.8,
    "weir_transfer.exchange.prefix_fetcher.LONGEST_STILL_S": 0.4,
    "weir_transfer.exchange.pages_service.LONGEST_OFFER_S": 1.0,
    "weir_transfer.exchange.page_streams.DEFAULT_IDLE_S": 0.3,
}
"""So that what is only found out by its time is found out soon."""
_TRIES = 3
"""On a machine that is so busy that a fetch takes too long."""
_Port = Literal["pages", "streams"]


@dataclass
class World:
    """A host that has two prefixes, one that wants them, and relays before the ports of the first."""

    there: Host
    source: ArenaClient
    here: Host
    receiver: ArenaClient
    relays: dict[_Port, Relay]
    computed: dict[bytes, int] = field(default_factory=dict)
    """Pages of the source, by what they hold."""

    async def compute(self, hashes: tuple[bytes, ...]) -> None:
        """At the source, where it stays cached."""
        match = await self.source.match(hashes, len(hashes), 1)
        page_ids = match.acquired.page_ids
        for page_id, page_hash in zip(page_ids, hashes, strict=True):
            self.source.segment.pages[page_id] = content_of(page_hash)
            self.computed[page_hash] = page_id
        await self.source.release((), match.acquired.slots, [PageChain(page_ids, hashes)], [match.match_id])

    async def fetch(self, hashes: tuple[bytes, ...] = _PREFIXES[0]) -> int:
        """How many of its pages came; the others were to be computed."""
        source = PrefixSource(self.there.pages_address, "")
        async with asyncio.timeout(20):
            match: PrefixMatch = await self.receiver.match(hashes, _NUM_PAGES + 1, 1, source=source)
        for page_id, page_hash in zip(match.page_ids, hashes, strict=False):
            assert (self.receiver.segment.pages[page_id] == content_of(page_hash)).all(), "it is not what was computed"
        page_ids = (*match.page_ids, *match.acquired.page_ids)
        assert len(page_ids) == _NUM_PAGES + 1
        await self.receiver.release((), match.acquired.slots, [PageChain(page_ids)], [match.match_id])
        return len(match.page_ids)

    async def check_ended(self, num_came: int) -> None:
        """Once, with so many pages, and nothing is reserved or pinned, though the network is as it was."""
        await until(lambda: self.here.metric("remote_pages_reserved") == 0)
        await until(lambda: self.there.metric("remote_pages_pinned") == 0)
        figures = self.here.service.describe().metrics
        assert figures["remote_prefixes_total"] == 1
        if num_came in (0, _NUM_PAGES):  # between, what was asked for may have been damaged: the source has less
            assert figures["remote_prefixes_failed_total"] == (num_came < _NUM_PAGES)
        assert figures["remote_pages_received_total"] == num_came == figures["cached_pages"]
        assert figures["leased_pages"] == figures["prefix_pending"] == 0
        assert figures["free_pages"] + figures["cached_pages"] == figures["total_pages"]
        assert self.there.metric("shared_pages") == self.there.metric("leased_pages") == 0

    async def forget(self) -> None:
        """The receiver has nothing cached any more."""
        acquired = await self.receiver.acquire(int(self.here.metric("total_pages")), 0)
        await self.receiver.release(acquired.page_ids, (), [], [])

    async def check_next_comes(self) -> None:
        """As soon as the network is whole."""
        for relay in self.relays.values():
            relay.restore()
        for _ in range(_TRIES):
            if await self.fetch(_PREFIXES[1]) == _NUM_PAGES:
                return
            await self.forget()
        pytest.fail("the next prefix does not come, though nothing is disturbed any more")


def content_of(page_hash: bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(list(page_hash)).integers(0, 256, _PAGE_BYTES, np.uint8)


@asynccontextmanager
async def _open_world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        hosts = []
        for shown_host in (_RELAY_HOST, "127.0.0.1"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-"))
            hosts.append(Host(Path(folder), exchanges_pages=True, shown_host=shown_host))
            await hosts[-1].start()
            stack.push_async_callback(hosts[-1].close)
        there, here = hosts
        exchange = there.service._exchange
        assert exchange is not None
        ports: dict[_Port, int] = {"pages": split_port(there.pages_address)[1], "streams": exchange.streams.port}
        relays = {
            name: stack.enter_context(Relay("127.0.0.1", port, listen_host=_RELAY_HOST, listen_port=port))
            for name, port in ports.items()
        }
        made = World(there, await there.client("w0"), here, await here.client("w0"), relays)
        for hashes in _PREFIXES:
            await made.compute(hashes)
        yield made


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Of short limits while it is disturbed; afterwards the next prefix must come."""
    with pytest.MonkeyPatch.context() as limits:
        for name, seconds in _LIMITS.items():
            limits.setattr(name, seconds)
        async with _open_world() as made:
            yield made
            limits.undo()
            await made.check_next_comes()


@pytest.fixture
async def patient() -> AsyncIterator[World]:
    """With the limits that are so: for what must come, however slow the machine is."""
    async with _open_world() as made:
        yield made
        await made.check_next_comes()


# Every step of the protocol, in each direction, by the byte that carries it.

_STEPS: dict[str, tuple[_Port, Direction, int]] = {
    "the connection for the offer": ("pages", "to_server", 10),
    "the offer is asked for": ("pages", "to_server", 400),
    "the greeting of the other host": ("pages", "to_client", 12),
    "the offer is answered": ("pages", "to_client", 300),
    "the offer is ended": ("pages", "to_server", 578),
    "hello": ("streams", "to_server", 40),
    "pages are asked for": ("streams", "to_server", 100),
    "a page begins": ("streams", "to_client", 30),
    "a page comes": ("streams", "to_client", 64 + 2000),
    "a page ends": ("streams", "to_client", 4 * _FRAME),
    "the last page": ("streams", "to_client", _NUM_PAGES * _FRAME - 5),
}
_KINDS: dict[str, Callable[[int], Fault]] = {
    "flipped": FlipBit,
    "repeated": lambda at_byte: Repeat(at_byte, num_bytes=7),
    "truncated": Truncate,
    "stalled": Stall,
    "reset": Reset,
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("step", _STEPS)
async def test_bytes_of_a_step_are_damaged(world: World, step: str, kind: str) -> None:
    port, direction, at_byte = _STEPS[step]
    world.relays[port].damage(direction, _KINDS[kind](at_byte))
    await world.check_ended(await world.fetch())


@pytest.mark.parametrize("direction", ["to_server", "to_client", None])
@pytest.mark.parametrize("port", ["pages", "streams"])
@pytest.mark.parametrize("after_pages", [None, 3])
async def test_one_direction_or_both_fall_silent(
    world: World, monkeypatch: pytest.MonkeyPatch, port: _Port, direction: Direction | None, after_pages: int | None
) -> None:
    if after_pages is None:
        world.relays[port].cut(direction)
    else:
        _call_after(monkeypatch, after_pages, lambda: world.relays[port].cut(direction))
    await world.check_ended(await world.fetch())


@pytest.mark.parametrize("port", ["pages", "streams"])
@pytest.mark.parametrize("after_pages", [0, 3, 10])
async def test_the_other_host_refuses_and_resets_all_connections(
    world: World, monkeypatch: pytest.MonkeyPatch, port: _Port, after_pages: int
) -> None:
    _call_after(monkeypatch, after_pages, world.relays[port].refuse)
    await world.check_ended(await world.fetch())


async def test_no_byte_of_a_request_or_an_answer_makes_another_page_of_it(world: World) -> None:
    """Flipped one after the other, where no TLS would find it out. The last bytes of a request say how many first pages
    are there: one."""
    ways: tuple[tuple[Direction, tuple[int, ...]], ...] = (
        ("to_server", (400, 480, *range(520, 530))),
        ("to_client", (170, 290, 410, 530)),
    )
    for way, places in ways:
        for at_byte in places:
            match = await world.receiver.match(_PREFIXES[0][:1], 1, 1)
            [page_id] = match.acquired.page_ids
            world.receiver.segment.pages[page_id] = content_of(_PREFIXES[0][0])
            chain = PageChain((page_id,), _PREFIXES[0][:1])
            await world.receiver.release((), match.acquired.slots, [chain], [match.match_id])
            world.relays["pages"].damage(way, FlipBit(at_byte, bit=at_byte % 2))
            await world.fetch()
            world.relays["pages"].restore()
            await world.forget()


# What the hosts do.


async def test_a_page_is_given_to_somebody_else_while_it_is_pulled(
    patient: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_id = patient.computed[_PREFIXES[0][6]]

    def recycle() -> None:
        patient.source.segment.page_rows["generation"][page_id] += 1
        patient.source.segment.pages[page_id] = 0

    _call_on_want(monkeypatch, recycle)
    num_came = await patient.fetch()
    assert num_came <= 6
    await patient.check_ended(num_came)
    assert patient.there.metric("remote_pages_gone_total") == 1


async def test_a_stream_shows_another_ticket_than_that_of_the_offer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = PageSource.offer
    with monkeypatch.context() as patched:
        patched.setattr(PageSource, "offer", lambda self, name, attempt, _: offer(self, name, attempt, b"x" * 16))
        assert await world.fetch() == 0
        await world.check_ended(0)
    assert world.there.metric("remote_pages_sent_total") == 0


async def test_a_stream_is_of_another_attempt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = PageSource.offer
    with monkeypatch.context() as patched:
        patched.setattr(PageSource, "offer", lambda self, name, _, ticket: offer(self, name, Attempt(7, 0), ticket))
        assert await world.fetch() == 0
        await world.check_ended(0)


async def test_two_hosts_fetch_the_same_pages_at_once(patient: World) -> None:
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:
        other = Host(Path(folder), exchanges_pages=True)
        await other.start()
        twin = replace(patient, here=other, receiver=await other.client("w0"))
        num_came = await asyncio.gather(patient.fetch(), twin.fetch())
        assert max(num_came) == _NUM_PAGES, "no more than a quarter of a memory is pinned for others"
        await patient.check_ended(num_came[0])
        await twin.check_ended(num_came[1])
        await other.close()


async def test_a_host_of_another_model_gets_nothing(patient: World) -> None:
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:
        other = Host(Path(folder), exchanges_pages=True, model_digest="another")
        await other.start()
        stranger = replace(patient, here=other, receiver=await other.client("w0"))
        assert await stranger.fetch() == 0
        await stranger.check_ended(0)
        await other.close()
    assert patient.there.metric("remote_pages_offered_total") == 0
    assert await patient.fetch() == _NUM_PAGES


@pytest.mark.parametrize("does", ["says nothing", "asks and reads nothing", "goes without a word"])
async def test_who_was_made_an_offer_and_does_not_take_it_costs_its_time_alone(world: World, does: str) -> None:
    async with make_channel(world.there.pages_address) as channel:
        stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
        request = pages_pb2.OfferRequest(
            model_digest="digest", page_bytes=_PAGE_BYTES, page_hashes=b"".join(_PREFIXES[0])
        )
        call = stub.Offer(request)
        offered = await anext(aiter(call))
        hello = PullHello(offered.transfer_id, Attempt(), offered.ticket)
        pipe = await asyncio.to_thread(connect_tcp, *split_port(offered.stream_address), 5.0, 5.0)
        await asyncio.to_thread(pipe.send, [hello.frame()])
        if does == "asks and reads nothing":
            await asyncio.to_thread(pipe.send, [hello.ask(list(range(_NUM_PAGES)) * 100)])
        if does == "goes without a word":
            world.relays["pages"].cut("to_server")
            call.cancel()
        assert world.there.metric("remote_pages_pinned") == _NUM_PAGES
        await until(lambda: world.there.metric("remote_pages_pinned") == 0)
        await until(lambda: not [one for one in threading.enumerate() if "_serve" in one.name])
        pipe.close()


@pytest.mark.parametrize("seconds", [-86_400.0, 86_400.0])
async def test_the_clock_of_the_wall_is_set_while_pages_come(
    patient: World, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    now_s, now_ns = time.time, time.time_ns

    def step() -> None:
        monkeypatch.setattr(time, "time", lambda: now_s() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(seconds * 1e9))

    _call_after(monkeypatch, 3, step)
    assert await patient.fetch() == _NUM_PAGES
    await patient.check_ended(_NUM_PAGES)


def _call_on_want(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Between the first offer and the first stream."""
    want, acts = PagePull.want, [act]

    def act_and_want(self: PagePull, pages: list[WantedPage]) -> None:
        if acts:
            acts.pop()()
        want(self, pages)

    monkeypatch.setattr(PagePull, "want", act_and_want)


def _call_after(monkeypatch: pytest.MonkeyPatch, num_pages: int, act: Callable[[], None]) -> None:
    """When so many pages of the first prefix are here, in the thread that took the last of them in."""
    if num_pages == 0:
        _call_on_want(monkeypatch, act)
        return
    take_in, acts = PagePull._take_in, [act]

    def take_in_and_act(self: PagePull, received: object) -> None:
        take_in(self, received)  # type: ignore[arg-type]
        if acts and self.figures.num_pages >= num_pages:
            acts.pop()()

    monkeypatch.setattr(PagePull, "_take_in", take_in_and_act)
