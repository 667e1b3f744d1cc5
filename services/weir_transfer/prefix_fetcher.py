"""Brings prefixes of other hosts here while matches wait for them.

begin ─> pages reserved, expected ─> offered there ─> pulled ─> cached here
             └────────── refused, gone, too late ──────────> given up: whoever waited computes them
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from weir.core.addresses import split_port
from weir.core.life import Attempt
from weir.core.tasks import end_tasks
from weir.kv.movers.frames import ID_BYTES
from weir.kv.movers.pipes import PagePipe
from weir.kv.movers.pull import PagePull, PullFailed, PullHello, PullLimits, WantedPage
from weir.rpc.channel import Dialer
from weir.wire.v1 import pages_pb2, pages_pb2_grpc
from weir_transfer.arena import ClaimedArena
from weir_transfer.remote_prefixes import RemotePrefixes, Reservation

_log = logging.getLogger(__name__)
MAX_FETCHES = 8
LONGEST_FETCH_S = 10.0
LEAST_PAGES = 8
"""Fewer are computed sooner than asked for."""
Connect = Callable[[str, int, float], PagePipe]
"""To a page stream's host and port, within so many seconds. Raises OSError."""


class PrefixFetcher:
    """Of one arena whose pages lie in the segment."""

    def __init__(self, arena: ClaimedArena, remote: RemotePrefixes, dialer: Dialer, connect: Connect) -> None:
        self._segment = arena.segment
        self._pages: NDArray[np.uint8] = arena.segment.pages
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
            task = asyncio.create_task(self._fetch(reservation, address), name=f"fetch from {address}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Nobody writes into pages of this arena any more when it returns."""
        await end_tasks(self._tasks)
        self._threads.shutdown()

    async def _fetch(self, reservation: Reservation, address: str) -> None:
        num_pages = 0
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_FETCH_S):
                num_pages = await self._pull_from(reservation, address)
            _log.debug("%d pages came from %s in %.0f ms", num_pages, address, 1000 * (time.monotonic() - began_s))
        except (grpc.aio.AioRpcError, PullFailed, TimeoutError, OSError, ValueError) as error:
            _log.warning(
                "a prefix of %d pages does not come from %s: %s", len(reservation.hashes), address, why_not(error)
            )
        finally:
            self._remote.settle(reservation, num_pages)

    async def _pull_from(self, reservation: Reservation, address: str) -> int:
        """How many of the first pages are here. Raises AioRpcError, PullFailed, OSError, ValueError; nobody writes into
        the pages then either."""
        request = pages_pb2.OfferRequest(
            model_digest=self._segment.model_digest,
            page_bytes=self._segment.geometry.page_bytes,
            page_hashes=b"".join((*reservation.earlier_hashes, *reservation.hashes)),
            num_held_pages=len(reservation.earlier_hashes),
        )
        async with self._dialer.open(address, "transfer") as channel:
            stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
            call = stub.Offer(request, timeout=LONGEST_FETCH_S)
            try:
                return await self._pull_offered(reservation, call)
            finally:
                call.cancel()

    async def _pull_offered(self, reservation: Reservation, offers: AsyncIterable[pages_pb2.OfferResponse]) -> int:
        """Asks for what is offered as it comes."""
        pull, num_pages = None, 0
        loop = asyncio.get_running_loop()
        try:
            async for offered in offers:
                pull = pull or self._begin_pull(offered)
                wanted = self._wanted(reservation, num_pages, offered.pages)
                pull.want(wanted)
                num_pages += len(wanted)
                if offered.is_last:
                    await loop.run_in_executor(self._threads, pull.finish)
                    return num_pages
            raise PullFailed("the offer ended before its last page")
        finally:
            while pull is not None and not await asyncio.shield(loop.run_in_executor(self._threads, pull.cancel)):
                _log.error("a thread that pulls pages does not end: its pages are kept until it does")

    def _wanted(self, reservation: Reservation, first: int, pages: Sequence[pages_pb2.OfferedPage]) -> list[WantedPage]:
        """Those for which there is room, from page number `first` of the offer on."""
        places = zip(pages, reservation.page_ids[first:], strict=False)
        return [
            WantedPage(number, page.generation, page.checksum, self._pages[page_id].data)
            for number, (page, page_id) in enumerate(places, start=first)
        ]

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


def why_not(error: BaseException) -> str:
    """Why nothing comes from another host, for people."""
    return (
        f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error) or "late"
    )
