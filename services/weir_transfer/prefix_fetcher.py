"""Brings prefixes of other hosts here while matches wait for them.

begin ─> pages reserved, expected ─> offered there ─> pulled ─> cached here
             └────────── refused, gone, too late ──────────> given up: whoever waited computes them
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc.aio

from weir.core.addresses import split_port
from weir.core.life import Attempt
from weir.core.tasks import end_tasks
from weir.kv.movers.frames import ID_BYTES
from weir.kv.movers.pipes import PagePipe
from weir.kv.movers.pull import PagePull, PullFailed, PullFigures, PullHello, PullLimits, WantedPage
from weir.rpc.channel import Dialer
from weir.wire.v1 import pages_pb2, pages_pb2_grpc
from weir_transfer.arena import ClaimedArena
from weir_transfer.remote_prefixes import RemotePrefixes, Reservation

_log = logging.getLogger(__name__)
MAX_FETCHES = 8
LONGEST_FETCH_S = 10.0
LONGEST_STILL_S = 5.0
"""Without another page on offer: what is being computed there comes too slowly, or nobody is there any more."""
LEAST_PAGES = 8
"""Fewer are computed sooner than asked for."""
Connect = Callable[[str, int, float], PagePipe]
"""To a page stream's host and port, within so many seconds. Raises OSError."""


@dataclass(slots=True)
class _Fetch:
    reservation: Reservation
    address: str
    pull: PagePull | None = None
    """None: nothing was offered."""


class PrefixFetcher:
    """Of one arena."""

    def __init__(self, arena: ClaimedArena, remote: RemotePrefixes, dialer: Dialer, connect: Connect) -> None:
        self._segment = arena.segment
        self._pages = arena.pages
        self._remote = remote
        self._dialer = dialer
        self._connect = connect
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(2 * MAX_FETCHES, thread_name_prefix="fetch")

    def begin(self, hashes: Sequence[bytes], address: str) -> None:
        """What of this prefix is neither here nor on its way comes from the arena whose `Pages` are at `address`, if
        there is room and it is worth it. Matches find it expected from here on."""
        if len(self._tasks) >= MAX_FETCHES or len(hashes) - self._remote.num_held(hashes) < LEAST_PAGES:
            return
        reservation = self._remote.try_reserve(hashes)
        if reservation is not None:
            fetching = self._fetch(_Fetch(reservation, address))
            task = asyncio.create_task(fetching, name=f"fetch from {address}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Nobody writes into pages of this arena any more when it returns."""
        await end_tasks(self._tasks)
        self._threads.shutdown()

    async def _fetch(self, fetch: _Fetch) -> None:
        reservation, address, began_s = fetch.reservation, fetch.address, time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_FETCH_S):
                await self._pull_from(fetch)
        except (grpc.aio.AioRpcError, PullFailed, TimeoutError, OSError, ValueError) as error:
            _log.warning(
                "a prefix of %d pages does not come from %s: %s", len(reservation.hashes), address, _why(error)
            )
        finally:
            # Also where it failed: what came was as offered, and is not to come again.
            num_pages = fetch.pull.num_first_pages if fetch.pull else 0
            took_ms = 1000 * (time.monotonic() - began_s)
            _log.debug("%d pages of %d came from %s in %.0f ms", num_pages, len(reservation.hashes), address, took_ms)
            self._remote.settle(reservation, num_pages)
            self._remote.count_received(
                len(reservation.hashes), num_pages, fetch.pull.figures if fetch.pull else PullFigures()
            )

    async def _pull_from(self, fetch: _Fetch) -> None:
        """Nobody writes into the pages when it returns, or raises AioRpcError, PullFailed, OSError, ValueError."""
        reservation = fetch.reservation
        request = pages_pb2.OfferRequest(
            model_digest=self._segment.model_digest,
            page_bytes=self._segment.geometry.page_bytes,
            page_hashes=b"".join((*reservation.earlier_hashes, *reservation.hashes)),
            num_held_pages=len(reservation.earlier_hashes),
        )
        async with self._dialer.open(fetch.address, "transfer") as channel:
            stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
            call = stub.Offer(request, timeout=LONGEST_FETCH_S)
            try:
                await self._pull_offered(fetch, aiter(call))
            finally:
                call.cancel()

    async def _pull_offered(self, fetch: _Fetch, offers: AsyncIterator[pages_pb2.OfferResponse]) -> None:
        """Asks for what is offered as it comes."""
        num_wanted, is_last = 0, False
        loop = asyncio.get_running_loop()
        try:
            while not is_last:
                offered = await _try_next(offers)
                if offered is None:
                    break
                fetch.pull = fetch.pull or self._begin_pull(offered)
                wanted = self._wanted(fetch.reservation, num_wanted, offered.pages)
                fetch.pull.want(wanted)
                num_wanted, is_last = num_wanted + len(wanted), offered.is_last
            if fetch.pull is not None:
                await loop.run_in_executor(self._threads, fetch.pull.finish)
            if not is_last:
                raise PullFailed(f"nothing more was offered for {LONGEST_STILL_S:g} s")
        finally:
            while fetch.pull and not await asyncio.shield(loop.run_in_executor(self._threads, fetch.pull.cancel)):
                _log.error("a thread that pulls pages does not end: its pages are kept until it does")

    def _wanted(self, reservation: Reservation, first: int, pages: Sequence[pages_pb2.OfferedPage]) -> list[WantedPage]:
        """Those for which there is room, from page number `first` of the offer on. Raises ValueError for one that is
        not what was asked for."""
        wanted = []
        places = zip(pages, reservation.page_ids[first:], reservation.hashes[first:], strict=False)
        for number, (page, page_id, page_hash) in enumerate(places, start=first):
            if page.page_hash != page_hash:
                raise ValueError(f"page {number} of the offer is {page.page_hash.hex()}, not {page_hash.hex()}")
            wanted.append(WantedPage(number, page.generation, page.checksum, self._pages.place(page_id)))
        return wanted

    def _begin_pull(self, offered: pages_pb2.OfferResponse) -> PagePull:
        """Raises ValueError."""
        if len(offered.transfer_id) != ID_BYTES or len(offered.ticket) != ID_BYTES:
            raise ValueError(f"transfer_id and ticket must have {ID_BYTES} bytes")
        host, port = split_port(offered.stream_address)
        return PagePull(
            PullHello(offered.transfer_id, Attempt(), offered.ticket),
            self._segment.geometry.page_bytes,
            lambda timeout_s: self._connect(host, port, timeout_s),
            PullLimits(),
            time.monotonic() + LONGEST_FETCH_S,
        )


async def _try_next(offers: AsyncIterator[pages_pb2.OfferResponse]) -> pages_pb2.OfferResponse | None:
    """None: nothing within LONGEST_STILL_S. Raises AioRpcError, PullFailed."""
    try:
        async with asyncio.timeout(LONGEST_STILL_S):
            return await anext(offers)
    except TimeoutError:
        return None
    except StopAsyncIteration:
        raise PullFailed("the offer ended before its last page") from None


def _why(error: BaseException) -> str:
    return (
        f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error) or "late"
    )
