"""An arena without processes: the core of the transfer service over a segment in anonymous memory, and its clients.

`InMemoryArenaClient` obeys the contract of `weir.rpc.arena.client.ArenaClient`, but its `match` never waits.
"""

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from weir.core.clock import ManualClock
from weir.core.errors import InternalError, Unavailable
from weir.core.life import Attempt
from weir.core.process import own_identity
from weir.kv.arena.ownership import NotOwned
from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import SegmentHeader, layout_of
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import Acquired, HandedOff, HandOffReceipt, PageChain, PrefixMatch, PrefixSource
from weir.kv.movers.mover import SharedMemoryMover
from weir.kv.prefixes import PrefixIndex
from weir_transfer.core import ArenaCore
from weir_transfer.lease_keeper import Countdowns
from weir_transfer.messages import (
    AdoptionOff,
    ArenaSettings,
    Attachment,
    HandOffRequest,
    LeaseRegistration,
    MatchRequest,
    ReceiverGone,
    RecordMismatch,
)

_DIGEST = "digest"


class InMemoryArena:
    """One arena. Its clock stands still, so no lease ends by silence.

    `before_hand_off` is awaited in each hand-off before it is committed, `before_match` in each match and
    `before_release` in each release, to wait or to raise what a client raises.
    """

    def __init__(self, geometry: ArenaGeometry, *, is_alone: bool = True) -> None:
        """`is_alone`: nobody adopts what a decode worker leaves."""
        header = SegmentHeader(geometry, arena_id="memory", model_digest=_DIGEST, pid_namespace=0)
        mapping = mmap.mmap(-1, layout_of(geometry).total_bytes)
        self.segment = Segment(Path(os.devnull), header, mapping, lock_fd=None)
        self.segment.counters["next_lease_id"] = self.segment.counters["next_attachment"] = 1
        mover, countdowns = SharedMemoryMover(geometry.num_pages), Countdowns(ManualClock(), tick_s=1.0)
        settings = ArenaSettings(heartbeat_interval_ms=1000, lease_ttl_ms=2000, adoption_wait_ms=0 if is_alone else 1)
        self._core = ArenaCore(
            self.segment, mover, countdowns, settings, on_settled=lambda: None, on_lease_end=lambda: None
        )
        self.before_hand_off: Callable[[str], object] = lambda request_id: None
        self.before_match: Callable[[], object] = lambda: None
        self.before_release: Callable[[], object] = lambda: None
        self.stage: Callable[[str, str], AsyncGenerator[int]] = _no_stage
        self.sources: list[PrefixSource | None] = []
        """What each match named."""
        self._attachments: dict[str, Attachment] = {}
        self._listeners: dict[int, Callable[[HandedOff], None]] = {}
        self._dead: set[str] = set()

    @property
    def prefixes(self) -> PrefixIndex:
        return self._core.prefixes

    @property
    def num_free_pages(self) -> int:
        """Those that can be acquired: cached ones are."""
        metrics = self._core.metrics()
        return int(metrics["free_pages"] + metrics["cached_pages"])

    @property
    def num_free_slots(self) -> int:
        return int(self._core.metrics()["free_slots"])

    @property
    def num_hand_offs(self) -> int:
        return int(self._core.metrics()["handoffs_total"])

    def attach(self, worker_id: str, on_handed_off: Callable[[HandedOff], None]) -> None:
        self._listeners[self._lease(worker_id)[0]] = on_handed_off

    def detach(self, worker_id: str) -> None:
        """Frees all that the worker holds, but for what another one of its role adopts."""
        if worker_id in self._dead:
            return
        lease_id, attachment = self._lease(worker_id)
        del self._attachments[worker_id]
        self._core.detach(lease_id, attachment)
        for announcement in self._core.adopt_orphans():
            self._listeners[announcement.lease_id](announcement.sequence)
        self._core.tick()

    def end_process(self, worker_id: str) -> None:
        """The worker's process has exited; whatever it still asks for is not heard."""
        self.detach(worker_id)
        self._dead.add(worker_id)

    def set_draining(self, worker_id: str, *, is_draining: bool) -> None:
        if worker_id not in self._dead:
            lease_id, attachment = self._lease(worker_id)
            self._core.heartbeat(lease_id, attachment, is_draining=is_draining)

    def acquire(self, worker_id: str, num_pages: int, num_slots: int) -> Acquired:
        return self._core.acquire(*self._lease(worker_id), num_pages, num_slots)

    def match(self, worker_id: str, request: MatchRequest) -> PrefixMatch:
        match = self._core.match(*self._lease(worker_id), request, wait_from_pages=None)
        assert match is not None
        return match

    def seal(self, worker_id: str, chain: PageChain) -> None:
        self._core.seal(*self._lease(worker_id), chain)

    def release(
        self, worker_id: str, chains: Sequence[PageChain], slots: Sequence[int], match_ids: Sequence[int] = ()
    ) -> None:
        try:
            self._core.release(*self._lease(worker_id), chains, slots, match_ids)
        except NotOwned as error:
            raise ValueError(str(error)) from error

    def hand_off(self, worker_id: str, request: HandOffRequest) -> HandOffReceipt:
        try:
            committed = self._core.hand_off(*self._lease(worker_id), request)
        except ReceiverGone as error:
            raise Unavailable(str(error)) from error
        except (RecordMismatch, NotOwned, AdoptionOff) as error:
            raise InternalError(str(error)) from error
        assert committed.announcement is not None, "no call is repeated here"
        self._listeners[committed.announcement.lease_id](committed.announcement.sequence)
        return committed.receipt

    def _lease(self, worker_id: str) -> tuple[int, int]:
        """Lease and attachment of a worker, which attaches by its first call."""
        if worker_id in self._dead:
            raise Unavailable(f"{worker_id} has exited")
        if worker_id not in self._attachments:
            page_bytes = self.segment.geometry.page_bytes
            role = worker_id.split("-", maxsplit=1)[0]
            registration = LeaseRegistration(worker_id, role, own_identity(), page_bytes, _DIGEST)
            self._attachments[worker_id] = self._core.attach(registration)
        attachment = self._attachments[worker_id]
        return attachment.lease_id, attachment.number


class InMemoryArenaClient:
    """One worker's lease on an `InMemoryArena`."""

    def __init__(self, arena: InMemoryArena, worker_id: str, on_handed_off: Callable[[HandedOff], None]) -> None:
        self._arena = arena
        self._worker_id = worker_id
        self._on_handed_off = on_handed_off
        self._is_open = False
        self.lost = asyncio.Event()

    @property
    def segment(self) -> Segment:
        if not self._is_open:
            raise RuntimeError("the segment is mapped between start() and close()")
        return self._arena.segment

    @property
    def memory(self) -> ArenaMemory:
        return ArenaMemory(self.segment)

    @property
    def keeps_prefixes(self) -> bool:
        return True

    @property
    def pages_address(self) -> str:
        return ""

    async def start(self) -> None:
        self._arena.attach(self._worker_id, self._on_handed_off)
        self._is_open = True

    def set_draining(self, *, is_draining: bool) -> None:
        self._arena.set_draining(self._worker_id, is_draining=is_draining)

    async def acquire(self, num_pages: int, num_slots: int) -> Acquired:
        await asyncio.sleep(0)
        return self._arena.acquire(self._worker_id, num_pages, num_slots)

    async def match(
        self,
        hashes: Sequence[bytes],
        num_pages: int,
        num_slots: int,
        most_pages_ahead: int | None = None,
        source: PrefixSource | None = None,
    ) -> PrefixMatch:
        self._arena.sources.append(source)
        await _wait_for(self._arena.before_match())
        request = MatchRequest(tuple(hashes), num_pages, num_slots, most_pages_ahead)
        return self._arena.match(self._worker_id, request)

    async def seal(self, chain: PageChain) -> None:
        await asyncio.sleep(0)
        self._arena.seal(self._worker_id, chain)

    async def release(
        self,
        page_ids: Sequence[int],
        slots: Sequence[int],
        chains: Sequence[PageChain] = (),
        match_ids: Sequence[int] = (),
    ) -> None:
        await _wait_for(self._arena.before_release())
        self._arena.release(self._worker_id, [PageChain(tuple(page_ids)), *chains], slots, match_ids)

    async def hand_off(
        self, slot: int, request_id: str, attempt: Attempt, to_worker_id: str, hashes: Sequence[bytes] = ()
    ) -> HandOffReceipt:
        try:
            await _wait_for(self._arena.before_hand_off(request_id))
        except (Unavailable, InternalError):
            raise
        except BaseException:
            self._take_back(slot)
            raise
        request = HandOffRequest(slot, request_id, attempt, to_worker_id, tuple(hashes))
        return self._arena.hand_off(self._worker_id, request)

    async def stage(self, request_id: str, pages_address: str) -> AsyncGenerator[int]:
        """What another host would send."""
        async for num_pages in self._arena.stage(request_id, pages_address):
            yield num_pages

    async def close(self) -> None:
        self._arena.detach(self._worker_id)
        self._is_open = False

    def _take_back(self, slot: int) -> None:
        """A hand-off in doubt was not committed here; a new attachment, which would not claim the slot, frees it."""
        summary = self.segment.record(slot).summarize()
        if summary is not None:
            self._arena.release(self._worker_id, [PageChain(tuple(summary.page_ids.tolist()))], [slot])


async def _no_stage(request_id: str, pages_address: str) -> AsyncGenerator[int]:
    for problem in (Unavailable(f"request {request_id} does not come from {pages_address}"),):
        raise problem
    yield 0


async def _wait_for(waiting: object) -> None:
    await asyncio.sleep(0)
    if asyncio.iscoroutine(waiting):
        await waiting
