"""Room for the bodies of requests that are being read at the same time, whatever port they come by."""

import asyncio
from dataclasses import dataclass

from weir.core.errors import WeirError
from weir.core.shares import Holder, SharedRoom
from weir.core.turns import TurnQueue


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    caller: Holder
    num_bytes: int
    served: "asyncio.Future[None]"


class BodyBudget:
    """One bound for all of them, and of it a share for each tenant.

    Bytes are taken before a body, or a part of it, is kept, and given back when it was read. Of one event loop.
    `sure_bytes`: so many a tenant may have whatever others hold, if there is room.

    Where the size is not known before, room is taken for the largest; that is free again in no time for small ones,
    which is why `take` waits a little for it.
    """

    def __init__(self, max_bytes: int, *, sure_bytes: int = 0, wait_s: float = 1.0) -> None:
        self.max_bytes = max_bytes
        self._wait_s = wait_s
        self._room = SharedRoom(max_bytes, sure_bytes, "bytes for bodies that are read at once")
        self._waiting: TurnQueue[_Wait] = TurnQueue()

    @property
    def num_bytes(self) -> int:
        """Taken now."""
        return self._room.num_taken

    async def take(self, num_bytes: int, caller: Holder) -> None:
        """Tenants take turns; of one first come, first served. Raises Overloaded when no room comes free in time, and
        QuotaExceeded where its share is why; then nothing was taken."""
        if not self._waiting and self._room.fits(num_bytes) and self._room.within_share(caller, num_bytes):
            self._room.take(caller, num_bytes)
            return
        loop = asyncio.get_running_loop()
        wait = _Wait(caller, num_bytes, loop.create_future())
        self._waiting.add(caller.tenant, wait)
        self._serve_waiting()
        if wait.served.done():
            return
        timer = loop.call_later(self._wait_s, self._refuse, wait)
        try:
            await wait.served
        except asyncio.CancelledError:
            self._give_up(wait)
            raise
        finally:
            timer.cancel()

    def give_back(self, num_bytes: int, caller: Holder) -> None:
        self._room.give_back(caller, num_bytes)
        self._serve_waiting()

    def _refuse(self, wait: _Wait) -> None:
        if not wait.served.done():
            wait.served.set_exception(self._refusal(wait))
            self._waiting.try_remove(wait.caller.tenant, wait)
            self._serve_waiting()

    def _refusal(self, wait: _Wait) -> WeirError:
        caller, head = wait.caller, self._waiting.try_head(wait.caller.tenant) or wait
        is_within = self._room.within_share(caller, head.num_bytes)
        return self._room.full() if is_within else self._room.over_share(caller)

    def _give_up(self, wait: _Wait) -> None:
        if wait.served.done() and not wait.served.cancelled() and wait.served.exception() is None:
            self._room.give_back(wait.caller, wait.num_bytes)  # in the very moment in which the wait ended
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while (wait := self._try_next()) is not None:
            self._waiting.pop(wait.caller.tenant)
            if not wait.served.cancelled():  # else its task is being ended, and has only not run since
                self._room.take(wait.caller, wait.num_bytes)
                wait.served.set_result(None)

    def _try_next(self) -> _Wait | None:
        """Whose turn it is: nobody goes before one for whom there is no room yet, but before one who has his share."""
        for _, wait in self._waiting.heads():
            if wait.served.cancelled():
                return wait
            if self._room.within_share(wait.caller, wait.num_bytes):
                return wait if self._room.fits(wait.num_bytes) else None
        return None
