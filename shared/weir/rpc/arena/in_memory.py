"""An arena without processes: `InMemoryArena` stands for the transfer service, `InMemoryArenaClient` for its client.

It obeys the contract of `weir.rpc.arena.client.ArenaClient`: who owns what, what is refused, and what is raised. Its
`match` never waits.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from weir.core.attempt import Attempt
from weir.core.errors import InternalError, Overloaded, Unavailable
from weir.kv.arena.ownership import Move, OwnershipTable
from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import SegmentHeader, layout_of
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import Acquired, HandedOff, HandOffReceipt, PageChain, PrefixMatch
from weir.kv.states import NotOwned, PageState, SlotState

_RETRY_AFTER_S = 0.1


class InMemoryArena:
    """Owns a segment in anonymous memory.

    `before_hand_off` is awaited in each hand-off before it is committed, `before_match` in each match and
    `before_release` in each release, to wait or to raise what a client raises.
    """

    def __init__(self, geometry: ArenaGeometry) -> None:
        header = SegmentHeader(geometry, arena_id="memory", model_digest="", pid_namespace=0)
        mapping = mmap.mmap(-1, layout_of(geometry).total_bytes)
        self.segment = Segment(Path(os.devnull), header, mapping, lock_fd=None)
        self.table = OwnershipTable(self.segment.page_rows, self.segment.slot_rows)
        self.num_hand_offs = 0
        self.num_matches = 0
        self.before_hand_off: Callable[[str], object] = _commit_at_once
        self.before_match: Callable[[], object] = _at_once
        self.before_release: Callable[[], object] = _at_once
        self._listeners: dict[str, Callable[[HandedOff], None]] = {}
        self._lease_ids: dict[str, int] = {}

    @property
    def num_free_pages(self) -> int:
        """Those that can be acquired: cached ones are."""
        return self.table.num_pages(PageState.FREE) + self.table.num_pages(PageState.CACHED)

    @property
    def num_free_slots(self) -> int:
        return self.table.num_slots(SlotState.FREE)

    def lease_id_of(self, worker_id: str) -> int:
        return self._lease_ids.setdefault(worker_id, len(self._lease_ids) + 1)

    def attach(self, worker_id: str, on_handed_off: Callable[[HandedOff], None]) -> None:
        self._listeners[worker_id] = on_handed_off

    def detach(self, worker_id: str) -> None:
        """Frees all that the worker owns."""
        self._listeners.pop(worker_id, None)
        lease_id = self.lease_id_of(worker_id)
        for slot in self.table.slots_of(lease_id):
            self.segment.record(slot).clear()
        self.table.orphan(lease_id, _no_record)
        self.table.free_orphans(lease_id)

    def acquire(self, worker_id: str, num_pages: int, num_slots: int) -> Acquired:
        """All or nothing. Raises Overloaded."""
        acquired = self.table.try_acquire(self.lease_id_of(worker_id), num_pages, num_slots)
        if acquired is None:
            raise Overloaded(f"{num_pages} pages and {num_slots} slots are not free", retry_after_s=_RETRY_AFTER_S)
        return acquired

    def match(self, worker_id: str, hashes: Sequence[bytes], num_pages: int, num_slots: int) -> PrefixMatch:
        lease_id = self.lease_id_of(worker_id)
        pages = self.table.prefixes.find_prefix(hashes[: max(0, num_pages - 1)])
        self.table.prefixes.pin(lease_id, np.array(pages, np.int64))
        acquired = self.table.try_acquire(lease_id, num_pages - len(pages), num_slots)
        self.num_matches += 1
        return PrefixMatch(self.num_matches, tuple(pages), acquired or Acquired((), ()))

    def release(self, worker_id: str, chains: Sequence[PageChain], slots: Sequence[int]) -> None:
        """Raises ValueError, with nothing released, for what the worker does not hold."""
        lease_id = self.lease_id_of(worker_id)
        try:
            self.table.check_held_pages(lease_id, [page_id for chain in chains for page_id in chain.page_ids])
            self.table.check_owned_slots(lease_id, slots)
        except NotOwned as error:
            raise ValueError(str(error)) from error
        for slot in slots:
            self.segment.record(slot).clear()
        self.table.release(lease_id, chains, slots)

    def hand_off(
        self,
        worker_id: str,
        slot: int,
        request_id: str,
        attempt: Attempt,
        to_worker_id: str,
        hashes: Sequence[bytes] = (),
    ) -> int:
        """The number of pages that changed hands. Raises Unavailable, InternalError, or NotOwned."""
        listener = self._listeners.get(to_worker_id)
        if listener is None:
            raise Unavailable(f"worker {to_worker_id} has no lease")
        summary = self.segment.record(slot).summarize()
        if summary is None or (summary.request_id, summary.attempt) != (request_id, attempt):
            raise InternalError(f"slot {slot} is not of request {request_id}, {attempt}")
        move = Move(request_id, attempt, self.lease_id_of(worker_id), self.lease_id_of(to_worker_id))
        self.table.hand_off(slot, summary.page_ids, move, hashes)
        self.num_hand_offs += 1
        listener(HandedOff(slot, self.num_hand_offs, request_id, attempt))
        return len(summary.page_ids)

    def seal(self, worker_id: str, chain: PageChain) -> None:
        self.table.seal(self.lease_id_of(worker_id), chain)


class InMemoryArenaClient:
    """One worker's lease on a MemoryArena."""

    def __init__(self, arena: InMemoryArena, worker_id: str, on_handed_off: Callable[[HandedOff], None]) -> None:
        self._arena = arena
        self._worker_id = worker_id
        self._on_handed_off = on_handed_off
        self.lost = asyncio.Event()

    @property
    def segment(self) -> Segment:
        return self._arena.segment

    @property
    def memory(self) -> ArenaMemory:
        return ArenaMemory(self._arena.segment)

    @property
    def keeps_prefixes(self) -> bool:
        return True

    async def start(self) -> None:
        self._arena.attach(self._worker_id, self._on_handed_off)

    async def acquire(self, num_pages: int, num_slots: int) -> Acquired:
        await asyncio.sleep(0)
        return self._arena.acquire(self._worker_id, num_pages, num_slots)

    async def match(self, hashes: Sequence[bytes], num_pages: int, num_slots: int) -> PrefixMatch:
        await _settle(self._arena.before_match())
        return self._arena.match(self._worker_id, hashes, num_pages, num_slots)

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
        del match_ids
        await _settle(self._arena.before_release())
        self._arena.release(self._worker_id, [PageChain(tuple(page_ids)), *chains], slots)

    async def hand_off(
        self, slot: int, request_id: str, attempt: Attempt, to_worker_id: str, hashes: Sequence[bytes] = ()
    ) -> HandOffReceipt:
        try:
            await _settle(self._arena.before_hand_off(request_id))
        except (Unavailable, InternalError):
            raise
        except BaseException:
            self._forget(slot)
            raise
        num_pages = self._arena.hand_off(self._worker_id, slot, request_id, attempt, to_worker_id, hashes)
        return HandOffReceipt(num_pages, num_bytes_copied=0)

    async def close(self) -> None:
        self._arena.detach(self._worker_id)

    def _forget(self, slot: int) -> None:
        """A hand-off in doubt was not committed here; the slot is nobody's claim, and so it is reclaimed."""
        summary = self._arena.segment.record(slot).summarize()
        if summary is not None:
            self._arena.release(self._worker_id, [PageChain(tuple(summary.page_ids.tolist()))], [slot])


def _commit_at_once(request_id: str) -> None:
    """The default of `before_hand_off`."""
    del request_id


def _at_once() -> None:
    """The default of the other hooks."""


async def _settle(waiting: object) -> None:
    await asyncio.sleep(0)
    if asyncio.iscoroutine(waiting):
        await waiting


def _no_record(slot: int) -> None:
    del slot
