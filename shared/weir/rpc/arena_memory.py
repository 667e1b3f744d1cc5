"""An arena without processes: `MemoryArena` stands for the transfer service, `MemoryArenaClient` for its client.

It obeys the contract of `weir.rpc.arena_client.ArenaClient`: who owns what, what is refused, and what is raised.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from weir.core.attempt import Attempt
from weir.core.errors import InternalError, Overloaded, Unavailable
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import SegmentHeader, layout_of
from weir.kv.messages import HandedOff, HandOffReceipt
from weir.kv.ownership import Acquired
from weir.kv.segment import Segment

_RETRY_AFTER_S = 0.1


class MemoryArena:
    """Owns a segment in anonymous memory. `owner_of_*` maps an id to a worker id; what is free is in neither.

    `before_hand_off` is awaited in each hand-off before it is committed, to wait or to raise what a client raises.
    """

    def __init__(self, geometry: ArenaGeometry) -> None:
        header = SegmentHeader(geometry, arena_id="memory", model_digest="", pid_namespace=0)
        mapping = mmap.mmap(-1, layout_of(geometry).total_bytes)
        self.segment = Segment(Path(os.devnull), header, mapping, lock_fd=None)
        self.owner_of_page: dict[int, str] = {}
        self.owner_of_slot: dict[int, str] = {}
        self.num_hand_offs = 0
        self.before_hand_off: Callable[[str], object] = _commit_at_once
        self._listeners: dict[str, Callable[[HandedOff], None]] = {}

    @property
    def num_free_pages(self) -> int:
        return self.segment.geometry.num_pages - len(self.owner_of_page)

    @property
    def num_free_slots(self) -> int:
        return self.segment.geometry.num_slots - len(self.owner_of_slot)

    def attach(self, worker_id: str, on_handed_off: Callable[[HandedOff], None]) -> None:
        self._listeners[worker_id] = on_handed_off

    def detach(self, worker_id: str) -> None:
        """Frees all that the worker owns."""
        self._listeners.pop(worker_id, None)
        for owners in (self.owner_of_page, self.owner_of_slot):
            for owned in [index for index, owner in owners.items() if owner == worker_id]:
                del owners[owned]

    def acquire(self, worker_id: str, num_pages: int, num_slots: int) -> Acquired:
        """All or nothing. Raises Overloaded."""
        geometry = self.segment.geometry
        pages = [page for page in range(geometry.num_pages) if page not in self.owner_of_page][:num_pages]
        slots = [slot for slot in range(geometry.num_slots) if slot not in self.owner_of_slot][:num_slots]
        if len(pages) < num_pages or len(slots) < num_slots:
            raise Overloaded(f"{num_pages} pages and {num_slots} slots are not free", retry_after_s=_RETRY_AFTER_S)
        self.owner_of_page.update(dict.fromkeys(pages, worker_id))
        self.owner_of_slot.update(dict.fromkeys(slots, worker_id))
        return Acquired(tuple(pages), tuple(slots))

    def release(self, worker_id: str, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Raises ValueError, with nothing released, for what the worker does not own."""
        self.check_owner(worker_id, page_ids, slots)
        for page_id in page_ids:
            del self.owner_of_page[page_id]
        for slot in slots:
            self.segment.record(slot).clear()
            del self.owner_of_slot[slot]

    def hand_off(self, worker_id: str, slot: int, request_id: str, attempt: Attempt, to_worker_id: str) -> int:
        """The number of pages that changed their owner. Raises Unavailable or InternalError."""
        listener = self._listeners.get(to_worker_id)
        if listener is None:
            raise Unavailable(f"worker {to_worker_id} has no lease")
        summary = self.segment.record(slot).summarize()
        if summary is None or (summary.request_id, summary.attempt) != (request_id, attempt):
            raise InternalError(f"slot {slot} is not of request {request_id}, {attempt}")
        page_ids = summary.page_ids.tolist()
        self.check_owner(worker_id, page_ids, [slot])
        self.owner_of_page.update(dict.fromkeys(page_ids, to_worker_id))
        self.owner_of_slot[slot] = to_worker_id
        self.num_hand_offs += 1
        listener(HandedOff(slot, self.num_hand_offs, request_id, attempt))
        return len(page_ids)

    def check_owner(self, worker_id: str, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        strange_pages = [page for page in page_ids if self.owner_of_page.get(page) != worker_id]
        strange_slots = [slot for slot in slots if self.owner_of_slot.get(slot) != worker_id]
        if strange_pages or strange_slots:
            raise ValueError(f"{worker_id} does not own pages {strange_pages[:8]}, slots {strange_slots[:8]}")


class MemoryArenaClient:
    """One worker's lease on a MemoryArena."""

    def __init__(self, arena: MemoryArena, worker_id: str, on_handed_off: Callable[[HandedOff], None]) -> None:
        self._arena = arena
        self._worker_id = worker_id
        self._on_handed_off = on_handed_off
        self.lost = asyncio.Event()

    @property
    def segment(self) -> Segment:
        return self._arena.segment

    async def start(self) -> None:
        self._arena.attach(self._worker_id, self._on_handed_off)

    async def acquire(self, num_pages: int, num_slots: int) -> Acquired:
        await asyncio.sleep(0)
        return self._arena.acquire(self._worker_id, num_pages, num_slots)

    async def release(self, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        await asyncio.sleep(0)
        self._arena.release(self._worker_id, page_ids, slots)

    async def hand_off(self, slot: int, request_id: str, attempt: Attempt, to_worker_id: str) -> HandOffReceipt:
        await asyncio.sleep(0)
        try:
            waiting = self._arena.before_hand_off(request_id)
            if asyncio.iscoroutine(waiting):
                await waiting
        except (Unavailable, InternalError):
            raise
        except BaseException:
            self._forget(slot)
            raise
        num_pages = self._arena.hand_off(self._worker_id, slot, request_id, attempt, to_worker_id)
        return HandOffReceipt(num_pages, num_bytes_copied=0)

    async def close(self) -> None:
        self._arena.detach(self._worker_id)

    def _forget(self, slot: int) -> None:
        """A hand-off in doubt was not committed here; the slot is nobody's claim, and so it is reclaimed."""
        summary = self._arena.segment.record(slot).summarize()
        if summary is not None:
            self._arena.release(self._worker_id, summary.page_ids.tolist(), [slot])


def _commit_at_once(request_id: str) -> None:
    """The default of `before_hand_off`."""
    del request_id
