"""Pulls into the pages of one arena: begun by what another host offers, and ended before its pages are anybody's."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from weir.core.addresses import split_port
from weir.core.life import Attempt
from weir.kv.memory.page_access import PagePlace
from weir.kv.movers.direct import DirectPull
from weir.kv.movers.frames import ID_BYTES
from weir.kv.movers.pipes import PagePipe
from weir.kv.movers.pull import Pull, PullFailed
from weir.kv.movers.stream_pull import PagePull, PullHello, PullLimits
from weir.wire.v1 import pages_pb2, pages_pb2_grpc
from weir_transfer.arena import ClaimedArena
from weir_transfer.exchange.peer_memory import PeerMemories

_log = logging.getLogger(__name__)
_CONFIRMED_WITHIN_S = 2.0
Connect = Callable[[str, int, float], PagePipe]
"""To a page stream's host and port, within so many seconds. Raises OSError."""


@dataclass(frozen=True, slots=True)
class OpenPages:
    """Another arena's `Pages`, called now. `maps_memory`: it was told so."""

    address: str
    stub: "pages_pb2_grpc.PagesAsyncStub"
    maps_memory: bool


class ArenaPulls:
    """Of one arena."""

    def __init__(self, arena: ClaimedArena, connect: Connect, memories: PeerMemories) -> None:
        self.memories = memories
        self.model_digest = arena.segment.model_digest
        self.page_bytes = arena.segment.geometry.page_bytes
        self._pages = arena.pages
        self._connect = connect

    def place(self, page_id: int) -> PagePlace:
        return self._pages.place(page_id)

    async def begin(
        self,
        offer: pages_pb2.OfferResponse,
        limits: PullLimits,
        longest_s: float,
        source: OpenPages,
    ) -> Pull:
        """Of what is offered by `offer` and those that follow it: from the source's memory where that is mapped here,
        else over streams. Raises ValueError, and PullFailed where it was to be mapped and cannot be."""
        if len(offer.transfer_id) != ID_BYTES or len(offer.ticket) != ID_BYTES:
            raise ValueError(f"transfer_id and ticket must have {ID_BYTES} bytes")
        ends_at_s = time.monotonic() + longest_s
        memory = await self.memories.try_map(source.address, offer)
        if memory is not None:
            confirm = Confirming(source.stub, offer, asyncio.get_running_loop())
            return DirectPull(memory, self.page_bytes, confirm, ends_at_s)
        if source.maps_memory:
            raise PullFailed("its memory cannot be mapped any more")
        host, port = split_port(offer.stream_address)
        return PagePull(
            PullHello(offer.transfer_id, Attempt(), offer.ticket),
            self.page_bytes,
            lambda timeout_s: self._connect(host, port, timeout_s),
            limits,
            ends_at_s,
        )


class Confirming:
    """Asks the source, from a thread of a pull."""

    def __init__(
        self,
        stub: "pages_pb2_grpc.PagesAsyncStub",
        offer: pages_pb2.OfferResponse,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._stub = stub
        self._request = pages_pb2.ConfirmRequest(transfer_id=offer.transfer_id, ticket=offer.ticket)
        self._loop = loop

    def __call__(self, timeout_s: float) -> bool:
        """Also False where it cannot be asked: the channel is closed, or the loop, while a copy still ran."""
        question = self._ask(min(timeout_s, _CONFIRMED_WITHIN_S))
        try:
            asking = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError as error:
            question.close()
            _log.info("what was copied is not confirmed: %s", error)
            return False
        try:
            return asking.result(_CONFIRMED_WITHIN_S + 1)
        except Exception as error:  # noqa: BLE001 -- nothing that is wrong with asking is a confirmation
            asking.cancel()
            _log.info("what was copied is not confirmed: %s", str(error) or type(error).__name__)
            return False

    async def _ask(self, timeout_s: float) -> bool:
        try:
            await self._stub.Confirm(self._request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            _log.info("what was copied is not confirmed: %s", error.code().name)
            return False
        return True


async def end_pull(pull: Pull) -> None:
    """Returns when nobody writes into its pages any more, however often it is cancelled: until then they can be given
    to nobody."""
    ending, cancelled = asyncio.ensure_future(_until_ended(pull)), None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _until_ended(pull: Pull) -> None:
    while not await asyncio.to_thread(pull.cancel):
        _log.error("a thread that pulls pages does not end: its pages are kept until it does")
