"""Brings prefixes of other hosts here while matches wait for them.

begin ─> pages reserved, expected ─> offered there ─> pulled ─> cached here
             └────────── refused, gone, too late ──────────> given up: whoever waited computes them
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc.aio

from weir.bus.prefix_news import MAX_FETCHED, PrefixFetched
from weir.kv.movers.pull import Pull, PullFailed, PullFigures, WantedPage
from weir.kv.movers.stream_pull import PullLimits
from weir.rpc.channel import Dialer
from weir.wire.v1 import pages_pb2, pages_pb2_grpc
from weir_transfer.change_signal import ChangeSignal
from weir_transfer.exchange.arena_pulls import ArenaPulls, OpenPages, end_pull
from weir_transfer.exchange.offer_reader import OfferReader
from weir_transfer.remote_prefixes import RemotePrefixes, Reservation

_log = logging.getLogger(__name__)
MAX_FETCHES = 8
LONGEST_FETCH_S = 8.0
"""Less than a match waits: it goes on with what has come."""
LONGEST_STILL_S = 4.0
"""Without another page, offered or come: it is computed there too slowly, or nobody is there any more."""
LEAST_PAGES = 8
"""Fewer are computed sooner than asked for."""


@dataclass(slots=True)
class _Fetch:
    """`round_trip_s`: until the first offer; 0: it is not known."""

    reservation: Reservation
    address: str
    is_expected: bool
    began_s: float = field(default_factory=time.monotonic)
    round_trip_s: float = 0.0
    pull: Pull | None = None
    """None: nothing was offered."""
    is_whole: bool = False
    """All that was offered came."""
    has_failed: bool = True
    """Until the source has said that there is no more, and all of it came."""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_s


class PrefixFetcher:
    """Of one arena."""

    def __init__(self, arena: ArenaPulls, remote: RemotePrefixes, dialer: Dialer, settled: ChangeSignal) -> None:
        """`settled` is notified when more may be cached."""
        self._arena = arena
        self._remote = remote
        self._dialer = dialer
        self._settled = settled
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        """What follows fetches, and is never cancelled."""
        self._is_closing = False
        self._fetched: deque[PrefixFetched] = deque(maxlen=MAX_FETCHED)
        """That nobody was told of."""
        self._threads = ThreadPoolExecutor(2 * MAX_FETCHES, thread_name_prefix="fetch")

    def begin(self, hashes: Sequence[bytes], address: str, *, is_expected: bool = False) -> bool:
        """What of this prefix is neither here nor on its way comes from the arena whose `Pages` are at `address`, if
        there is room and it is worth it: then matches find it expected from here on. `is_expected`: it is about to be
        computed there."""
        num_running = len(self._tasks) + len(self._settling)
        if self._is_closing or num_running >= MAX_FETCHES or len(hashes) - self._remote.num_held(hashes) < LEAST_PAGES:
            return False
        reservation = self._remote.try_reserve(hashes)
        if reservation is None:
            return False
        fetch = _Fetch(reservation, address, is_expected)
        task = asyncio.create_task(self._fetch(fetch), name=f"fetch from {address}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._conclude, fetch))
        return True

    def take_fetched(self) -> tuple[PrefixFetched, ...]:
        """How the latest fetches went, each once."""
        fetched = tuple(self._fetched)
        self._fetched.clear()
        return fetched

    async def close(self) -> None:
        """Nobody writes into pages of this arena any more when it returns."""
        self._is_closing = True
        self._settled.notify()
        for task in self._tasks:
            task.cancel()
        while running := self._tasks | self._settling:
            await asyncio.wait(running)
        self._threads.shutdown()

    async def _fetch(self, fetch: _Fetch) -> None:
        try:
            async with asyncio.timeout(LONGEST_FETCH_S):
                await self._pull_from(fetch)
            fetch.has_failed = False
        except (grpc.aio.AioRpcError, PullFailed, TimeoutError, OSError, ValueError) as error:
            _log.warning(
                "a prefix of %d pages does not come from %s: %s",
                len(fetch.reservation.hashes),
                fetch.address,
                why_not(error),
            )

    def _conclude(self, fetch: _Fetch, fetching: "asyncio.Task[None]") -> None:
        """However that ended, also before it began: what is left to do cannot be cancelled."""
        settling = asyncio.create_task(self._settle(fetch), name=f"settle what came from {fetch.address}")
        self._settling.add(settling)
        self._tasks.discard(fetching)
        settling.add_done_callback(self._settling.discard)

    async def _settle(self, fetch: _Fetch) -> None:
        """What came is kept, also where the rest did not: it was as offered."""
        pull = fetch.pull
        if pull is not None:
            await end_pull(pull)
        if pull is not None and pull.num_first_pages:
            await self._wait_for_earlier(fetch.reservation)
        num_pages, figures = (pull.num_first_pages, pull.figures) if pull is not None else (0, PullFigures())
        num_wanted = len(fetch.reservation.hashes)
        _log.debug("%d pages of %d came from %s in %.0f ms", num_pages, num_wanted, fetch.address, 1000 * fetch.age_s)
        num_bytes, busy_s = (figures.num_bytes, figures.busy_s) if fetch.is_whole else (0, fetch.age_s)
        if pull is not None and not fetch.is_whole:
            self._arena.memories.doubt(fetch.address, is_wrong=pull.figures.num_wrong > 0)
        self._fetched.append(PrefixFetched(fetch.address, num_bytes, busy_s, fetch.round_trip_s))
        self._remote.settle(fetch.reservation, num_pages)
        self._remote.count_received(num_pages, figures, has_failed=fetch.has_failed and num_pages < num_wanted)

    async def _wait_for_earlier(self, reservation: Reservation) -> None:
        """What comes from files, or is computed, before the pages that came: behind a gap they are of no use."""
        ends_at_s = time.monotonic() + LONGEST_STILL_S
        while self._remote.is_coming(reservation.earlier_hashes) and not self._is_closing:
            left_s = ends_at_s - time.monotonic()
            if left_s <= 0:
                return
            await self._settled.wait(left_s)

    async def _pull_from(self, fetch: _Fetch) -> None:
        """Raises AioRpcError, PullFailed, OSError, ValueError."""
        reservation = fetch.reservation
        request = pages_pb2.OfferRequest(
            model_digest=self._arena.model_digest,
            page_bytes=self._arena.page_bytes,
            page_hashes=b"".join((*reservation.earlier_hashes, *reservation.hashes)),
            num_held_pages=len(reservation.earlier_hashes),
            is_expected=fetch.is_expected,
            maps_memory=self._arena.memories.is_known(fetch.address),
        )
        async with self._dialer.open(fetch.address, "transfer") as channel:
            stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
            call = stub.Offer(request, timeout=LONGEST_FETCH_S)
            try:
                source = OpenPages(fetch.address, stub, request.maps_memory)
                await self._pull_offered(fetch, OfferReader(aiter(call)), source)
            finally:
                call.cancel()

    async def _pull_offered(self, fetch: _Fetch, offers: OfferReader, source: OpenPages) -> None:
        """Asks for what is offered as it comes."""
        num_wanted, is_last = 0, False
        try:
            while not is_last and (offered := await offers.try_take(LONGEST_STILL_S)) is not None:
                if fetch.pull is None:
                    fetch.round_trip_s = fetch.age_s
                    fetch.pull = await self._arena.begin(offered, PullLimits(), LONGEST_FETCH_S, source)
                wanted = self._wanted(fetch.reservation, num_wanted, offered.pages)
                if wanted:
                    fetch.pull.want(wanted)
                num_wanted, is_last = num_wanted + len(wanted), offered.is_last
            if fetch.pull is not None:
                await self._finish(fetch.pull, offers)
                fetch.is_whole = True
            if not is_last:
                raise PullFailed(f"nothing more was offered for {LONGEST_STILL_S:g} s")
        finally:
            offers.close()

    async def _finish(self, pull: Pull, offers: OfferReader) -> None:
        """Until all that was asked for is here. Raises PullFailed, AioRpcError: as soon as the offer has ended, too,
        for its pages are not kept for this any more."""
        finishing = asyncio.get_running_loop().run_in_executor(self._threads, pull.finish)
        finishing.add_done_callback(lambda future: future.cancelled() or future.exception())
        num_pages = -1
        while num_pages < pull.figures.num_pages:
            num_pages = pull.figures.num_pages
            has_more = offers.next.done() and offers.next.exception() is None
            either: set[asyncio.Future[Any]] = {finishing} if has_more else {finishing, offers.next}
            await asyncio.wait(either, timeout=LONGEST_STILL_S, return_when=asyncio.FIRST_COMPLETED)
            if finishing.done():
                finishing.result()
                return
            if not has_more and offers.next.done():
                offers.next.result()
                num_pages = -1  # it goes on there, which is as good as a page
        raise PullFailed(f"no page came for {LONGEST_STILL_S:g} s")

    def _wanted(self, reservation: Reservation, first: int, pages: Sequence[pages_pb2.OfferedPage]) -> list[WantedPage]:
        """Those for which there is room, from page number `first` of the offer on. Raises ValueError for one that is
        not what was asked for."""
        wanted = []
        places = zip(pages, reservation.page_ids[first:], reservation.hashes[first:], strict=False)
        for number, (page, page_id, page_hash) in enumerate(places, start=first):
            if page.page_hash != page_hash:
                raise ValueError(f"page {number} of the offer is {page.page_hash.hex()}, not {page_hash.hex()}")
            place = self._arena.place(page_id)
            wanted.append(WantedPage(number, page.generation, page.checksum, place, page_id=page.page_id))
        return wanted


def why_not(error: BaseException) -> str:
    """Why nothing comes from another host, for people."""
    return (
        f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error) or "late"
    )
