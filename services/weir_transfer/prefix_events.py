"""Publishes what the arena's prefix cache has, so that the scheduler places prompts where their prefix is.

Hints alone: without a bus nothing is published, nothing waits, and prompts are placed by load.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from opentelemetry.trace import Tracer

from weir.bus.codec import encode, version_headers
from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import MAX_HASHES, SCHEDULER_HASH_BYTES
from weir.bus.prefix_news import AskPrefixes, PrefixChanged, PrefixFetched, PrefixSnapshot
from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.tasks import end_tasks
from weir.kv.prefixes import PrefixIndex

_log = logging.getLogger(__name__)
_PERIOD_S = 0.1
_MAX_SILENCE_S = 1.0
_RECONNECT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0


class PrefixEventPublisher:
    """At most ten messages a second, at least one; the whole index on request."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        subjects: Subjects,
        arena_id: str,
        incarnation: int,
        index: PrefixIndex,
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        """`incarnation` is higher than that of any earlier process of this memory."""
        self._connect = connect
        self._subjects = subjects
        self._arena_id = arena_id
        self._incarnation = incarnation
        self._index = index
        self._tracer = tracer
        self._clock = clock
        self._bus: Bus | None = None
        self._endpoint: BusEndpoint | None = None
        self._next_sequence = 0
        self._published_at_s = clock.now_s()
        self._take_fetched: Callable[[], tuple[PrefixFetched, ...]] = tuple
        self._num_published = 0
        self._num_failures = 0
        self._has_changed = asyncio.Event()
        index.changes.listen(self._has_changed.set)
        self._task: asyncio.Task[None] | None = None

    def tell_of_fetches(self, take: Callable[[], tuple[PrefixFetched, ...]]) -> None:
        """What `take` returns is published too, with what is to be said anyway."""
        self._take_fetched = take

    def start(self) -> None:
        """Returns at once; a bus that cannot be reached is tried again for ever."""
        self._task = asyncio.create_task(self._keep_publishing(), name="prefix events")
        self._task.add_done_callback(_log_failure)

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if self._endpoint is not None:
                    await self._endpoint.close()
                if self._bus is not None:
                    await self._bus.close()
        except (BusError, TimeoutError) as error:
            _log.info("the connection to the bus did not close in order: %s", error or "no answer")

    def metrics(self) -> dict[str, float]:
        return {
            "prefix_events_total": float(self._num_published),
            "prefix_events_failures_total": float(self._num_failures),
        }

    async def _keep_publishing(self) -> None:
        while True:
            try:
                bus = await self._connected_bus()
                await self._publish(bus)
            except (BusError, TimeoutError) as error:
                self._num_failures += 1
                if self._num_failures == 1:
                    _log.warning("cached prefixes are not published: %s (further failures are counted)", error)
                await asyncio.sleep(_RECONNECT_S)
            else:
                await asyncio.sleep(_PERIOD_S)
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Or until something has to be said anyway."""
        left_s = self._published_at_s + _MAX_SILENCE_S - self._clock.now_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left_s)):
                await self._has_changed.wait()

    async def _connected_bus(self) -> Bus:
        if self._bus is None:
            self._bus = await self._connect()
        if self._endpoint is None:
            endpoint = BusEndpoint(self._bus, self._tracer)
            await endpoint.serve(self._subjects.prefixes_of(self._arena_id), AskPrefixes, self._on_ask)
            self._endpoint = endpoint
        return self._bus

    async def _on_ask(self, ask: AskPrefixes) -> PrefixSnapshot | None:
        if ask.arena_id != self._arena_id or self._bus is None:
            return None
        await self._publish(self._bus, is_asked=True)
        hashes = _packed(islice(self._index.hashes(), MAX_HASHES))
        return PrefixSnapshot(self._arena_id, self._incarnation, self._next_sequence - 1, hashes)

    async def _publish(self, bus: Bus, *, is_asked: bool = False) -> None:
        """Whatever becomes of the message, its number is used: the next one shows the gap."""
        now_s = self._clock.now_s()
        self._has_changed.clear()
        changes = self._index.changes.take()
        if not (changes is None or changes or is_asked or now_s - self._published_at_s >= _MAX_SILENCE_S):
            return
        num_pages = len(self._index)
        is_first = self._next_sequence == 0
        if changes is None and not is_first:
            self._next_sequence += 1  # this number is never sent
        added = islice(self._index.hashes(), MAX_HASHES) if is_first else iter(changes.added if changes else ())
        message = PrefixChanged(
            arena_id=self._arena_id,
            incarnation=self._incarnation,
            sequence=self._next_sequence,
            num_pages=num_pages if num_pages <= MAX_HASHES else None,
            added=_packed(added),
            evicted=_packed(changes.evicted if changes and not is_first else ()),
            fetched=self._take_fetched(),
        )
        self._next_sequence += 1
        self._published_at_s = now_s
        await bus.publish(self._subjects.prefixes, encode(message), version_headers())
        self._num_published += 1


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("cached prefixes are not published any more", exc_info=task.exception())


def _packed(hashes: Iterable[bytes]) -> bytes:
    return b"".join(page_hash[:SCHEDULER_HASH_BYTES] for page_hash in hashes)
