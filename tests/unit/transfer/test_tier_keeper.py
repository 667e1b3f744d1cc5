"""Pages of an arena that come to files and back: as they were, once, whoever goes meanwhile, and at nobody's cost."""

import asyncio
import errno
import resource
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.transfer.host import Host, memory_of, until
from tests.unit.transfer.pages import HASHES, compute, content, find, give_back, num_found, stuck_reads

from weir.kv.memory.page_access import PageAccess, PagePlace
from weir.kv.messages import PrefixSource
from weir.kv.tiers import file_store
from weir.kv.tiers.file_store import PageFileStore
from weir.kv.tiers.page_header import PageLayout
from weir.rpc.arena.client import ArenaClient
from weir.testing.stack import wait_until
from weir_transfer import tier_keeper
from weir_transfer.page_tier import LoadRates
from weir_transfer.tier_keeper import KeeperSettings, PageTier, TierKeeper

TRACE = 0xABC


class World:
    """Hosts one after the other, or beside one another, over one folder of files; each arena is empty at first."""

    def __init__(self, folder: Path, closing: AsyncExitStack, *, on_device: bool) -> None:
        self._folder, self._closing, self._on_device = folder, closing, on_device
        self._num_hosts = 0

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in (self._folder / "files").rglob("*") if path.is_file())

    def file_of(self, number: int) -> Path:
        [path] = [path for path in self.files if path.name == HASHES[number].hex()]
        return path

    async def host(
        self, *, min_uses: int = 1, exchanges_pages: bool = False, num_pages: int = 40
    ) -> tuple[Host, ArenaClient]:
        self._num_hosts += 1
        folder = self._folder / str(self._num_hosts)
        folder.mkdir()
        files = self._folder / "files"

        def open_files(layout: PageLayout, pages: PageAccess) -> list[PageTier]:
            return [PageTier("files", PageFileStore(files, layout, 1 << 20), KeeperSettings(1 << 30, min_uses))]

        host = Host(
            folder,
            tiers=open_files,
            exchanges_pages=exchanges_pages,
            num_pages=num_pages,
            on_device=self._on_device,
        )
        await host.start()
        self._closing.push_async_callback(_close, host)
        return host, await host.client("w0")


async def _close(host: Host) -> None:
    await host.close()
    assert host.shutdown_reasons == []


@pytest.fixture(params=["pages in the segment", "pages on a device"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as closing:
        yield World(tmp_path, closing, on_device=request.param == "pages on a device")


async def written(world: World, num_pages: int = 10) -> None:
    """That many pages are in files, and the host that wrote them is gone with its arena."""
    host, client = await world.host()
    await compute(client, num_pages)
    await until(lambda: host.metric("page_files_written_pages_total") == num_pages)
    assert host.metric("page_files_unwritten_pages") == 0


async def test_pages_are_there_after_their_arena_is_gone(world: World) -> None:
    await written(world)
    host, client = await world.host()
    assert host.metric("page_files_known_pages") == 10
    match = await find(client, source=PrefixSource("", f"00-{TRACE:032x}-{1:016x}-01"))
    assert len(match.page_ids) == 10
    await give_back(client, match)
    [span] = [span for span in host.spans.get_finished_spans() if span.name == "load_prefix"]
    assert span.context.trace_id == TRACE
    assert dict(span.attributes or {}) == {
        "weir.tier": "files",
        "weir.num_pages_in_tier": 10,
        "weir.num_cached_pages": 10,
    }
    assert host.metric("page_files_loaded_pages_total") == 10
    assert host.metric("page_files_loaded_bytes_total") == 10 * 4096
    assert await num_found(client) == 10
    assert host.metric("page_files_loads_total") == 1, "what is here is not read again"
    assert host.metric("page_files_written_pages_total") == 0


async def test_pages_that_made_room_come_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # A pretended worker computes faster than a busy machine reads.
    monkeypatch.setattr(LoadRates, "longest_s", lambda self, num_pages: None)
    host, client = await world.host()
    await compute(client)
    await until(lambda: host.metric("page_files_unwritten_pages") == 0 and len(world.files) == 10)
    acquired = await client.acquire(40, 0)
    assert host.metric("cached_pages") == 0
    await client.release(acquired.page_ids, ())
    assert await num_found(client) == 10


async def test_a_service_that_ends_writes_what_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: TierKeeper) -> None:
        await self._is_ending.wait()

    monkeypatch.setattr(TierKeeper, "_keep_writing", never)
    host, client = await world.host()
    await compute(client)
    assert world.files == []
    await host.close()
    world._closing.pop_all()
    assert len(world.files) == 10


async def test_a_service_that_ends_does_not_wait_for_a_slow_disk(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, client = await world.host()
    files, put, has_begun = host.service._keepers[0], PageFileStore.try_put, threading.Event()

    def put_slowly(self: PageFileStore, page_hash: bytes, page: bytes) -> bool:
        has_begun.set()
        wait_until(files._is_ending.is_set, timeout_s=30, what="the service ends")
        files._ends_at_s = 0.0
        return put(self, page_hash, page)

    monkeypatch.setattr(PageFileStore, "try_put", put_slowly)
    await compute(client)
    await until(has_begun.is_set)
    await host.close()
    world._closing.pop_all()
    assert len(world.files) == 1, "the one that was being written"
    assert "9 pages are not in files" in caplog.text


async def test_a_service_that_ends_while_it_looks_still_writes_what_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_keeper, "_REFRESH_S", 0.05)
    host, client = await world.host()
    files, has_begun = host.service._keepers[0], threading.Event()

    def look_long(self: PageFileStore) -> None:
        has_begun.set()
        wait_until(files._is_ending.is_set, timeout_s=30, what="the service ends")
        files._ends_at_s = 0.0  # it took longer than there is for the last writes

    monkeypatch.setattr(PageFileStore, "refresh", look_long)
    await until(has_begun.is_set)
    await compute(client)
    await host.close()
    world._closing.pop_all()
    assert len(world.files) == 10


async def test_what_was_read_takes_no_room_of_other_loads_while_the_writer_is_busy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_keeper, "_MAX_LOADS", 1)
    monkeypatch.setattr(LoadRates, "is_worth", True)
    monkeypatch.setattr(LoadRates, "longest_s", lambda self, num_pages: None)
    await written(world)
    host, client = await world.host()
    goes_on = threading.Event()
    host.service._keepers[0]._writer.submit(goes_on.wait, 60)
    try:
        assert await num_found(client) == 10
        await client.release((await client.acquire(40, 0)).page_ids, ())
        assert await num_found(client) == 10
        assert host.metric("page_files_loads_total") == 2
    finally:
        goes_on.set()


async def test_only_what_is_missing_is_read(world: World) -> None:
    await written(world)
    host, client = await world.host()
    await compute(client, num_pages=3)
    assert await num_found(client) == 10
    assert host.metric("page_files_loaded_pages_total") == 7


async def test_few_pages_are_computed(world: World) -> None:
    await written(world)
    host, client = await world.host()
    assert await num_found(client, num_pages=3) == 0
    assert host.metric("page_files_loads_total") == 0


async def test_many_that_want_it_at_once_read_it_once(world: World) -> None:
    await written(world)
    host, client = await world.host()
    clients = [client, *[await host.client(f"w{number}") for number in range(1, 4)]]
    assert await asyncio.gather(*map(num_found, clients)) == [10] * 4
    assert host.metric("page_files_loads_total") == 1


async def test_who_waits_for_the_beginning_that_another_computes_gets_the_rest_from_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(world)
    host, client = await world.host()
    other = await host.client("w1")
    monkeypatch.setattr(LoadRates, "is_worth", property(lambda self: False))
    match = await find(client, num_pages=4)
    monkeypatch.undo()
    waiting = asyncio.create_task(num_found(other))
    await until(lambda: host.metric("prefix_waits_total") > 0)
    assert host.metric("remote_pages_reserved") == 0, "what follows them could not be kept before they are there"
    for number, page_id in enumerate(match.acquired.page_ids[:4]):
        memory_of(client)[page_id] = content(number)
    await give_back(client, match, num_computed=4)
    assert await waiting == 10
    assert host.metric("page_files_loaded_pages_total") == 6


@pytest.mark.parametrize("harm", ["damaged", "missing"])
async def test_a_file_that_is_damaged_or_gone_costs_the_computation_of_what_follows(world: World, harm: str) -> None:
    await written(world)
    host, client = await world.host()
    path = world.file_of(6)
    raw = path.read_bytes()
    path.write_bytes(raw[:-9] + b"?" + raw[-8:]) if harm == "damaged" else path.unlink()
    assert await num_found(client) == 6
    assert host.metric(f"page_files_{harm}_total") == 1
    assert host.metric("page_files_loads_failed_total") == 1
    assert not path.exists()
    await compute(client)
    await until(lambda: len(world.files) == 10)
    assert await num_found(client) == 10


async def test_where_all_files_are_gone_it_is_computed(world: World) -> None:
    await written(world)
    host, client = await world.host()
    for path in world.files:
        path.unlink()
    assert await num_found(client) == 0
    assert host.metric("page_files_loads_failed_total") == 1
    assert await num_found(client) == 0
    assert host.metric("page_files_loads_total") == 1


async def test_what_another_host_has_written_is_found_when_it_was_looked_for(world: World) -> None:
    (here, one), (there, other) = await world.host(), await world.host()
    await compute(one)
    await until(lambda: here.metric("page_files_written_pages_total") == 10)
    there.service._keepers[0]._store.refresh()
    assert await num_found(other) == 10
    assert there.metric("page_files_loaded_pages_total") == 10


async def test_what_is_read_slower_than_computed_is_computed_and_tried_now_and_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(world)
    host, client = await world.host()
    rates = host.service._keepers[0]._rates
    monkeypatch.setattr(LoadRates, "is_worth", property(lambda self: False))
    assert await num_found(client) == 0
    assert (host.metric("page_files_loads_total"), host.metric("page_files_loads_declined_total")) == (0, 1)
    await until(lambda: rates._pages_per_s is not None)
    monkeypatch.undo()
    assert await num_found(client) == 10


async def test_who_waits_for_files_that_do_not_come_computes_and_their_pages_stay_reserved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(world)
    host, client = await world.host()
    monkeypatch.setattr(LoadRates, "longest_s", lambda self, num_pages: 0.05)
    monkeypatch.setattr(host.service._servicer, "_prefix_wait_s", 60.0)
    with stuck_reads(monkeypatch) as answers:
        match = await find(client)
        assert (len(match.page_ids), len(match.acquired.page_ids)) == (0, 11)
        assert host.metric("remote_pages_reserved") == 10, "somebody may still write there"
        answers.set()
        await until(lambda: host.metric("remote_pages_reserved") == 0)
    await give_back(client, match)
    assert host.metric("page_files_loads_failed_total") == 1


async def test_a_tier_that_cannot_be_read_is_asked_once_by_each_prompt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(world)
    host, client = await world.host()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_store, "read_page", fail)
    assert await num_found(client) == 0
    assert host.metric("page_files_loads_total") == 1
    assert host.metric("page_files_known_pages") == 10, "they may be read another time"
    monkeypatch.undo()
    assert await num_found(client) == 10


async def test_a_full_disk_is_told_and_harms_nobody(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host, client = await world.host()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        await compute(client)
        await until(lambda: host.metric("page_files_write_failures_total") == 1)
        assert host.metric("page_files_unwritten_pages") == 10
        assert world.files == []
        assert await num_found(client) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "pages cannot be written to files: [Errno 27] File too large" in caplog.text
    await until(lambda: len(world.files) == 10)


async def test_a_page_that_is_given_to_somebody_else_while_it_is_copied_is_not_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, client = await world.host()
    copy = np.copyto
    has_begun, may_go_on = threading.Event(), threading.Event()

    def copy_slowly(to: Any, source: Any) -> None:
        has_begun.set()
        may_go_on.wait(5)
        copy(to, source)

    monkeypatch.setattr(np, "copyto", copy_slowly)
    await compute(client, num_pages=1)
    await until(has_begun.is_set)
    acquired = await client.acquire(40, 0)  # nothing waits for the writer
    memory_of(client)[list(acquired.page_ids)] = 7
    may_go_on.set()
    await until(lambda: host.metric("page_files_lost_pages_total") == 1)
    await client.release(acquired.page_ids, ())
    assert world.files == []


async def test_pages_that_two_prompts_must_use_are_written_at_the_second(world: World) -> None:
    host, client = await world.host(min_uses=2)
    await compute(client)
    await asyncio.sleep(0.3)
    assert world.files == []
    assert await num_found(client, num_pages=6) == 6
    await until(lambda: host.metric("page_files_written_pages_total") == 6)


async def test_what_is_not_in_files_comes_from_another_host(world: World) -> None:
    await written(world, num_pages=6)
    (there, computing), (here, client) = [await world.host(exchanges_pages=True, num_pages=80) for _ in range(2)]
    await compute(computing, num_pages=18)
    match = await find(client, num_pages=18, source=PrefixSource(there.pages_address))
    assert len(match.page_ids) == 18
    await give_back(client, match)
    assert here.metric("page_files_loaded_pages_total") == 6
    assert here.metric("remote_pages_received_total") == 12


async def test_what_comes_from_another_host_before_what_is_in_files_is_kept_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(world, num_pages=6)
    (there, computing), (here, client) = [await world.host(exchanges_pages=True, num_pages=80) for _ in range(2)]
    await compute(computing, num_pages=18)
    may_read, try_get = threading.Event(), PageFileStore.try_get

    def read_when_told(self: PageFileStore, page_hash: bytes, place: PagePlace) -> bool:
        assert may_read.wait(20)
        return try_get(self, page_hash, place)

    monkeypatch.setattr(PageFileStore, "try_get", read_when_told)
    finding = asyncio.create_task(find(client, num_pages=18, source=PrefixSource(there.pages_address)))
    await until(lambda: there.metric("remote_pages_sent_total") == 12)
    await until(lambda: there.metric("remote_pages_pinned") == 0)  # all have come, and its call has ended
    may_read.set()
    match = await finding
    assert len(match.page_ids) == 18
    await give_back(client, match)
    assert here.metric("remote_prefixes_failed_total") == 0
