"""kill -9 of either transfer service while one reads pages from the memory of the other: what was being read is
computed, and neither has a page less. Both have their pages in what stands for the memory of a device of one machine.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.integration.arena_process import MODEL_DIGEST, TransferProcess, sleeping_process
from tests.integration.test_pages_and_kills import Side

from weir.core.process import ProcessIdentity
from weir.kv.memory.device import HostMemory
from weir.kv.messages import PageChain, PrefixMatch, PrefixSource
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.rpc.arena.client import ArenaAccess, ArenaClient, WorkerIdentity

_PAGE_BYTES = 8 << 20
"""So large that a copy takes a while."""
_NUM_PAGES = 9
_HASHES = page_hashes(range(16 * _NUM_PAGES), prefix_seed(MODEL_DIGEST))
_TRIES = 5
"""A test on a busy machine can be late, and find all of it copied."""


@pytest.fixture
def worker() -> Iterator[ProcessIdentity]:
    """Stands for all workers of a test."""
    with sleeping_process() as (sleeper, identity):
        yield identity
        assert sleeper.poll() is None, "nobody had a reason to kill it"


@pytest.fixture
async def sides(worker: ProcessIdentity) -> AsyncIterator[tuple[Side, Side]]:
    """Who has a prefix, and who lacks it."""
    flags = {
        "device": "interpreter",
        "pages-listen": "127.0.0.1:0",
        "advertise-host": "127.0.0.1",
        "page-bytes": str(_PAGE_BYTES),
        "arena-bytes": str(40 * _PAGE_BYTES),
    }
    async with AsyncExitStack() as stack:
        processes = []
        for _ in range(2):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-"))
            processes.append(TransferProcess(Path(folder), 20_000, flags))
            stack.callback(processes[-1].close)
        await asyncio.gather(*(process.start() for process in processes))
        made = []
        for process in processes:
            identity = WorkerIdentity("w0", "decode", _PAGE_BYTES, MODEL_DIGEST)
            client = ArenaClient(process.socket_path, identity, print, ArenaAccess(HostMemory.open, identity=worker))
            await client.start()
            stack.push_async_callback(client.close)
            made.append(Side(process, client))
        await _compute(made[0].client)
        yield made[0], made[1]


def _pages(client: ArenaClient) -> NDArray[np.uint8]:
    memory = client.memory.pages
    if memory is None:
        return client.segment.pages
    assert isinstance(memory, HostMemory)
    num_pages = client.segment.geometry.num_pages
    return np.frombuffer(memory.buffer, np.uint8, num_pages * _PAGE_BYTES).reshape(num_pages, _PAGE_BYTES)


def _content() -> NDArray[np.uint8]:
    """No byte is 0, as all of a new arena are."""
    return np.random.default_rng(7).integers(1, 256, (_NUM_PAGES, _PAGE_BYTES), np.uint8)


async def _compute(client: ArenaClient) -> None:
    match = await client.match(_HASHES, _NUM_PAGES, 1)
    _pages(client)[list(match.acquired.page_ids)] = _content()
    chain = PageChain(match.acquired.page_ids, _HASHES)
    await client.release((), match.acquired.slots, [chain], [match.match_id])


async def _fetch(here: Side, there: Side) -> PrefixMatch:
    source = PrefixSource(there.client.pages_address, "")
    return await here.client.match(_HASHES, _NUM_PAGES + 1, 1, source=source)


async def _use(client: ArenaClient, match: PrefixMatch) -> int:
    """How many pages came; those that did are as they were computed."""
    num_came = len(match.page_ids)
    assert (_pages(client)[list(match.page_ids)] == _content()[:num_came]).all()
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    assert len(page_ids) == _NUM_PAGES + 1
    await client.release((), match.acquired.slots, [PageChain(page_ids)], [match.match_id])
    return num_came


def _stop_amid(side: Side) -> bool:
    """Stops its transfer service once it has begun to copy. False: all of it was copied by then."""
    pages, ends_at_s = _pages(side.client), time.monotonic() + 20
    while not pages[:, 0].any():
        assert time.monotonic() < ends_at_s, "nothing is copied"
    os.kill(side.process.pid, signal.SIGSTOP)
    return int(np.count_nonzero(pages[:, -1])) < _NUM_PAGES


async def _begin_and_stop_amid(here: Side, there: Side) -> "asyncio.Task[PrefixMatch]":
    for _ in range(_TRIES):
        fetching = asyncio.create_task(_fetch(here, there))
        if await asyncio.to_thread(_stop_amid, here):
            return fetching
        os.kill(here.process.pid, signal.SIGCONT)
        await _use(here.client, await fetching)
        acquired = await here.client.acquire(40, 0)  # what is cached there is forgotten
        _pages(here.client)[:] = 0
        await here.client.release(acquired.page_ids, (), [], [])
    pytest.skip(f"the machine is so busy that {_TRIES} times all was copied before it could be stopped")


async def test_pages_are_read_and_not_sent(sides: tuple[Side, Side]) -> None:
    there, here = sides
    assert await _use(here.client, await _fetch(here, there)) == _NUM_PAGES
    figures = await here.process.describe()
    assert figures["remote_pages_direct_total"] == _NUM_PAGES
    assert (await there.process.describe())["remote_pages_sent_total"] == 0
    await here.check_nothing_left(num_cached=_NUM_PAGES)
    await there.check_nothing_left(num_cached=_NUM_PAGES)


async def test_who_has_the_pages_is_killed_while_they_are_copied(sides: tuple[Side, Side]) -> None:
    """Nobody says that they were pinned all along: they are computed, and the next ones come."""
    there, here = sides
    fetching, address = await _begin_and_stop_amid(here, there), there.client.pages_address
    await there.die_and_come_back()
    os.kill(here.process.pid, signal.SIGCONT)
    assert await _use(here.client, await fetching) == 0
    await here.check_nothing_left(num_cached=0)
    await there.check_nothing_left(num_cached=_NUM_PAGES)
    async with asyncio.timeout(15):
        while there.client.pages_address == address:  # noqa: ASYNC110 - until it is attached to the new one
            await asyncio.sleep(0.02)
    assert await _use(here.client, await _fetch(here, there)) == _NUM_PAGES


async def test_who_copies_is_killed_amid_it_and_copies_them_anew(sides: tuple[Side, Side]) -> None:
    there, here = sides
    fetching = await _begin_and_stop_amid(here, there)
    here.process.kill()
    await there.check_nothing_left(num_cached=_NUM_PAGES)
    await here.process.start()
    assert await _use(here.client, await fetching) == _NUM_PAGES
    await here.check_nothing_left(num_cached=_NUM_PAGES)
    await there.check_nothing_left(num_cached=_NUM_PAGES)
