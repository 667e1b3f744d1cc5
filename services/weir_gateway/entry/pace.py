"""New requests begin a few at a time, so that whoever comes meanwhile is heard at once."""

import asyncio
from collections import deque


class Pace:
    """Lets `num_a_turn` pass each turn of the event loop, first come, first served. What a request costs before it is
    submitted (tokens, hashes, a span, a message) would hold up everybody else's refusal, were hundreds to begin
    together."""

    def __init__(self, num_a_turn: int) -> None:
        self._num_a_turn = num_a_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def turn(self) -> None:
        """Returns when it is the caller's turn: with the loop's next one, if nobody else waits."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._pass)
        await mine

    def _pass(self) -> None:
        num_left = self._num_a_turn
        while num_left and self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # cancelled: its client has gone
                first.set_result(None)
                num_left -= 1
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._pass)
