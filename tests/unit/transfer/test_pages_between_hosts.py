"""Prefixes that a host lacks come from another one that has them: as they were, once, and with nothing left behind."""

import asyncio
from collections.abc import Sequence

import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.transfer.host import Host, memory_of, until

from weir.core.addresses import free_port
from weir.kv.memory.server import MemoryServer
from weir.kv.messages import PageChain, PrefixMatch, PrefixSource
from weir.kv.movers.pull import WantedPage
from weir.kv.movers.stream_pull import PagePull
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.rpc.arena.client import ArenaClient
from weir.rpc.channel import make_channel
from weir.wire.v1 import arena_pb2, arena_pb2_grpc, pages_pb2, pages_pb2_grpc
from weir_transfer.exchange.prefix_fetcher import LEAST_PAGES

HASHES = page_hashes(range(160), prefix_seed("digest"))
NUM_PAGES = 11
TRACE = 0xABC


def pages_of(client: ArenaClient, page_ids: Sequence[int]) -> NDArray[np.uint8]:
    return memory_of(client)[list(page_ids)]


async def compute(client: ArenaClient, num_pages: int = 10, seed: int = 1) -> PrefixMatch:
    """All of the prefix, or its first pages; they stay cached."""
    match = await client.match(HASHES[:num_pages], num_pages + 1, 1)
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    content = np.random.default_rng(seed).integers(0, 256, (len(page_ids), 4096), np.uint8)
    memory_of(client)[list(page_ids)] = content
    chain = PageChain(page_ids, HASHES[:num_pages])
    await client.release((), match.acquired.slots, [chain], [match.match_id])
    return match


async def fetch(client: ArenaClient, address: str, num_pages: int = 10, *, is_expected: bool = False) -> PrefixMatch:
    source = PrefixSource(address, f"00-{TRACE:032x}-{1:016x}-01", is_expected)
    return await client.match(HASHES[:num_pages], num_pages + 1, 1, source=source)


async def give_back(client: ArenaClient, match: PrefixMatch) -> None:
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    await client.release((), match.acquired.slots, [PageChain(page_ids)], [match.match_id])


async def test_a_prefix_of_another_host_is_found_as_if_it_had_been_computed_here(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computed = await compute(there)
    match = await fetch(here, hosts[0].pages_address)
    assert len(match.page_ids) == 10
    assert (pages_of(here, match.page_ids) == pages_of(there, computed.acquired.page_ids[:10])).all()
    [span] = [span for span in hosts[1].spans.get_finished_spans() if span.name == "fetch_prefix"]
    assert span.context.trace_id == TRACE
    assert dict(span.attributes or {}) == {"weir.prefix_source": hosts[0].pages_address, "weir.num_cached_pages": 10}
    assert hosts[1].metric("remote_pages_received_total") == hosts[0].metric("remote_pages_offered_total") == 10
    await give_back(here, match)
    again = await fetch(here, hosts[0].pages_address)
    assert again.page_ids == match.page_ids
    assert hosts[0].metric("remote_pages_offered_total") == 10, "what is here does not come again"
    await give_back(here, again)


async def test_only_what_is_missing_comes(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    await compute(here, num_pages=1)
    match = await fetch(here, hosts[0].pages_address)
    assert len(match.page_ids) == 10
    assert hosts[0].metric("remote_pages_offered_total") == 9
    await give_back(here, match)


async def test_many_that_want_it_at_once_fetch_it_once(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    other = await hosts[1].client("w1")
    await compute(there)
    matches = await asyncio.gather(*(fetch(client, hosts[0].pages_address) for client in (here, other)))
    assert {len(match.page_ids) for match in matches} == {10}
    assert hosts[0].metric("remote_pages_offered_total") == 10
    for client, match in zip((here, other), matches, strict=True):
        await give_back(client, match)


async def test_a_part_that_the_other_host_has_is_taken_and_the_rest_computed(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there, num_pages=4)
    match = await fetch(here, hosts[0].pages_address)
    assert (len(match.page_ids), len(match.acquired.page_ids)) == (4, 7)
    assert hosts[1].metric("remote_prefixes_failed_total") == 0
    await give_back(here, match)


async def test_a_prefix_that_is_still_being_computed_comes_as_it_is_sealed(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computing = await there.match(HASHES, NUM_PAGES, 1)
    page_ids = computing.acquired.page_ids
    memory_of(there)[list(page_ids)] = np.random.default_rng(5).integers(0, 256, (NUM_PAGES, 4096), np.uint8)
    await there.seal(PageChain(page_ids[:2], HASHES[:2]))
    fetching = asyncio.create_task(fetch(here, hosts[0].pages_address))
    for first in range(2, 10, 4):
        await until(lambda first=first: hosts[0].metric("remote_pages_offered_total") == first)  # type: ignore[misc]
        assert not fetching.done()
        await there.seal(PageChain(page_ids[first : first + 4], HASHES[first : first + 4], HASHES[:first]))
    match = await fetching
    assert (pages_of(here, match.page_ids) == pages_of(there, page_ids[:10])).all()
    assert len(match.page_ids) == 10
    await give_back(here, match)
    await there.release((), computing.acquired.slots, [PageChain(page_ids, HASHES)], [computing.match_id])


async def test_a_prefix_that_nobody_computes_yet_is_waited_for_where_it_is_expected(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    fetching = asyncio.create_task(fetch(here, hosts[0].pages_address, is_expected=True))
    await until(lambda: hosts[1].metric("remote_pages_reserved") == 10)
    await asyncio.sleep(0.15)  # an offer of what is not there would have ended by now
    assert not fetching.done()
    computed = await compute(there)
    match = await fetching
    assert (pages_of(here, match.page_ids) == pages_of(there, computed.acquired.page_ids[:10])).all()
    assert len(match.page_ids) == 10
    await give_back(here, match)


async def test_what_is_expected_and_never_begun_is_computed_here(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir_transfer.exchange.pages_service._EXPECTED_S", 0.1)
    here = await hosts[1].client("w0")
    match = await fetch(here, hosts[0].pages_address, is_expected=True)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    await give_back(here, match)


async def test_how_each_fetch_went_is_told_once(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    await give_back(here, await fetch(here, hosts[0].pages_address))
    exchange = hosts[1].service._exchange
    assert exchange is not None
    [fetched] = exchange.fetcher.take_fetched()
    assert (fetched.source, fetched.num_bytes) == (hosts[0].pages_address, 10 * 4096)
    assert fetched.busy_s > 0 < fetched.round_trip_s
    assert hosts[1].metric("remote_busy_seconds_total") == fetched.busy_s
    assert exchange.fetcher.take_fetched() == ()


async def test_who_gives_up_a_prefix_ends_what_others_wait_for(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computing = await there.match(HASHES, NUM_PAGES, 1)
    fetching = asyncio.create_task(fetch(here, hosts[0].pages_address))
    await until(lambda: hosts[1].metric("remote_pages_reserved") == 10)
    await there.release(computing.acquired.page_ids, computing.acquired.slots, [], [computing.match_id])
    match = await fetching
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    await give_back(here, match)


async def test_two_that_want_the_same_of_one_another_do_not_wait_for_one_another(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("prefix_fetcher.LONGEST_STILL_S", "prefix_fetcher.LONGEST_FETCH_S", "pages_service.LONGEST_OFFER_S"):
        monkeypatch.setattr(f"weir_transfer.exchange.{bound}", 120.0)
    # Not by matches: the later one would wait for what the earlier one's worker computes by then.
    for host, other in zip(hosts, reversed(hosts), strict=True):
        assert host.service._exchange.fetcher.begin(HASHES, other.pages_address)  # type: ignore[union-attr]
    await until(lambda: all(host.metric("remote_prefixes_failed_total") == 1 for host in hosts))
    for host in hosts:
        client = await host.client("w0")
        match = await client.match(HASHES, NUM_PAGES, 1)
        assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
        await give_back(client, match)


async def test_what_comes_too_slowly_is_not_waited_for_and_what_had_come_is_kept(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir_transfer.exchange.prefix_fetcher.LONGEST_STILL_S", 0.3)
    there, here = [await host.client("w0") for host in hosts]
    computing = await there.match(HASHES, NUM_PAGES, 1)
    page_ids = computing.acquired.page_ids
    await there.seal(PageChain(page_ids[:4], HASHES[:4]))
    match = await fetch(here, hosts[0].pages_address)
    assert (len(match.page_ids), len(match.acquired.page_ids)) == (4, NUM_PAGES - 4)
    assert hosts[1].metric("remote_prefixes_failed_total") == 1
    await give_back(here, match)
    await there.release((), computing.acquired.slots, [PageChain(page_ids, HASHES)], [computing.match_id])


async def test_a_worker_that_has_attached_anew_fetches_nothing_by_an_older_attachment(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    async with make_channel(f"unix:{hosts[1].socket_path}") as channel:
        stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(channel)
        request = arena_pb2.MatchRequest(
            lease_id=1,
            attachment=99,
            page_hashes=b"".join(HASHES),
            num_pages=NUM_PAGES,
            fetch_from=hosts[0].pages_address,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Match(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.ABORTED
    assert hosts[1].metric("remote_pages_reserved") == hosts[1].metric("remote_prefixes_total") == 0
    assert here.pages_address == hosts[1].pages_address


async def test_a_page_that_is_not_the_one_that_was_asked_for_is_not_used(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are as they were offered, but the source took the request for another one."""
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    make_stub = pages_pb2_grpc.PagesStub

    class FlippingStub:
        def __init__(self, channel: grpc.aio.Channel) -> None:
            self._stub = make_stub(channel)

        def Offer(self, request: pages_pb2.OfferRequest, timeout: float) -> object:  # noqa: N802
            request.num_held_pages ^= 1
            return self._stub.Offer(request, timeout=timeout)

    monkeypatch.setattr(pages_pb2_grpc, "PagesStub", FlippingStub)
    match = await fetch(here, hosts[0].pages_address)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    await give_back(here, match)


async def test_short_prefixes_are_computed(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there, num_pages=LEAST_PAGES - 1)
    match = await fetch(here, hosts[0].pages_address, num_pages=LEAST_PAGES - 1)
    assert match.page_ids == ()
    await give_back(here, match)


async def test_where_nobody_answers_it_is_computed(hosts: list[Host]) -> None:
    here = await hosts[1].client("w0")
    match = await fetch(here, f"127.0.0.1:{free_port()}")
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    assert hosts[1].metric("remote_prefixes_failed_total") == 1
    await give_back(here, match)


async def test_pages_that_changed_after_their_offer_are_not_used_and_those_before_them_are(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    computed = await compute(there)
    want = PagePull.want

    def spoil_and_want(self: PagePull, pages: Sequence[WantedPage]) -> None:
        memory_of(there)[computed.acquired.page_ids[3], 17] ^= 1
        want(self, pages)

    monkeypatch.setattr(PagePull, "want", spoil_and_want)
    match = await fetch(here, hosts[0].pages_address)
    assert (len(match.page_ids), len(match.acquired.page_ids)) == (3, NUM_PAGES - 3)
    assert (pages_of(here, match.page_ids) == pages_of(there, computed.acquired.page_ids[:3])).all()
    assert hosts[1].metric("remote_pages_wrong_total") == 2
    assert hosts[1].metric("remote_pages_received_total") == 3
    assert hosts[0].metric("remote_pages_sent_total") == 11
    await give_back(here, match)


async def test_page_streams_that_are_cut_meanwhile_cost_the_computation(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await compute(there)
    want = PagePull.want

    def cut_and_want(self: PagePull, pages: Sequence[WantedPage]) -> None:
        hosts[0].service._exchange.streams.close()  # type: ignore[union-attr]
        want(self, pages)

    monkeypatch.setattr(PagePull, "want", cut_and_want)
    match = await fetch(here, hosts[0].pages_address)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    await give_back(here, match)


async def test_an_arena_of_another_model_offers_nothing(hosts: list[Host]) -> None:
    async with make_channel(hosts[0].pages_address) as channel:
        stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
        for request, code in (
            (pages_pb2.OfferRequest(model_digest="other", page_bytes=4096), grpc.StatusCode.FAILED_PRECONDITION),
            (pages_pb2.OfferRequest(model_digest="digest", page_bytes=1), grpc.StatusCode.FAILED_PRECONDITION),
            (
                pages_pb2.OfferRequest(model_digest="digest", page_bytes=4096, page_hashes=b"x"),
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Offer(request, timeout=10):
                    pass
            assert caught.value.code() == code


async def test_what_a_call_pins_is_free_when_it_ends(hosts: list[Host]) -> None:
    there = await hosts[0].client("w0")
    await compute(there)
    async with make_channel(hosts[0].pages_address) as channel:
        stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
        request = pages_pb2.OfferRequest(model_digest="digest", page_bytes=4096, page_hashes=b"".join(HASHES))
        call = stub.Offer(request, timeout=10)
        offered = await anext(aiter(call))
        assert len(offered.pages) == 10
        assert hosts[0].metric("remote_pages_pinned") == hosts[0].metric("shared_pages") == 10
        call.cancel()
    await until(lambda: hosts[0].metric("remote_pages_pinned") == 0)
    assert hosts[0].metric("shared_pages") == 0


async def test_pages_whose_memory_no_worker_has_given_back_yet_are_computed(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = [await host.client("w0") for host in hosts]
    if there.memory.pages is None:
        pytest.skip("they are in the segment")
    await compute(there)
    monkeypatch.setattr(MemoryServer, "memory", None)
    match = await fetch(here, hosts[0].pages_address)
    assert (match.page_ids, len(match.acquired.page_ids)) == ((), NUM_PAGES)
    await give_back(here, match)
