"""Brings the pages of a sequence that runs at another host here, while it goes on there.

offered there ─> pages reserved ─> pulled ─> cached and pinned here ─> the next ones … ─> unpinned at the end
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from weir.kv.movers.pull import Pull, PullFailed, WantedPage
from weir.kv.movers.stream_pull import PullLimits
from weir.kv.prefixes import split_hashes
from weir.rpc.channel import Dialer
from weir.wire.v1 import pages_pb2, pages_pb2_grpc
from weir_transfer.change_signal import ChangeSignal
from weir_transfer.exchange.arena_pulls import ArenaPulls, OpenPages, end_pull
from weir_transfer.exchange.sequence_offers import LONGEST_STAGE_S
from weir_transfer.remote_prefixes import RemotePrefixes

MAX_STAGES = 8
_LIMITS = PullLimits(num_streams=1, max_breaks=1, rest_s=4.0)
"""Pages come one by one: a stream that rests meanwhile is not opened anew for each, and closed before its source does.
The end of what is offered breaks it, mostly since the sequence has ended."""
_LONGEST_WAIT_S = 2.0
"""For pages of the sequence that are being computed here, or brought here, for others."""

_ENDS = "no more comes here: the transfer service ends"


class TooManyStages(Exception):
    """As many sequences as may come here at a time do already."""


class SequenceFetcher:
    """Of one arena."""

    def __init__(self, arena: ArenaPulls, remote: RemotePrefixes, dialer: Dialer, settled: ChangeSignal) -> None:
        """`settled` is notified when more may be cached."""
        self._arena = arena
        self._remote = remote
        self._dialer = dialer
        self._settled = settled
        self._num_stages = 0
        self._pulls: dict[Pull, None] = {}
        self._is_closing = False
        self._threads = ThreadPoolExecutor(MAX_STAGES, thread_name_prefix="stage")

    async def close(self) -> None:
        """Nobody writes into pages of this arena any more when it returns."""
        self._is_closing = True
        await asyncio.gather(*map(end_pull, tuple(self._pulls)))
        self._threads.shutdown()

    async def stage(self, request_id: str, address: str) -> AsyncGenerator[int]:
        """How many of the sequence's first pages are here, each time that it is more; until the other host offers no
        more. To be closed: until then they are pinned here. Raises TooManyStages, AioRpcError, PullFailed, OSError,
        ValueError, TimeoutError; nobody writes into pages of this arena then either."""
        if self._is_closing or self._num_stages >= MAX_STAGES:
            raise TooManyStages(f"{self._num_stages} sequences are on their way here already, or it ends")
        self._num_stages += 1
        hashes, pinned, number = list[bytes](), list[int](), 0
        request = pages_pb2.OfferSequenceRequest(
            model_digest=self._arena.model_digest,
            page_bytes=self._arena.page_bytes,
            request_id=request_id,
            maps_memory=self._arena.memories.is_known(address),
        )
        try:
            async with (
                self._dialer.open(address, "transfer") as channel,
                self._pulling(address) as pulls,
                AsyncExitStack() as calls,
            ):
                stub: pages_pb2_grpc.PagesAsyncStub = pages_pb2_grpc.PagesStub(channel)
                call = stub.OfferSequence(request, timeout=LONGEST_STAGE_S)
                calls.callback(call.cancel)
                source = OpenPages(address, stub, request.maps_memory)
                async for offered in call:
                    hashes += split_hashes(offered.page_hashes)
                    if not pulls:
                        await self._begin(pulls, offered.offer, source)
                    await self._bring(pulls[0], hashes, number, offered.offer)
                    number += len(offered.offer.pages)
                    pinned += self._remote.keep(hashes, len(pinned))
                    yield len(pinned)
        finally:
            self._num_stages -= 1
            self._remote.unpin(pinned)

    @asynccontextmanager
    async def _pulling(self, address: str) -> AsyncIterator[list[Pull]]:
        """At its end nobody writes into pages any more."""
        pulls: list[Pull] = []
        try:
            yield pulls
        finally:
            for pull in pulls:
                await end_pull(pull)
                self._pulls.pop(pull, None)
                self._remote.count_pull(pull.figures)
                if pull.figures.num_wrong:
                    self._arena.memories.doubt(address, is_wrong=True)

    async def _bring(self, pull: Pull, hashes: list[bytes], first: int, offer: pages_pb2.OfferResponse) -> None:
        """Pages from number `first` of the offer on, which the last of `hashes` name: those that are not here."""
        ends_at_s = time.monotonic() + _LONGEST_WAIT_S
        while self._remote.is_coming(hashes) and time.monotonic() < ends_at_s:
            await self._settled.wait(ends_at_s - time.monotonic())
        if self._remote.is_coming(hashes):
            raise PullFailed("pages of the sequence are being brought here for others, and do not come")
        if self._is_closing:
            raise PullFailed(_ENDS)
        reservation = self._remote.try_reserve(hashes)
        if reservation is None:
            return
        num_pages = 0
        try:
            missing = dict(zip(reservation.hashes, reservation.page_ids, strict=True))
            wanted = [
                self._want(number, page, missing[page_hash])
                for number, (page_hash, page) in enumerate(zip(hashes[first:], offer.pages, strict=True), start=first)
                if page_hash in missing
            ]
            if len(wanted) < len(missing):
                raise ValueError("pages that were offered before are not here any more")
            pull.want(wanted)
            await self._wait(pull)
            num_pages = len(wanted)
        finally:
            self._remote.settle(reservation, num_pages)
            self._remote.count_staged(num_pages)

    def _want(self, number: int, page: pages_pb2.OfferedPage, page_id: int) -> WantedPage:
        place = self._arena.place(page_id)
        return WantedPage(number, page.generation, page.checksum, place, page_id=page.page_id)

    async def _wait(self, pull: Pull) -> None:
        """Until what is wanted is here. However it ends, nobody writes into those pages any more."""
        waiting = asyncio.get_running_loop().run_in_executor(self._threads, pull.wait)
        waiting.add_done_callback(lambda future: future.cancelled() or future.exception())  # of one that is cancelled
        try:
            await asyncio.shield(waiting)
        except BaseException:
            await end_pull(pull)
            raise

    async def _begin(self, pulls: list[Pull], offer: pages_pb2.OfferResponse, source: OpenPages) -> None:
        """Raises ValueError, and PullFailed at the end."""
        pull = await self._arena.begin(offer, _LIMITS, LONGEST_STAGE_S, source)
        pulls.append(pull)
        self._pulls[pull] = None
        if self._is_closing:
            raise PullFailed(_ENDS)
