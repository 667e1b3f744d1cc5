"""What a transfer service that ends does with the pages that it fetches: nobody has them before nobody writes there."""

import asyncio
import threading

import pytest
from tests.unit.transfer.host import Host, until
from tests.unit.transfer.test_pages_between_hosts import HASHES, compute, fetch, give_back

from weir.kv.movers.stream_pull import PagePull


async def test_a_service_that_stops_waits_for_what_it_fetches_and_frees_it(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    fetching = asyncio.create_task(fetch(here, hosts[0].pages_address))
    await until(lambda: hosts[1].metric("remote_pages_reserved") > 0 or fetching.done())
    await hosts[1].service._exchange.close()  # type: ignore[union-attr]
    assert hosts[1].metric("remote_pages_reserved") == 0
    await give_back(here, await fetching)


async def test_a_fetch_that_is_ended_before_it_began_leaves_nothing(hosts: list[Host]) -> None:
    fetcher = hosts[1].service._exchange.fetcher  # type: ignore[union-attr]
    fetcher.begin(HASHES, hosts[0].pages_address)
    assert hosts[1].metric("remote_pages_reserved") == 10
    await fetcher.close()
    assert hosts[1].metric("remote_pages_reserved") == hosts[1].metric("prefix_pending") == 0


async def test_a_service_that_has_ended_begins_no_fetch(hosts: list[Host]) -> None:
    fetcher = hosts[1].service._exchange.fetcher  # type: ignore[union-attr]
    await fetcher.close()
    assert not fetcher.begin(HASHES, hosts[0].pages_address)
    assert hosts[1].metric("remote_pages_reserved") == hosts[1].metric("prefix_pending") == 0


async def test_what_is_being_settled_when_the_service_ends_is_settled(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    has_ended, cancel = threading.Event(), PagePull.cancel

    def cancel_when_told(self: PagePull) -> bool:
        is_over = cancel(self)
        return has_ended.is_set() and is_over

    monkeypatch.setattr(PagePull, "cancel", cancel_when_told)
    fetching = asyncio.create_task(fetch(here, hosts[0].pages_address))
    await until(lambda: hosts[0].metric("remote_pages_sent_total") == 10)
    await until(lambda: hosts[0].metric("remote_pages_pinned") == 0)  # the fetch is over, and what came is not settled
    closing = asyncio.create_task(hosts[1].service._exchange.fetcher.close())  # type: ignore[union-attr]
    await asyncio.sleep(0.2)
    assert hosts[1].metric("remote_pages_reserved") == 10
    has_ended.set()
    await closing
    assert hosts[1].metric("remote_pages_reserved") == 0
    match = await fetching
    assert len(match.page_ids) == 10
    await give_back(here, match)


async def test_no_page_is_given_to_anybody_while_a_thread_may_write_into_it(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    has_ended, cancel = threading.Event(), PagePull.cancel
    monkeypatch.setattr(PagePull, "cancel", lambda self: has_ended.wait(0.05) and cancel(self))
    fetching = asyncio.create_task(fetch(here, hosts[0].pages_address))
    await until(lambda: hosts[0].metric("remote_pages_sent_total") == 10)
    closing = asyncio.create_task(hosts[1].service._exchange.fetcher.close())  # type: ignore[union-attr]
    await asyncio.sleep(0.3)
    assert hosts[1].metric("remote_pages_reserved") == 10
    assert not closing.done()
    has_ended.set()
    await closing
    assert hosts[1].metric("remote_pages_reserved") == 0
    await give_back(here, await fetching)
