"""What another host offers of a prefix, as its receiver reads it."""

import asyncio
from collections.abc import AsyncIterator

from weir.kv.movers.pull import PullFailed
from weir.wire.v1 import pages_pb2


class OfferReader:
    """One call of `Pages/Offer`, read one answer ahead: that it has ended is known while pages are pulled. Make it in
    the event loop."""

    def __init__(self, offers: AsyncIterator[pages_pb2.OfferResponse]) -> None:
        self._offers = offers
        self.next = self._read()
        """The answer behind the last one that was taken. Ends with AioRpcError or PullFailed where the call does."""

    async def try_take(self, timeout_s: float) -> pages_pb2.OfferResponse | None:
        """The next answer; None: not within `timeout_s`. Raises AioRpcError, PullFailed."""
        await asyncio.wait({self.next}, timeout=timeout_s)
        if not self.next.done():
            return None
        offered = self.next.result()
        self.next = self._read()
        return offered

    def close(self) -> None:
        """Reads no more."""
        self.next.cancel()

    def _read(self) -> "asyncio.Task[pages_pb2.OfferResponse]":
        reading = asyncio.create_task(self._read_next(), name="next offer")
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may interest nobody any more
        return reading

    async def _read_next(self) -> pages_pb2.OfferResponse:
        try:
            return await anext(self._offers)
        except StopAsyncIteration:
            raise PullFailed("the other host has ended its offer") from None
