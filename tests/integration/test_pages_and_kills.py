"""kill -9 of either transfer service while pages pass between them, and after: nothing is lost but what was on its way.

There is no NATS: what passes between two hosts does not need it.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.chaos.relay import Relay
from tests.chaos.stream_faults import Stall
from tests.integration.arena_process import MODEL_DIGEST, PAGE_BYTES, TransferProcess, sleeping_process

from weir.core.addresses import split_port
from weir.core.process import ProcessIdentity
from weir.kv.messages import PageChain, PrefixMatch, PrefixSource
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.rpc.arena.client import ArenaAccess, ArenaClient, WorkerIdentity
from weir.rpc.channel import make_channel
from weir.wire.v1 import pages_pb2, pages_pb2_grpc

_NUM_PAGES = 8
"""A quarter of an arena of 34, at most, is reserved for pages of others."""
_HASHES = page_hashes(range(16 * _NUM_PAGES), prefix_seed(MODEL_DIGEST))
_RELAY_HOST = "127.0.0.2"
_TTL_MS = 20_000
_AMID = 5 * (64 + PAGE_BYTES) + 1000
"""Bytes of a page stream: in its sixth page."""


@dataclass
class Side:
    process: TransferProcess
    client: ArenaClient

    async def check_nothing_left(self, num_cached: int) -> None:
        await self.process.wait_for("remote_pages_pinned", 0)
        figures = await self.process.describe()
        assert figures["leased_pages"] == figures["shared_pages"] == figures["remote_pages_reserved"] == 0
        assert figures["cached_pages"] == num_cached
        assert figures["free_pages"] + num_cached == figures["total_pages"]

    async def die_and_come_back(self) -> None:
        self.process.kill()
        await self.process.start()
        await self.process.wait_for("leases", 1)


@pytest.fixture
def worker() -> Iterator[ProcessIdentity]:
    """Stands for all workers of a test."""
    with sleeping_process() as (sleeper, identity):
        yield identity
        assert sleeper.poll() is None, "nobody had a reason to kill it"


@pytest.fixture
async def sides(worker: ProcessIdentity) -> AsyncIterator[tuple[Side, Side]]:
    """Who has a prefix, and who lacks it."""
    async with AsyncExitStack() as stack:
        processes = []
        for advertise_host in (_RELAY_HOST, "127.0.0.1"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-"))
            flags = {"pages-listen": "127.0.0.1:0", "advertise-host": advertise_host}
            processes.append(TransferProcess(Path(folder), _TTL_MS, flags))
            stack.callback(processes[-1].close)
        await asyncio.gather(*(process.start() for process in processes))
        made = []
        for process in processes:
            identity = WorkerIdentity("w0", "decode", PAGE_BYTES, MODEL_DIGEST)
            client = ArenaClient(process.socket_path, identity, print, ArenaAccess(identity=worker))
            await client.start()
            stack.push_async_callback(client.close)
            made.append(Side(process, client))
        await _compute(made[0].client)
        yield made[0], made[1]


@contextmanager
def _relayed(pages_address: str, stream_address: str) -> Iterator[Relay]:
    """Before both ports of who has it; that of page streams."""
    with ExitStack() as stack:
        relays = [
            stack.enter_context(Relay("127.0.0.1", port, listen_host=_RELAY_HOST, listen_port=port))
            for port in (split_port(pages_address)[1], split_port(stream_address)[1])
        ]
        yield relays[1]


async def _stream_address(pages_address: str) -> str:
    async with make_channel(f"127.0.0.1:{split_port(pages_address)[1]}") as channel:
        stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
        request = pages_pb2.OfferRequest(model_digest=MODEL_DIGEST, page_bytes=PAGE_BYTES, page_hashes=_HASHES[0])
        call = stub.Offer(request, timeout=10)
        offered = await anext(aiter(call))
        call.cancel()
    assert isinstance(offered, pages_pb2.OfferResponse)
    return offered.stream_address


def _content() -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(7).integers(0, 256, (_NUM_PAGES, PAGE_BYTES), np.uint8)


async def _compute(client: ArenaClient) -> None:
    match = await client.match(_HASHES, _NUM_PAGES, 1)
    client.segment.pages[list(match.acquired.page_ids)] = _content()
    chain = PageChain(match.acquired.page_ids, _HASHES)
    await client.release((), match.acquired.slots, [chain], [match.match_id])


async def _fetch(client: ArenaClient, pages_address: str) -> PrefixMatch:
    return await client.match(_HASHES, _NUM_PAGES + 1, 1, source=PrefixSource(pages_address, ""))


async def _use(client: ArenaClient, match: PrefixMatch) -> int:
    """How many pages came; those that did are as they were computed."""
    num_came = len(match.page_ids)
    assert (client.segment.pages[list(match.page_ids)] == _content()[:num_came]).all()
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    assert len(page_ids) == _NUM_PAGES + 1
    await client.release((), match.acquired.slots, [PageChain(page_ids)], [match.match_id])
    return num_came


async def test_who_has_the_pages_is_killed_while_they_are_pulled(sides: tuple[Side, Side]) -> None:
    """What had come is used, the rest computed; when it is back it has all that it had."""
    there, here = sides
    address = there.client.pages_address
    with _relayed(address, await _stream_address(address)) as relay:
        relay.damage("to_client", Stall(_AMID))
        fetching = asyncio.create_task(_fetch(here.client, address))
        await here.process.wait_for("remote_pages_reserved", _NUM_PAGES)
        await there.process.wait_for("remote_pages_sent_total", _NUM_PAGES)
        await there.die_and_come_back()
        num_came = await _use(here.client, await fetching)
    assert 0 < num_came < _NUM_PAGES
    await here.check_nothing_left(num_cached=num_came)
    await there.check_nothing_left(num_cached=_NUM_PAGES)
    figures = await here.process.describe()
    assert (figures["remote_prefixes_total"], figures["remote_prefixes_failed_total"]) == (1, 1)


async def test_who_pulls_is_killed_while_pages_come_and_pulls_them_anew(sides: tuple[Side, Side]) -> None:
    there, here = sides
    address = there.client.pages_address
    with _relayed(address, await _stream_address(address)) as relay:
        relay.damage("to_client", Stall(_AMID))
        fetching = asyncio.create_task(_fetch(here.client, address))
        await there.process.wait_for("remote_pages_sent_total", _NUM_PAGES)
        here.process.kill()
        await there.check_nothing_left(num_cached=_NUM_PAGES)
        relay.restore()
        await here.process.start()
        assert await _use(here.client, await fetching) == _NUM_PAGES
    await here.check_nothing_left(num_cached=_NUM_PAGES)
    await there.check_nothing_left(num_cached=_NUM_PAGES)


async def test_either_is_killed_when_the_pages_are_there(sides: tuple[Side, Side]) -> None:
    there, here = sides
    address = there.client.pages_address
    with _relayed(address, await _stream_address(address)):
        match = await _fetch(here.client, address)
        await asyncio.gather(there.die_and_come_back(), here.die_and_come_back())
    assert await _use(here.client, match) == _NUM_PAGES, "a worker that uses them does not notice"
    for side in sides:
        await side.check_nothing_left(num_cached=_NUM_PAGES)
    assert await _use(here.client, await here.client.match(_HASHES, _NUM_PAGES + 1, 1)) == _NUM_PAGES
