"""How many connections of a port may ask at a time, and how many may rest."""

import asyncio
from collections.abc import Callable


class ConnectionBook:
    """Connections of one port by whether they rest: on those nothing has been asked, or all is answered.

    Over `max_resting` the one that has rested longest is closed: it would come back anyway, and idle connections keep
    nobody out. Over `max_busy` a request is answered with 503.
    """

    def __init__(self, max_busy: int, max_resting: int) -> None:
        self._max_busy = max_busy
        self._max_resting = max_resting
        self._num = 0
        self._resting: dict[asyncio.Protocol, Callable[[], None]] = {}
        """With what closes it; the one that has rested longest comes first."""
        self._num_closed = 0

    def metrics(self) -> dict[str, float]:
        return {
            "http_connections": float(self._num),
            "http_connections_resting": float(len(self._resting)),
            "http_connections_closed_for_others_total": float(self._num_closed),
        }

    def open(self) -> None:
        self._num += 1

    def rest(self, connection: asyncio.Protocol, close: Callable[[], None]) -> None:
        self._resting.pop(connection, None)
        self._resting[connection] = close
        if len(self._resting) > self._max_resting:
            self._num_closed += 1
            close_oldest = self._resting.pop(next(iter(self._resting)))
            close_oldest()

    def wake(self, connection: asyncio.Protocol) -> None:
        self._resting.pop(connection, None)

    def lose(self, connection: asyncio.Protocol) -> None:
        self.wake(connection)
        self._num -= 1

    def has_room(self, connection: asyncio.Protocol) -> bool:
        """For a request on a connection that rests, or whose last one is just answered."""
        num_others_busy = self._num - len(self._resting) - (connection not in self._resting)
        return num_others_busy < self._max_busy
