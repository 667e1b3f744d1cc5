"""How fast one source is refused: who asks for what is refused again and again hears of it later, and asks less often.

The virtual-scheduling form of the generic cell rate algorithm (ITU-T I.371), as in `work_shares`, of answers.
"""

import asyncio
import contextlib
from collections import OrderedDict

from weir.core.clock import Clock

_PER_S = 10.0
_BURST = 20
_MAX_WAIT_S = 2.0
_MAX_WAITING = 256
"""Answers at a time: each has a connection's place. Those beyond go out at once."""
_MAX_SOURCES = 1024
"""Those that were refused last."""


class RefusalPace:
    """Ten refusals a second of one source, and twenty at once, are as fast as ever; a later one waits two seconds at
    most. What is not refused never waits here."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused_until_s: OrderedDict[str, float] = OrderedDict()
        """When all of a source's refusals would be over, one each tenth of a second."""
        self._num_waiting = 0
        self._closed = asyncio.Event()

    def close(self) -> None:
        """All that waits goes out."""
        self._closed.set()

    async def wait(self, source: str) -> None:
        """Until the answer that refuses something of this source may go out."""
        wait_s = self.wait_s(source)
        if wait_s <= 0 or self._num_waiting >= _MAX_WAITING:
            return
        self._num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closed.wait()
        finally:
            self._num_waiting -= 1

    def wait_s(self, source: str) -> float:
        """Of one more, which counts."""
        now_s, burst_s = self._clock.now_s(), _BURST / _PER_S
        until_s = max(self._refused_until_s.get(source, now_s), now_s) + 1 / _PER_S
        self._refused_until_s[source] = until_s = min(until_s, now_s + burst_s + _MAX_WAIT_S)
        self._refused_until_s.move_to_end(source)
        if len(self._refused_until_s) > _MAX_SOURCES:
            self._refused_until_s.popitem(last=False)
        return max(0.0, until_s - now_s - burst_s)
