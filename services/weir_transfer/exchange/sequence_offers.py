"""Offers the pages of a sequence that is about to go on at another host, while it goes on here.

found ─> full pages sealed, pinned, offered ─> a further page is full ─> … ─> ended, not to be shared, or too late
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator

from weir.core.life import Attempt
from weir.kv.movers.frames import ID_BYTES
from weir.kv.movers.source import PageSource
from weir.wire.v1 import pages_pb2
from weir_transfer.exchange.offered_from import OfferedFrom, which_are_checked
from weir_transfer.exchange.running_sequences import RunningSequences
from weir_transfer.remote_prefixes import RemotePrefixes

LONGEST_STAGE_S = 10.0
_LOOK_AGAIN_S = 0.005
"""A record is some microseconds to look at, and nobody says when it has grown; a step takes longer than this."""


class SequenceOffers:
    """Of one arena."""

    def __init__(self, remote: RemotePrefixes, running: RunningSequences, source: PageSource) -> None:
        self._remote = remote
        self._running = running
        self._source = source

    async def offer(
        self, request: pages_pb2.OfferSequenceRequest, from_where: OfferedFrom
    ) -> AsyncGenerator[pages_pb2.OfferSequenceResponse]:
        """To be closed: until then its pages are pinned."""
        request_id = request.request_id
        transfer_id, ticket = secrets.token_bytes(ID_BYTES), secrets.token_bytes(ID_BYTES)
        loop, slot, page_ids, num_offered = asyncio.get_running_loop(), self._running.find(request_id), list[int](), -1
        ends_at_s = loop.time() + LONGEST_STAGE_S
        self._source.offer(transfer_id, Attempt(), ticket)
        try:
            while slot is not None and loop.time() < ends_at_s:
                num_full = self._running.num_full_pages(slot, request_id)
                if num_full is None:
                    return
                hashes = self._running.try_seal(slot, request_id) if num_full > num_offered else None
                if hashes is not None:
                    num_offered, first = num_full, len(page_ids)
                    page_ids += self._remote.pin(hashes, first)
                    # In a thread: of a long sequence it reads some hundred megabytes. And the locks on the way there
                    # order memory, so that what the record says is computed is what is read.
                    checked = which_are_checked(first, maps_memory=request.maps_memory)
                    pages = await asyncio.to_thread(
                        self._source.append, transfer_id, page_ids[first:], are_checked=checked
                    )
                    yield pages_pb2.OfferSequenceResponse(
                        offer=from_where.answer(transfer_id, ticket, [(page, b"") for page in pages]),
                        page_hashes=b"".join(hashes[first : len(page_ids)]),
                    )
                    if len(hashes) < num_full:
                        return
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._source.withdraw(transfer_id)
            self._remote.unpin(page_ids)
