"""Two arenas of one machine with their pages on devices: pages are copied from the memory of the one into that of the
other, and count once the one that has them says that they were pinned all along.
"""

import time
from collections.abc import AsyncIterator

import pytest
from numpy.testing import assert_array_equal
from tests.unit.transfer.host import Host, memory_of, open_two_hosts, until
from tests.unit.transfer.test_pages_between_hosts import NUM_PAGES, compute, fetch, give_back, pages_of

from weir.kv.memory.device import HostMemory
from weir.kv.memory.server import MemoryNotReady
from weir.kv.messages import PageChain, PrefixSource
from weir.kv.movers.source import NO_CHECKSUM, OfferedPage, PageSource
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.rpc.arena.client import ArenaClient

_OTHER, _THIRD = (page_hashes(range(first, first + 160), prefix_seed("digest")) for first in (5000, 6000))


@pytest.fixture
async def hosts() -> AsyncIterator[list[Host]]:
    async with open_two_hosts(on_device=True, maps_memory=True) as made:
        yield made


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[list[OfferedPage]]:
    """What was appended to offers."""
    appended, append = list[list[OfferedPage]](), PageSource.append

    def note(self: PageSource, *arguments: object, **more: object) -> list[OfferedPage]:
        pages = append(self, *arguments, **more)  # type: ignore[arg-type]
        if pages:
            appended.append(pages)
        return pages

    monkeypatch.setattr(PageSource, "append", note)
    return appended


async def _compute_other(there: ArenaClient, hashes: tuple[bytes, ...] = _OTHER) -> tuple[int, ...]:
    match = await there.match(hashes, NUM_PAGES, 1)
    memory_of(there)[list(match.acquired.page_ids)] = 7
    chain = PageChain(match.acquired.page_ids, hashes)
    await there.release((), match.acquired.slots, [chain], [match.match_id])
    return match.acquired.page_ids


async def _fetch_other(here: ArenaClient, address: str, hashes: tuple[bytes, ...] = _OTHER) -> int:
    match = await here.match(hashes, NUM_PAGES, 1, source=PrefixSource(address, ""))
    await give_back(here, match)
    return len(match.page_ids)


async def test_pages_are_copied_from_one_memory_to_the_other(
    hosts: list[Host], offered: list[list[OfferedPage]]
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computed = await compute(there)
    match = await fetch(here, hosts[0].pages_address)
    assert_array_equal(pages_of(here, match.page_ids), pages_of(there, computed.acquired.page_ids[:10]))
    assert len(match.page_ids) == hosts[1].metric("remote_pages_direct_total") == 10
    assert hosts[0].metric("remote_pages_sent_total") == 0, "nothing goes over a stream"
    assert all(page.checksum != NO_CHECKSUM for page in offered[0]), "nobody knew yet that it would be mapped"
    await give_back(here, match)
    await _compute_other(there)
    assert await _fetch_other(here, hosts[0].pages_address) == 10
    assert [page.checksum != NO_CHECKSUM for page in offered[1]] == [True] + 9 * [False]


async def test_what_was_copied_counts_for_nothing_where_a_page_was_given_away_meanwhile(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computed = await compute(there)
    recycled, copy_from = computed.acquired.page_ids[4], HostMemory.copy_from

    def recycle_and_copy(self: HostMemory, *arguments: object) -> None:
        there.segment.page_rows["generation"][recycled] = 1000
        copy_from(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(HostMemory, "copy_from", recycle_and_copy)
    match = await fetch(here, hosts[0].pages_address)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    assert hosts[1].metric("remote_pages_direct_total") == 0
    await give_back(here, match)


async def test_what_was_copied_counts_for_nothing_where_the_offer_has_ended(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    source, copy_from = hosts[0].service._exchange._source, HostMemory.copy_from  # type: ignore[union-attr]

    def withdraw_and_copy(self: HostMemory, *arguments: object) -> None:
        for transfer_id in list(source._offers):
            source.withdraw(transfer_id)
        copy_from(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(HostMemory, "copy_from", withdraw_and_copy)
    match = await fetch(here, hosts[0].pages_address)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    await give_back(here, match)


async def test_memory_that_is_not_what_it_is_taken_for_is_not_mapped_again(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computed = await compute(there)
    copy_from = HostMemory.copy_from

    def copy_another(self: HostMemory, offset: int, pointer: int, num_bytes: int) -> None:
        copy_from(self, offset, pointer + 1, num_bytes - 1)

    monkeypatch.setattr(HostMemory, "copy_from", copy_another)
    match = await fetch(here, hosts[0].pages_address)
    assert match.page_ids == ()
    assert "is not what it is taken for" in caplog.text
    await give_back(here, match)
    match = await fetch(here, hosts[0].pages_address)
    assert_array_equal(pages_of(here, match.page_ids), pages_of(there, computed.acquired.page_ids[:10]))
    assert (len(match.page_ids), hosts[1].metric("remote_pages_direct_total")) == (10, 0)
    assert hosts[0].metric("remote_pages_sent_total") == 10
    await give_back(here, match)


@pytest.mark.parametrize("error", [MemoryNotReady("no"), OSError("no"), ValueError("no")], ids=repr)
async def test_memory_that_cannot_be_mapped_costs_a_stream(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("weir_transfer.exchange.peer_memory.fetch_memory", refuse)
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    match = await fetch(here, hosts[0].pages_address)
    assert (len(match.page_ids), hosts[1].metric("remote_pages_direct_total")) == (10, 0)
    await give_back(here, match)


async def test_memory_that_could_not_be_mapped_is_tried_again_after_a_while(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other arena may only have been starting."""
    asked: list[object] = []

    def refuse(*arguments: object) -> None:
        asked.append(arguments)
        raise MemoryNotReady("not yet")

    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    await _compute_other(there)
    await _compute_other(there, _THIRD)
    with monkeypatch.context() as refusing:
        refusing.setattr("weir_transfer.exchange.peer_memory.fetch_memory", refuse)
        await give_back(here, await fetch(here, hosts[0].pages_address))
        assert await _fetch_other(here, hosts[0].pages_address) == 10
    assert len(asked) == 1
    memories = hosts[1].service._exchange.fetcher._arena.memories  # type: ignore[union-attr]
    memories._refused_until_s = {arena_id: time.monotonic() for arena_id in memories._refused_until_s}
    assert await _fetch_other(here, hosts[0].pages_address, _THIRD) == 10
    assert hosts[1].metric("remote_pages_direct_total") == 10


async def test_a_socket_of_another_name_is_not_asked(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """An offer is another process's word: it leads to no other socket of this user's."""
    asked: list[object] = []
    monkeypatch.setattr("weir_transfer.exchange.peer_memory.fetch_memory", asked.append)
    monkeypatch.setattr("weir_transfer.exchange.peer_memory.MEMORY_SOCKET", "other.sock")
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    match = await fetch(here, hosts[0].pages_address)
    assert (len(match.page_ids), len(asked)) == (10, 0)
    await give_back(here, match)


async def test_a_mapping_does_not_outlive_its_pull(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the memory of an arena that is gone would stay taken."""
    opened, open_to_read = list[HostMemory](), HostMemory.open_to_read

    def note(fd: int, num_bytes: int) -> HostMemory:
        opened.append(open_to_read(fd, num_bytes))
        return opened[-1]

    hosts[1].service._exchange.fetcher._arena.memories._open_memory = note  # type: ignore[union-attr]
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    await give_back(here, await fetch(here, hosts[0].pages_address))
    await until(lambda: [memory.fd for memory in opened] == [-1])  # by its thread, for which nobody waits
