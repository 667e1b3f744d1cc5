"""One bound for the bodies of requests that are being read at the same time, whatever port they come by."""

import asyncio
from collections import deque

from weir.core.errors import Overloaded

_RETRY_AFTER_S = 1.0


class BodyBudget:
    """Bytes that are taken before a body, or a part of it, is kept, and given back when it was read. Of one event loop.

    Where the size is not known before, room is taken for the largest; that is free again in no time for small ones,
    which is why `take` waits a little for it.
    """

    def __init__(self, max_bytes: int, *, wait_s: float = 1.0) -> None:
        self.max_bytes = max_bytes
        self._wait_s = wait_s
        self._num_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Taken now."""
        return self._num_bytes

    async def take(self, num_bytes: int) -> None:
        """First come, first served. Raises Overloaded when no room comes free in time; then nothing was taken."""
        if not self._waiting and self._num_bytes + num_bytes <= self.max_bytes:
            self._num_bytes += num_bytes
            return
        entry = (num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._wait_s):
                await entry[1]
        except TimeoutError:
            self._give_up(entry)
            message = f"bodies of more than {self.max_bytes} bytes are being read at once; try again later"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None
        except BaseException:
            self._give_up(entry)
            raise

    def give_back(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._serve_waiting()

    def _give_up(self, entry: tuple[int, "asyncio.Future[None]"]) -> None:
        num_bytes, served = entry
        if served.done() and not served.cancelled():  # in the very moment in which the wait ended
            self._num_bytes -= num_bytes
        elif entry in self._waiting:
            self._waiting.remove(entry)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting and self._num_bytes + self._waiting[0][0] <= self.max_bytes:
            num_bytes, served = self._waiting.popleft()
            if not served.cancelled():  # else its task is being ended, and has only not run since
                self._num_bytes += num_bytes
                served.set_result(None)
