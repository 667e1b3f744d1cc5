"""Pages of an arena in tiers beside files, and in several: the nearest gives them, each as it was computed, and one
that fails costs nobody more than to compute."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.contract.valkey_server import ValkeyServer, running
from tests.unit.transfer.host import Host, until
from tests.unit.transfer.pages import HASHES, compute, content, find, give_back, num_found

from weir.core.clock import Backoff
from weir.kv.memory.page_access import PageAccess
from weir.kv.tiers.file_store import PageFileStore
from weir.kv.tiers.memory_store import PageMemoryStore
from weir.kv.tiers.page_header import PageLayout
from weir.kv.tiers.page_store import PageStore
from weir.kv.tiers.valkey_address import parse_valkey_url
from weir.kv.tiers.valkey_client import ValkeySettings
from weir.kv.tiers.valkey_store import ValkeyPageStore
from weir.rpc.arena.client import ArenaClient
from weir_transfer import tier_keeper
from weir_transfer.page_tier import LoadRates
from weir_transfer.tier_keeper import KeeperSettings, PageTier

_LONG_S = 30.0
"""For an answer, on a busy machine."""


class World:
    """Hosts over one server and one folder, one after the other or beside one another."""

    def __init__(self, folder: Path, closing: AsyncExitStack) -> None:
        self._folder, self._closing = folder, closing
        self._num_hosts = 0
        self.server: ValkeyServer | None = None

    def start_server(self) -> ValkeyServer:
        self.server = self._closing.enter_context(running(self._folder))
        return self.server

    async def host(self, *names: str, on_device: bool = False, answer_s: float = _LONG_S) -> tuple[Host, ArenaClient]:
        self._num_hosts += 1
        folder = self._folder / f"host-{self._num_hosts}"
        folder.mkdir()

        def open_tiers(layout: PageLayout, pages: PageAccess) -> list[PageTier]:
            return [
                PageTier(name, self._open(name, layout, pages, answer_s), KeeperSettings(1 << 30)) for name in names
            ]

        host = Host(folder, tiers=open_tiers, on_device=on_device)
        await host.start()
        self._closing.push_async_callback(host.close)
        return host, await host.client("w0")

    def _open(self, name: str, layout: PageLayout, pages: PageAccess, answer_s: float) -> PageStore:
        if name == "memory":
            return PageMemoryStore(layout.page_bytes, 40 * layout.page_bytes, pages.host_buffer)
        if name == "files":
            return PageFileStore(self._folder / "files", layout, 1 << 20)
        assert self.server is not None
        return ValkeyPageStore(ValkeySettings(parse_valkey_url(self.server.url), answer_s=answer_s), layout)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretended workers compute faster than a busy machine reads: what was measured decides nothing here."""
    monkeypatch.setattr(LoadRates, "longest_s", lambda self, num_pages: None)
    monkeypatch.setattr(LoadRates, "is_worth", True)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as closing:
        yield World(tmp_path, closing)


async def written(host: Host, *names: str) -> None:
    await until(lambda: all(host.metric(f"page_{name}_written_pages_total") == 10 for name in names))


async def evict_all(host: Host, client: ArenaClient) -> None:
    acquired = await client.acquire(40, 0)
    assert host.metric("cached_pages") == 0
    await client.release(acquired.page_ids, ())


def loaded(host: Host, *names: str) -> list[float]:
    return [host.metric(f"page_{name}_loaded_pages_total") for name in names]


@pytest.mark.parametrize("on_device", [False, True], ids=["pages in the segment", "pages on a device"])
async def test_pages_that_one_host_computed_another_finds_in_valkey(world: World, on_device: bool) -> None:
    world.start_server()
    one, computing = await world.host("valkey", on_device=on_device)
    await compute(computing)
    await written(one, "valkey")
    other, client = await world.host("valkey", on_device=on_device)
    assert await num_found(client) == 10
    assert loaded(other, "valkey") == [10]


async def test_pages_that_left_a_device_come_back_from_memory_of_its_host(world: World) -> None:
    host, client = await world.host("memory", on_device=True)
    await compute(client)
    await written(host, "memory")
    await evict_all(host, client)
    assert await num_found(client) == 10
    assert loaded(host, "memory") == [10]


async def test_the_nearest_tier_that_has_a_page_gives_it(world: World) -> None:
    world.start_server()
    tiers = ("memory", "files", "valkey")
    host, client = await world.host(*tiers, on_device=True)
    await compute(client)
    await written(host, *tiers)
    await evict_all(host, client)
    assert await num_found(client) == 10
    assert loaded(host, *tiers) == [10, 0, 0]
    another, client = await world.host(*tiers, on_device=True)
    assert await num_found(client) == 10
    assert loaded(another, *tiers) == [0, 10, 0]
    await written(another, "memory")  # what came from farther away is nearer from then on
    assert another.metric("page_files_written_pages_total") == 0
    await evict_all(another, client)
    assert await num_found(client) == 10
    assert loaded(another, *tiers) == [10, 10, 0]


async def test_what_the_nearest_lacks_behind_its_pages_comes_from_the_next(world: World) -> None:
    world.start_server()
    first, computing = await world.host("valkey", on_device=True)
    await compute(computing)
    await written(first, "valkey")
    host, client = await world.host("memory", "files", "valkey", on_device=True)
    for number in range(5):
        host.service._keepers[0]._store.try_put(HASHES[number], content(number).tobytes())
    assert await num_found(client) == 10
    assert loaded(host, "memory", "files", "valkey") == [5, 0, 5]
    spans = [dict(span.attributes or {}) for span in host.spans.get_finished_spans() if span.name == "load_prefix"]
    wanted = [("memory", 5), ("valkey", 5)]
    assert sorted((span["weir.tier"], span["weir.num_pages_in_tier"]) for span in spans) == wanted


async def test_a_page_that_memory_has_damaged_comes_from_the_next(world: World) -> None:
    tiers = ("memory", "files")
    host, client = await world.host(*tiers, on_device=True)
    await compute(client)
    await written(host, *tiers)
    await evict_all(host, client)
    memory = host.service._keepers[0]._store
    assert isinstance(memory, PageMemoryStore)
    memory.slot_of(HASHES[6])[3] ^= 1
    assert await num_found(client) == 10
    assert loaded(host, *tiers) == [6, 4]
    assert host.metric("page_memory_damaged_total") == 1


@pytest.mark.parametrize("fault", ["dies", "stands still"])
async def test_a_server_that_fails_while_prompts_wait_costs_the_computation(
    world: World, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_keeper, "_REFRESH_S", 0.5)
    server = world.start_server()
    first, computing = await world.host("valkey")
    await compute(computing)
    await written(first, "valkey")
    host, client = await world.host("valkey", answer_s=0.3 if fault == "stands still" else _LONG_S)
    {"dies": server.kill, "stands still": server.pause}[fault]()
    match = await find(client)
    assert (len(match.page_ids), len(match.acquired.page_ids)) == (0, 11)
    assert [host.metric("page_valkey_away"), host.metric("page_valkey_loads_failed_total")] == [1, 1]
    await until(lambda: host.metric("remote_pages_reserved") == 0)
    await give_back(client, match)
    assert await num_found(client) == 0
    assert host.metric("page_valkey_loads_total") == 1, "it is not asked again"
    {"dies": server.start, "stands still": server.go_on}[fault]()
    await compute(client)
    await until(lambda: host.metric("page_valkey_away") == 0, timeout_s=60)
    if fault == "dies":  # it had nothing on a disk: what is used is written again
        assert await num_found(client) == 10
        await written(host, "valkey")
    await evict_all(host, client)
    await until(lambda: host.metric("page_valkey_known_pages") == 10)
    assert await num_found(client) == 10


async def test_a_server_that_comes_back_is_found_while_writes_wait_for_their_next_try(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_keeper, "_REFRESH_S", 0.5)
    server = world.start_server()
    host, client = await world.host("valkey")
    monkeypatch.setattr(host.service._keepers[0], "_backoff", Backoff(600.0, 600.0))
    server.kill()
    await compute(client)
    await until(lambda: host.metric("page_valkey_write_failures_total") == 1)
    assert host.metric("page_valkey_away") == 1
    server.start()
    await until(lambda: host.metric("page_valkey_away") == 0, timeout_s=60)
    assert host.metric("page_valkey_unwritten_pages") == 10


async def test_a_full_server_is_told_and_harms_nobody(world: World, caplog: pytest.LogCaptureFixture) -> None:
    server = world.start_server()
    host, client = await world.host("valkey")
    server.set("maxmemory", "1")
    await compute(client)
    await until(lambda: host.metric("page_valkey_write_failures_total") > 0)
    assert await num_found(client) == 10
    assert "pages cannot be written to valkey" in caplog.text
    assert host.metric("page_valkey_away") == 0
    server.set("maxmemory", "0")
    await written(host, "valkey")


async def test_a_server_that_is_slower_than_computing_is_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start_server()
    tiers = ("files", "valkey")
    first, computing = await world.host("valkey")
    await compute(computing)
    await written(first, "valkey")
    host, client = await world.host(*tiers)
    slow = host.service._keepers[1]._rates
    monkeypatch.setattr(LoadRates, "is_worth", property(lambda self: self is not slow))
    assert await num_found(client) == 0
    declined = [host.metric(f"page_{name}_loads_declined_total") for name in tiers]
    assert declined == [0, 1]
    await compute(client)
    await written(host, "files")
    await evict_all(host, client)
    assert await num_found(client) == 10
    assert loaded(host, *tiers) == [10, 0], "each tier is measured by itself"


async def test_of_a_server_that_gives_no_page_in_time_the_rate_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that is too slow for a page, and quick to say that it is there, would be waited for again and again."""
    world.start_server()
    first, computing = await world.host("valkey")
    await compute(computing)
    await written(first, "valkey")
    host, client = await world.host("valkey")

    def fails(self: ValkeyPageStore, page_hash: bytes, memory: memoryview) -> bool:
        raise TimeoutError("no whole answer")

    monkeypatch.setattr(ValkeyPageStore, "_try_read", fails)
    assert await num_found(client) == 0
    assert host.metric("page_valkey_load_rate") == 0


async def test_many_that_want_it_at_once_load_it_once_from_each(world: World) -> None:
    world.start_server()
    first, computing = await world.host("valkey")
    await compute(computing)
    await written(first, "valkey")
    host, client = await world.host("files", "valkey")
    clients = [client, *[await host.client(f"w{number}") for number in range(1, 4)]]
    assert await asyncio.gather(*map(num_found, clients)) == [10] * 4
    assert host.metric("page_valkey_loads_total") == 1
