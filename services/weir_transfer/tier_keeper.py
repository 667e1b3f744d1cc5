"""Keeps the full pages of an arena in one tier outside it, and brings them back while matches wait for them.

    sealed ─> unwritten ─> copied, unchanged meanwhile ─> written          by one thread, so many bytes a second
    begin ─> pages reserved, expected ─> read ─> cached here               by several
                └──── damaged, gone, too slow ────> given up: whoever waited computes them

Nobody waits for what is written: a page is copied without being pinned. One that was given to somebody else meanwhile
has another generation, so that its copy is thrown away.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weir.core.clock import Backoff
from weir.kv.arena.segment import Segment
from weir.kv.memory.page_access import InPlace, PageAccess
from weir.kv.prefixes import PrefixIndex
from weir.kv.tiers.page_store import PageStore
from weir.kv.tiers.prefix_reading import PrefixReading
from weir_transfer.page_tier import LoadRates, PrefillMeter, UnwrittenPages
from weir_transfer.pending_prefixes import WAIT_FROM_PAGES
from weir_transfer.remote_prefixes import RemotePrefixes, Reservation

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_LOADS, _MAX_UNTOUCHED = 8, 64
"""That read, and that have read and wait for the writer to say so to the store."""
_LONGEST_LOAD_S = 8.0
"""Less than a match waits by default: it goes on with what has come."""
_READERS_PER_LOAD, _NUM_READERS = 4, 8
_BATCH_BYTES = 16 << 20
_LEAST_PAUSE_S = 0.1
_LEAST_WAIT_S = 0.05
"""For a read: less says more of who else computes than of the files."""
_REFRESH_S = 10.0
_PROBE_S = 10.0
_LAST_WRITES_S = 3.0
"""That a service which ends may still write, without a bound of its rate."""


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """`write_bytes_per_s`: inf for a tier that nobody else waits for. `min_uses`: prompts that must have used a page
    before it is written."""

    write_bytes_per_s: float
    min_uses: int = 1


@dataclass(slots=True)
class KeeperCounters:
    """Since the start of this process."""

    loads_total: int = 0
    loads_failed_total: int = 0
    loads_declined_total: int = 0
    loaded_pages_total: int = 0
    loaded_bytes_total: int = 0
    load_seconds_total: float = 0.0
    written_pages_total: int = 0
    written_bytes_total: int = 0
    write_seconds_total: float = 0.0
    write_failures_total: int = 0
    lost_pages_total: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """What became of pages that were to be written. `left`: hashes that were not, because of `error` or for want of
    time."""

    num_written: int
    num_lost: int
    seconds: float
    left: Sequence[bytes] = ()
    error: OSError | None = None


@dataclass(frozen=True, slots=True)
class PageTier:
    """`name`: a word for figures and lines of the log."""

    name: str
    store: PageStore
    settings: KeeperSettings


class TierKeeper:
    """Of one arena and one tier. `index`: of the arena's cached prefixes; `meter`: of what is computed for it."""

    def __init__(
        self,
        segment: Segment,
        pages: PageAccess,
        remote: RemotePrefixes,
        index: PrefixIndex,
        meter: PrefillMeter,
        tier: PageTier,
    ) -> None:
        """The store is closed with it."""
        self.name = tier.name
        self._pages = pages
        self._generations: NDArray[np.uint32] = segment.page_rows["generation"]
        self._page_bytes = segment.geometry.page_bytes
        self._copy = np.empty(self._page_bytes, np.uint8)
        self._remote, self._index, self._store, self._settings = remote, index, tier.store, tier.settings
        self._unwritten = UnwrittenPages(index, tier.store.__contains__, tier.settings.min_uses)
        self._rates = LoadRates(meter)
        self._counters = KeeperCounters()
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="page reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="page writer")
        self._num_reading = 0
        self._loads: dict[asyncio.Task[None], PrefixReading] = {}
        self._has_changed, self._is_ending = asyncio.Event(), asyncio.Event()
        self._looking: asyncio.Future[None] | None = None
        self._ends_at_s = math.inf
        """No page is begun to be written after it."""
        self._unwritten.changes.listen(self._has_changed.set)
        self._writing: asyncio.Task[None] | None = None
        self._backoff = Backoff(1.0, 60.0)
        self._probed_at_s = -_PROBE_S
        self._probe_task: asyncio.Future[None] | None = None

    def start(self) -> None:
        self._writing = asyncio.create_task(self._keep_writing(), name=f"pages in {self.name}")
        self._writing.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Writes what is left, as far as there is time. Nobody writes into pages of the arena when it returns."""
        self._is_ending.set()
        self._has_changed.set()
        for reading in self._loads.values():
            reading.stop()
        try:
            if self._looking is not None:  # the writer's thread is in it: not a page is written meanwhile
                await asyncio.wait([self._looking])
            self._ends_at_s = time.monotonic() + _LAST_WRITES_S
            if self._writing is not None:
                await asyncio.wait([self._writing])
                await self._write_last()
        finally:
            if self._loads:
                await asyncio.wait(list(self._loads))
            if self._probe_task is not None:
                await asyncio.wait([self._probe_task])
            for threads in (self._readers, self._writer):
                threads.shutdown(wait=False)
            self._store.close()

    def begin(self, hashes: Sequence[bytes]) -> int:
        """What of this prefix is not here comes from the tier, if that is worth it. How many pages are to come: matches
        find them expected from here on."""
        num_cached = self._remote.try_count_cached(hashes)
        is_full = self._num_reading >= _MAX_LOADS or len(self._loads) >= _MAX_UNTOUCHED
        if num_cached is None or is_full or self._is_ending.is_set():
            return 0
        num_there = self._store.num_leading(hashes[num_cached:])
        if num_there < WAIT_FROM_PAGES:
            return 0
        if not self._rates.is_worth:
            self._counters.loads_declined_total += 1
            self._probe(hashes[num_cached : num_cached + WAIT_FROM_PAGES])
            return 0
        reservation = self._remote.try_reserve(hashes[: num_cached + min(num_there, self._remote.num_reservable)])
        if reservation is None:
            return 0
        places = [self._pages.place(page_id) for page_id in reservation.page_ids]
        reading = PrefixReading(self._store, reservation.hashes, places)
        task = asyncio.create_task(self._load(reservation, reading), name="load of a prefix")
        self._loads[task] = reading
        self._num_reading += 1
        task.add_done_callback(self._on_loaded)
        return len(reservation.hashes)

    def note_used(self, hashes: Sequence[bytes]) -> None:
        """A prompt has found these in the arena."""
        self._unwritten.note_used(hashes)
        if len(self._unwritten):
            self._has_changed.set()

    def metrics(self) -> Mapping[str, float]:
        counted = {**asdict(self._counters), **asdict(self._store.counters)}
        counted["lost_pages_total"] += self._unwritten.num_lost
        told = {
            "known_pages": self._store.num_pages,
            "bytes": self._store.num_bytes,
            "away": self._store.is_away,
            "unwritten_pages": len(self._unwritten),
            **counted,
            **self._rates.metrics(),
        }
        return {f"page_{self.name}_{name}": float(value) for name, value in told.items()}

    async def _load(self, reservation: Reservation, reading: PrefixReading) -> None:
        began_s, num_wanted = time.monotonic(), len(reservation.hashes)
        failed_before = self._store.counters.failed_reads_total
        try:
            running = await self._read(reservation, reading)
            has_failed = self._store.counters.failed_reads_total > failed_before
            if reading.num_read or running or has_failed:  # else it says nothing of the tier
                self._rates.on_loaded(reading.num_read, time.monotonic() - began_s)
            if running:
                await asyncio.wait(running)
        finally:
            num_pages = reading.num_leading
            self._num_reading -= 1
            self._remote.settle(reservation, num_pages)
        counters = self._counters
        counters.loads_total += 1
        counters.loads_failed_total += num_pages < num_wanted
        counters.loaded_pages_total += num_pages
        counters.loaded_bytes_total += num_pages * self._page_bytes
        counters.load_seconds_total += time.monotonic() - began_s
        await self._in_writer(self._store.touch, (*reservation.earlier_hashes, *reservation.hashes[:num_pages]))

    async def _read(self, reservation: Reservation, reading: PrefixReading) -> "set[asyncio.Future[None]]":
        """Those threads that did not end in time: nobody waits for this prefix any more then."""
        loop = asyncio.get_running_loop()
        runs = [loop.run_in_executor(self._readers, reading.run) for _ in range(_READERS_PER_LOAD)]
        for run in runs:
            run.add_done_callback(_log_failure)
        longest_s = self._rates.longest_s(len(reservation.hashes))
        longest_s = _LONGEST_LOAD_S if longest_s is None else min(max(longest_s, _LEAST_WAIT_S), _LONGEST_LOAD_S)
        _, running = await asyncio.wait(runs, timeout=longest_s)
        if running:
            reading.stop()
            _, running = await asyncio.wait(running, timeout=_LEAST_WAIT_S)
        if running:
            num_pages = len(reservation.hashes)
            _log.warning("%d pages do not come from %s within %.1f s", num_pages, self.name, longest_s)
            self._remote.abandon(reservation)
        return running

    def _on_loaded(self, task: "asyncio.Task[None]") -> None:
        del self._loads[task]
        _log_failure(task)

    def _probe(self, hashes: Sequence[bytes]) -> None:
        """Measures whether it would be worth it by now, with nobody waiting."""
        now_s = time.monotonic()
        if now_s < self._probed_at_s + _PROBE_S:
            return
        self._probed_at_s = now_s
        self._probe_task = asyncio.get_running_loop().run_in_executor(self._readers, self._read_apart, hashes)
        self._probe_task.add_done_callback(_log_failure)

    def _read_apart(self, hashes: Sequence[bytes]) -> None:
        began_s, place = time.monotonic(), InPlace(memoryview(bytearray(self._page_bytes)))
        failed_before = self._store.counters.failed_reads_total
        num_read = sum(self._store.try_get(page_hash, place) for page_hash in hashes)
        if not num_read and self._store.counters.failed_reads_total == failed_before:
            return
        self._rates.on_loaded(num_read, time.monotonic() - began_s)

    async def _keep_writing(self) -> None:
        """Looks every _REFRESH_S, also while what failed waits for its next try: so a server is found again."""
        refreshes_at_s, writes_at_s = time.monotonic() + _REFRESH_S, 0.0
        while not self._is_ending.is_set():
            self._has_changed.clear()
            now_s = time.monotonic()
            batch = await self._write_some() if now_s >= writes_at_s else None
            if batch is not None:
                writes_at_s = time.monotonic() + self._pause_after(batch)
            if now_s >= refreshes_at_s:
                self._looking = asyncio.ensure_future(self._in_writer(self._store.refresh))
                await self._looking
                refreshes_at_s = time.monotonic() + _REFRESH_S
            now_s = time.monotonic()
            if writes_at_s > now_s:
                await self._pause(min(writes_at_s, refreshes_at_s) - now_s)
            elif batch is None:
                await _wait(self._has_changed, _REFRESH_S)

    async def _write_last(self) -> None:
        while (batch := await self._write_some()) is not None and not batch.left:
            pass
        left = len(self._unwritten)
        if left:
            _log.warning("%d pages are not in %s: there was no time for them, or no room", left, self.name)

    async def _write_some(self) -> _Batch | None:
        """None: there is nothing to write."""
        self._unwritten.update()
        hashes = self._unwritten.take(max(1, _BATCH_BYTES // self._page_bytes))
        if not hashes:
            return None
        found = [(page_hash, self._index.find_prefix([page_hash])[0]) for page_hash in hashes]
        pages = [(page_hash, page_id, int(self._generations[page_id])) for page_hash, page_id in found]
        batch = await self._in_writer(self._write, pages)
        self._unwritten.put_back(batch.left)
        counters = self._counters
        counters.written_pages_total += batch.num_written
        counters.written_bytes_total += batch.num_written * self._page_bytes
        counters.write_seconds_total += batch.seconds
        counters.lost_pages_total += batch.num_lost
        counters.write_failures_total += batch.error is not None
        return batch

    def _write(self, pages: Sequence[tuple[bytes, int, int]]) -> _Batch:
        """In the writer's thread. Hash, page and its generation, of pages that were sealed."""
        began_s, num_written, num_lost = time.monotonic(), 0, 0
        for index, (page_hash, page_id, generation) in enumerate(pages):
            if time.monotonic() > self._ends_at_s:
                return _Batch(num_written, num_lost, time.monotonic() - began_s, _hashes_of(pages[index:]))
            try:
                np.copyto(self._copy, np.frombuffer(self._pages.read(page_id), np.uint8))
                if self._generations[page_id] != generation:  # rises before anybody else may write there
                    num_lost += 1
                    continue
                num_written += self._store.try_put(page_hash, self._copy.data)
            except OSError as error:
                left = _hashes_of(pages[index:])
                return _Batch(num_written, num_lost, time.monotonic() - began_s, left, error)
        return _Batch(num_written, num_lost, time.monotonic() - began_s)

    def _pause_after(self, batch: _Batch) -> float:
        if batch.error is None:
            self._backoff.reset()
            least_s = 0.0 if self._settings.write_bytes_per_s == math.inf else _LEAST_PAUSE_S
            return max(least_s, batch.num_written * self._page_bytes / self._settings.write_bytes_per_s)
        delay_s = self._backoff.next_delay_s()
        _log.warning("pages cannot be written to %s: %s; tried again in %.0f s", self.name, batch.error, delay_s)
        return delay_s

    async def _pause(self, seconds: float) -> None:
        await _wait(self._is_ending, seconds)

    async def _in_writer(self, function: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, function, *arguments)


def _hashes_of(pages: Sequence[tuple[bytes, int, int]]) -> list[bytes]:
    return [page_hash for page_hash, _, _ in pages]


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _log_failure(task: "asyncio.Future[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        name = task.get_name() if isinstance(task, asyncio.Task) else "a thread that reads pages"
        _log.critical("%s failed", name, exc_info=task.exception())
