"""Pages that are read from another host's memory by NIXL, as they come by streams: as they were offered, or not at all;
and over streams where it does not do what it should. Two agents in one process, on what UCX finds there.
"""

import importlib.util
import logging
from collections.abc import AsyncIterator, Sequence

import pytest
from numpy.testing import assert_array_equal
from tests.unit.transfer.host import Host, open_two_hosts
from tests.unit.transfer.test_pages_between_hosts import NUM_PAGES, compute, fetch, give_back, pages_of

from weir.kv.movers.nixl import NixlAgent, NixlError, NixlReader
from weir.kv.movers.pull import WantedPage

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="the extra nixl is not installed")


@pytest.fixture
async def hosts() -> AsyncIterator[list[Host]]:
    async with open_two_hosts(reads_by_nixl=True) as made:
        yield made


async def _check_whole(hosts: list[Host], *, num_direct: int) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computed = await compute(there)
    match = await fetch(here, hosts[0].pages_address)
    assert len(match.page_ids) == 10
    assert_array_equal(pages_of(here, match.page_ids), pages_of(there, computed.acquired.page_ids[:10]))
    assert hosts[1].metric("remote_pages_direct_total") == num_direct
    assert hosts[0].metric("remote_pages_sent_total") == 10 - num_direct
    assert hosts[1].metric("remote_probes_failed_total") == (num_direct == 0)
    await give_back(here, match)


async def test_pages_are_read_and_not_sent(hosts: list[Host]) -> None:
    await _check_whole(hosts, num_direct=10)


async def test_a_probe_that_brings_other_bytes_has_the_pages_come_over_a_stream(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(NixlReader, "probe", lambda *_: 12345)
    with caplog.at_level(logging.WARNING):
        await _check_whole(hosts, num_direct=0)
    assert "since a probe by NIXL failed: a page came with another checksum" in caplog.text


@pytest.mark.parametrize("method", ["open", "probe"])
async def test_a_source_that_cannot_be_read_has_its_pages_come_over_a_stream(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def refuse(*_: object) -> None:
        raise NixlError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(NixlAgent, method, refuse)
    await _check_whole(hosts, num_direct=0)


async def test_a_probe_is_made_once(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    probes, probe = list[int](), NixlReader.probe

    def note(self: NixlReader, page_id: int, page_bytes: int) -> int:
        probes.append(page_id)
        return probe(self, page_id, page_bytes)

    monkeypatch.setattr(NixlReader, "probe", note)
    await _check_whole(hosts, num_direct=10)
    here = await hosts[1].client("w1")
    acquired = await here.acquire(int(hosts[1].metric("total_pages")), 0)  # what is cached there is forgotten
    await here.release(acquired.page_ids, (), [], [])
    match = await fetch(here, hosts[0].pages_address)
    assert (len(match.page_ids), len(probes)) == (10, 1)
    await give_back(here, match)


async def test_a_read_that_fails_costs_the_computation_and_the_next_one_comes(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)

    def refuse(self: NixlReader, pages: Sequence[WantedPage]) -> None:
        raise NixlError("NIXL_ERR_REMOTE_DISCONNECT")

    with monkeypatch.context() as patched:
        patched.setattr(NixlReader, "read", refuse)
        match = await fetch(here, hosts[0].pages_address)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    await give_back(here, match)
    match = await fetch(here, hosts[0].pages_address)
    assert len(match.page_ids) == 10
    await give_back(here, match)


async def test_a_page_that_is_written_anew_while_it_is_read_is_not_used(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computed = await compute(there)
    read = NixlReader.read

    def write_and_read(self: NixlReader, pages: Sequence[WantedPage]) -> None:
        there.segment.pages[computed.acquired.page_ids[6]] = 0
        read(self, pages)

    monkeypatch.setattr(NixlReader, "read", write_and_read)
    match = await fetch(here, hosts[0].pages_address)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    assert hosts[1].metric("remote_pages_wrong_total") == 1
    await give_back(here, match)
