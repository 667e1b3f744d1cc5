"""`weir.v1.Pages`: offers cached pages to the transfer services of other hosts, and lets their page streams in."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from weir.core.life import Attempt
from weir.kv.memory.page_access import PageMemoryAway
from weir.kv.movers.frames import ID_BYTES
from weir.kv.movers.source import PageSource
from weir.kv.prefixes import split_hashes
from weir.wire.v1 import pages_pb2, pages_pb2_grpc
from weir_transfer.arena import ClaimedArena
from weir_transfer.change_signal import ChangeSignal
from weir_transfer.exchange.offered_from import OfferedFrom, which_are_checked
from weir_transfer.exchange.sequence_offers import SequenceOffers
from weir_transfer.remote_prefixes import RemotePrefixes

_log = logging.getLogger(__name__)
LONGEST_OFFER_S = 30.0
"""Then it ends, and its pages are not pinned any more."""
MAX_OFFERS = 64
_LOOK_AGAIN_S = 0.1
_EXPECTED_S = 3.5
"""For a worker to begin with what it was asked to compute, behind other prompts; before who fetches gives up."""


class PagesService(pages_pb2_grpc.PagesServicer):
    """Of one arena."""

    def __init__(
        self,
        arena: ClaimedArena,
        remote: RemotePrefixes,
        source: PageSource,
        from_where: OfferedFrom,
        settled: ChangeSignal,
        sequences: SequenceOffers,
    ) -> None:
        """`settled` is notified when more may be cached."""
        self._settled = settled
        self._digest = arena.segment.model_digest
        self._page_bytes = arena.segment.geometry.page_bytes
        self._remote = remote
        self._source = source
        self._from_where = from_where
        self._sequences = sequences
        self._num_offers = 0

    async def Offer(  # noqa: N802 - names on the wire
        self, request: pages_pb2.OfferRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pages_pb2.OfferResponse]:
        await self._check(request, context)
        try:
            hashes = split_hashes(request.page_hashes)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._num_offers += 1
        try:
            async with aclosing(self._offer(request, hashes)) as offers:
                async for offered in offers:
                    yield offered
        except PageMemoryAway as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; compute it")
        finally:
            self._num_offers -= 1

    async def _offer(
        self, request: pages_pb2.OfferRequest, hashes: Sequence[bytes]
    ) -> AsyncGenerator[pages_pb2.OfferResponse]:
        """To be closed: until then its pages are pinned. Raises PageMemoryAway."""
        transfer_id, ticket = secrets.token_bytes(ID_BYTES), secrets.token_bytes(ID_BYTES)
        loop, page_ids = asyncio.get_running_loop(), list[int]()
        began_s, is_first, is_last = loop.time(), True, False
        ends_at_s, begins_by_s = began_s + LONGEST_OFFER_S, began_s + _EXPECTED_S * request.is_expected
        self._source.offer(transfer_id, Attempt(), ticket)
        try:
            while not is_last:
                num_offered = request.num_held_pages + len(page_ids)
                more = self._remote.pin(hashes, num_offered)
                page_ids += more
                is_last = not self._remote.is_next_coming(hashes, num_offered + len(more))
                if is_last and num_offered + len(more) < len(hashes):
                    is_last = loop.time() >= begins_by_s
                # In a thread: of a long prompt it reads some hundred megabytes.
                checked = which_are_checked(len(page_ids) - len(more), maps_memory=request.maps_memory)
                pages = await asyncio.to_thread(self._source.append, transfer_id, more, are_checked=checked)
                if pages or is_last or is_first:  # what the first one takes is the round trip
                    is_first = False
                    named = zip(pages, hashes[num_offered:], strict=False)
                    yield self._from_where.answer(transfer_id, ticket, named, is_last=is_last)
                if not is_last:
                    # Not longer: something may have settled since it was looked at.
                    await self._settled.wait(min(_LOOK_AGAIN_S, ends_at_s - loop.time()))
                    is_last = loop.time() > ends_at_s
            await asyncio.sleep(ends_at_s - loop.time())
            _log.warning("an offer of %d pages was not ended by its caller within %g s", len(page_ids), LONGEST_OFFER_S)
        finally:
            self._source.withdraw(transfer_id)
            self._remote.unpin(page_ids)

    async def OfferSequence(  # noqa: N802
        self, request: pages_pb2.OfferSequenceRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pages_pb2.OfferSequenceResponse]:
        await self._check(request, context)
        self._num_offers += 1
        try:
            async with aclosing(self._sequences.offer(request, self._from_where)) as offers:
                async for offered in offers:
                    yield offered
        except PageMemoryAway as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; compute it")
        finally:
            self._num_offers -= 1

    async def Confirm(  # noqa: N802
        self, request: pages_pb2.ConfirmRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pages_pb2.ConfirmResponse:
        if not self._source.holds(request.transfer_id, request.ticket):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such offer is open, or a page is not what was offered")
        return pages_pb2.ConfirmResponse()

    async def _check(
        self,
        request: pages_pb2.OfferRequest | pages_pb2.OfferSequenceRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        """Aborts the call of who has another model, and one too many."""
        if (request.model_digest, request.page_bytes) != (self._digest, self._page_bytes):
            message = f"this arena has model_digest {self._digest!r} and page_bytes {self._page_bytes}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        if self._num_offers >= MAX_OFFERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_OFFERS} offers are open; compute it")
