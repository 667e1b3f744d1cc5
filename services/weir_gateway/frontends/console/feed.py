"""Snapshots of the stack for whoever watches: one a second at most, however many there are."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from weir.core.clock import Clock
from weir.core.errors import Overloaded
from weir.telemetry.described import Described
from weir.telemetry.page_cache import PageCache
from weir.telemetry.stack_snapshot import StackSnapshot
from weir_gateway.frontends.console.snapshot import StackFigures, snapshot_of
from weir_gateway.metrics.neighbours import NeighbourWatch

INTERVAL_S = 1.0
RATES_S = 5.0
LATENCIES_S = 60.0
_RETRY_S = 10.0


class Watcher:
    """Somebody who is sent snapshots."""


class StackFeed:
    """Remembers the figures of a minute, while somebody watches: a snapshot costs each process one `Describe`."""

    def __init__(
        self,
        describe: Callable[[], Described],
        watch: NeighbourWatch,
        lanes: Callable[[], tuple[str, ...]],
        clock: Clock,
        max_watchers: int,
    ) -> None:
        """`lanes`: all, from the most to the least urgent."""
        self._describe = describe
        self._watch = watch
        self._lanes = lanes
        self._clock = clock
        self._max_watchers = max_watchers
        self._watchers: set[Watcher] = set()
        self._history: deque[StackFigures] = deque()
        """In the order of their times, at least about a second apart."""
        self._kept = PageCache[str, StackSnapshot](INTERVAL_S * 0.8, clock.now_s)
        self._closed = asyncio.Event()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def snapshot(self) -> StackSnapshot:
        """As of a second ago at most. Takes as long as the slowest process, four seconds at most."""
        return await self._kept.page("", self._make)

    def join(self) -> "Watcher":
        """Who is sent snapshots from now on. Raises Overloaded where too many are."""
        if len(self._watchers) >= self._max_watchers:
            message = f"{len(self._watchers)} consoles watch this gateway, max_console_watchers is {self._max_watchers}"
            raise Overloaded(f"{message}; close one, or raise it", retry_after_s=_RETRY_S)
        watcher = Watcher()
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: "Watcher") -> None:
        """May be said twice."""
        self._watchers.discard(watcher)

    async def snapshots(self, watcher: "Watcher") -> AsyncIterator[StackSnapshot]:
        """One a second, until the watcher leaves or the feed is closed."""
        while watcher in self._watchers and not self._closed.is_set():
            yield await self.snapshot()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._closed.wait()

    def close(self) -> None:
        """Whoever watches is sent no more."""
        self._closed.set()

    async def _make(self) -> StackSnapshot:
        neighbours = await self._watch.neighbours()
        now = StackFigures(
            now_s=self._clock.now_s(),
            at_s=time.time(),
            gateway=self._describe(),
            registered=neighbours.registered,
            workers={record.worker_id: described for record, described in neighbours.workers},
            others=neighbours.others,
            lanes=self._lanes(),
            num_watchers=len(self._watchers),
        )
        while self._history and now.now_s - self._history[0].now_s > LATENCIES_S + INTERVAL_S:
            self._history.popleft()
        past = self._history[0] if self._history else None
        recent = next((one for one in self._history if now.now_s - one.now_s <= RATES_S + INTERVAL_S / 2), None)
        self._history.append(now)
        return snapshot_of(now, recent, past)
