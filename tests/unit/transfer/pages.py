"""Prompts of pretended workers: pages that they compute, and find again as they were computed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.unit.transfer.host import memory_of

from weir.kv.memory.page_access import PagePlace
from weir.kv.messages import PageChain, PrefixMatch, PrefixSource
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.kv.tiers.file_store import PageFileStore
from weir.rpc.arena.client import ArenaClient

HASHES = page_hashes(range(320), prefix_seed("digest"))


def content(number: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.random.default_rng(number).integers(0, 256, 4096, np.uint8)


async def compute(client: ArenaClient, num_pages: int = 10) -> None:
    match = await client.match(HASHES[:num_pages], num_pages + 1, 1)
    for number, page_id in enumerate((*match.page_ids, *match.acquired.page_ids)):
        if number >= len(match.page_ids):
            memory_of(client)[page_id] = content(number)
    await give_back(client, match, num_pages)


async def find(client: ArenaClient, num_pages: int = 10, source: PrefixSource | None = None) -> PrefixMatch:
    """As many pages as are cached by now, each as it was computed."""
    match = await client.match(HASHES[:num_pages], num_pages + 1, 1, source=source)
    for number, page_id in enumerate(match.page_ids):
        assert (memory_of(client)[page_id] == content(number)).all()
    return match


async def give_back(client: ArenaClient, match: PrefixMatch, num_computed: int = 0) -> None:
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    await client.release((), match.acquired.slots, [PageChain(page_ids, HASHES[:num_computed])], [match.match_id])


async def num_found(client: ArenaClient, num_pages: int = 10) -> int:
    match = await find(client, num_pages)
    await give_back(client, match)
    return len(match.page_ids)


@contextmanager
def stuck_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """As of a file system that does not answer, until the event."""
    answers, get = threading.Event(), PageFileStore.try_get

    def wait_and_get(self: PageFileStore, page_hash: bytes, place: PagePlace) -> bool:
        answers.wait()
        return get(self, page_hash, place)

    monkeypatch.setattr(PageFileStore, "try_get", wait_and_get)
    try:
        yield answers
    finally:
        answers.set()
