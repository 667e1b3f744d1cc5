"""Pulls into the pages of one arena: begun by what another host offers, and ended before its pages are anybody's."""

import asyncio
import logging
import time
from collections.abc import Callable

from weir.core.addresses import split_port
from weir.core.life import Attempt
from weir.kv.memory.page_access import PagePlace
from weir.kv.movers.frames import ID_BYTES
from weir.kv.movers.pipes import PagePipe
from weir.kv.movers.pull import PagePull, PullHello, PullLimits
from weir.wire.v1 import pages_pb2
from weir_transfer.arena import ClaimedArena

_log = logging.getLogger(__name__)
Connect = Callable[[str, int, float], PagePipe]
"""To a page stream's host and port, within so many seconds. Raises OSError."""


class ArenaPulls:
    """Of one arena."""

    def __init__(self, arena: ClaimedArena, connect: Connect) -> None:
        self.model_digest = arena.segment.model_digest
        self.page_bytes = arena.segment.geometry.page_bytes
        self._pages = arena.pages
        self._connect = connect

    def place(self, page_id: int) -> PagePlace:
        return self._pages.place(page_id)

    def begin(self, offer: pages_pb2.OfferResponse, limits: PullLimits, longest_s: float) -> PagePull:
        """Of what is offered by `offer` and those that follow it. Raises ValueError."""
        if len(offer.transfer_id) != ID_BYTES or len(offer.ticket) != ID_BYTES:
            raise ValueError(f"transfer_id and ticket must have {ID_BYTES} bytes")
        host, port = split_port(offer.stream_address)
        return PagePull(
            PullHello(offer.transfer_id, Attempt(), offer.ticket),
            self.page_bytes,
            lambda timeout_s: self._connect(host, port, timeout_s),
            limits,
            time.monotonic() + longest_s,
        )


async def end_pull(pull: PagePull) -> None:
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


async def _until_ended(pull: PagePull) -> None:
    while not await asyncio.to_thread(pull.cancel):
        _log.error("a thread that pulls pages does not end: its pages are kept until it does")
