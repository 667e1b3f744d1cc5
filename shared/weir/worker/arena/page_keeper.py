"""Between the engine's page pool and the arena: acquires what the pool wants, returns its surplus."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from weir.core.clock import Backoff
from weir.core.errors import Overloaded, Unavailable, WeirError
from weir.engine.loop import InboxFull
from weir.engine.messages import Command, EngineReport, GivePages, PageBundle, PagesWanted, SetArenaSilent
from weir.kv.messages import Acquired, PageChain
from weir.kv.prefixes import page_hashes
from weir.worker.arena.arena import Arena
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)
_FIRST_RETRY_S = 0.02
_MAX_RETRY_S = 0.2
_STOP_TIMEOUT_S = 2.0
_SILENT_AFTER_S = 0.5
"""An answer takes a millisecond, and on a busy machine some more."""
_MAX_TOKENS_HASHED_AT_ONCE = 8192  # about half a millisecond


class PageKeeper:
    """One acquisition at a time; what it got is the engine's before it looks again at what the engine wants.

    While the arena leaves one without an answer, the engine's sequences wait for pages as long as it takes.
    """

    def __init__(self, arena: Arena, post: Callable[[Command], None], request_shutdown: Callable[[str], None]) -> None:
        self._arena = arena
        self._post = post
        self._wanted: PagesWanted | None = None
        self._ahead_pages = 0
        self._ahead_slots = 0
        self._has_demand = asyncio.Event()
        self._num_given = 0
        self._num_refused = 0
        self._num_silences = 0
        self._is_silent = False
        self._ended_match_ids: list[int] = []
        self._acquiring = WorkerTasks(request_shutdown)
        self._releases = WorkerTasks(request_shutdown)

    def start(self) -> None:
        self._acquiring.spawn(self._keep_acquiring(), "page keeper")

    def on_report(self, report: EngineReport) -> "asyncio.Task[None] | None":
        """The task that returns the report's surplus; None if there is nothing to return."""
        if report.num_gives >= self._num_given:  # else it does not count the last acquisition yet
            self._wanted = report.wanted
            if self._wanted is not None:
                self._has_demand.set()
        return self.give_back(report.surplus) if report.surplus or self._ended_match_ids else None

    def anticipate(self, num_pages: int, num_slots: int) -> None:
        """Acquires what the engine will want as soon as its running step ends."""
        self._ahead_pages += num_pages
        self._ahead_slots += num_slots
        self._has_demand.set()

    def give(self, acquired: Acquired) -> None:
        """Gives the engine what came with a match."""
        if acquired.page_ids or acquired.slots:
            self._num_given += 1
            self._post(GivePages(PageBundle(acquired.page_ids, acquired.slots)))

    def end_match(self, match_id: int) -> None:
        """Its request has ended: nobody is to wait for its pages. The arena learns it with the next release."""
        self._ended_match_ids.append(match_id)

    def give_back(self, surplus: PageBundle) -> "asyncio.Task[None]":
        """Returns pages and slots to the arena; this worker must not use them any more."""
        return self._releases.spawn(self._release(surplus), "release pages")

    def give_back_sequence(self, slot: int) -> None:
        """Returns the slot of a sequence that came to this worker, and its pages as far as its record is readable."""
        summary = self._arena.segment.record(slot).summarize()
        page_ids = () if summary is None else tuple(summary.page_ids.tolist())
        self.give_back(PageBundle(page_ids, (slot,)))

    async def stop(self) -> None:
        """Ends acquiring, and waits up to 2 s for what is being returned."""
        await self._acquiring.stop()
        await self._releases.stop(_STOP_TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        return {
            "arena_refusals_total": float(self._num_refused),
            "arena_silences_total": float(self._num_silences),
            "releases_under_way": float(len(self._releases)),
        }

    async def _keep_acquiring(self) -> None:
        backoff = Backoff(_FIRST_RETRY_S, _MAX_RETRY_S)
        while True:
            await self._has_demand.wait()
            wanted = self._take_wanted()
            acquired = await self._try_acquire(wanted) if wanted is not None else None
            if acquired is not None:
                backoff.reset()
                self._wanted = None
                self.give(acquired)
            if self._wanted is None and not self._ahead_pages:
                self._set_silent(False)  # whoever waited is gone
                self._has_demand.clear()
            elif acquired is None:  # the arena is full until others give back, or does not answer
                await asyncio.sleep(backoff.next_delay_s())

    def _take_wanted(self) -> PagesWanted | None:
        """The engine's own demand counts first; it includes what was anticipated and did not come in time."""
        ahead = PagesWanted(self._ahead_pages, self._ahead_slots, least_pages=0, least_slots=0)
        self._ahead_pages = self._ahead_slots = 0
        if self._wanted is not None:
            return self._wanted
        return ahead if ahead.num_pages else None

    async def _try_acquire(self, wanted: PagesWanted) -> Acquired | None:
        """All that is wanted; failing that, the least that lets a sequence go on; None when not even that is free."""
        try:
            return await self._acquire(wanted.num_pages, wanted.num_slots)
        except Overloaded:
            self._num_refused += 1
        except Unavailable as error:
            _log.warning("no pages: %s", error)
            return None
        if not (wanted.least_pages or wanted.least_slots):
            return None
        try:
            return await self._acquire(wanted.least_pages, wanted.least_slots)
        except (Overloaded, Unavailable):
            return None

    async def _acquire(self, num_pages: int, num_slots: int) -> Acquired:
        """Raises Overloaded, which is an answer, or Unavailable, which is none."""
        silence = asyncio.get_running_loop().call_later(_SILENT_AFTER_S, self._set_silent, True)
        try:
            acquired = await self._arena.acquire(num_pages, num_slots)
        except Overloaded:
            self._set_silent(False)
            raise
        else:
            self._set_silent(False)
            return acquired
        finally:
            silence.cancel()

    def _set_silent(self, is_silent: bool) -> None:
        if is_silent == self._is_silent:
            return
        try:
            self._post(SetArenaSilent(is_silent))
        except InboxFull as error:  # the next acquisition says it
            _log.warning("the engine does not learn that the arena is %s: %s", "silent" if is_silent else "back", error)
            return
        self._is_silent = is_silent
        self._num_silences += is_silent

    async def _release(self, surplus: PageBundle) -> None:
        match_ids, self._ended_match_ids = self._ended_match_ids, []
        chains = []
        for used in surplus.used:
            hashes = await hash_pages(used.token_ids, used.prefix_seed) if self._arena.keeps_prefixes else ()
            chains.append(PageChain.of_sequence(used.page_ids, used.first_page, hashes))
        try:
            await self._arena.release(surplus.page_ids, surplus.slots, chains, match_ids)
        except WeirError as error:  # the client sees to it that they are returned when the service is back
            num_pages = len(surplus.page_ids) + sum(len(chain.page_ids) for chain in chains)
            _log.warning("%d pages are returned later: %s", num_pages, error)


async def hash_pages(token_ids: Sequence[int], seed: bytes) -> tuple[bytes, ...]:
    """`page_hashes`; those of a long text in a thread, so that the event loop does not wait."""
    if len(token_ids) <= _MAX_TOKENS_HASHED_AT_ONCE:
        return page_hashes(token_ids, seed)
    return await asyncio.to_thread(page_hashes, token_ids, seed)
