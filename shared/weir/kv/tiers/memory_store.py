"""Pages in memory of the host, of an arena that is on a device: the nearest place for what has no room there.

    slots   made a slab at a time as they are needed, up to the bound, then the one used longest ago is taken again

One that is being read is not taken. Where the host gives no more memory, what it has given is the bound from then on.
Each page has a checksum, as it has everywhere outside the arena.
"""

import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from weir.core.fields import format_size
from weir.kv.memory.page_access import HostMemoryFull, PagePlace
from weir.kv.movers.pipes import Buffer
from weir.kv.tiers.page_store import StoreCounters

_log = logging.getLogger(__name__)
MIN_PAGES = 32
"""More than are read at a time, so that there is always one to take again."""
_SLAB_BYTES = 64 << 20
"""Of one allocation: a process may have some ten thousand mappings."""


@dataclass(slots=True, eq=False)
class _Slot:
    memory: memoryview
    checksum: int = 0
    num_readers: int = 0


class PageMemoryStore:
    """Of this process: what it holds ends with it. `make_slab`: memory of so many pages' length; raises
    MemoryError or HostMemoryFull where there is no more of it."""

    def __init__(self, page_bytes: int, max_bytes: int, make_slab: Callable[[int], memoryview]) -> None:
        """Raises ValueError for a bound of too few pages."""
        least_bytes = MIN_PAGES * page_bytes
        if max_bytes < least_bytes:
            raise ValueError(
                f"page_memory_bytes {max_bytes}: holds {max_bytes // page_bytes} pages of this model; give at least "
                f"{least_bytes} ({format_size(least_bytes)})"
            )
        self._page_bytes, self._max_pages, self._make_slab = page_bytes, max_bytes // page_bytes, make_slab
        self._num_slots = 0
        """That were made."""
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()
        """By hash; what was used longest ago comes first."""
        self._spare: list[_Slot] = []
        self._lock = threading.Lock()
        """Of both. Nobody copies a page under it."""
        self.counters = StoreCounters()

    @property
    def is_away(self) -> bool:
        return False

    @property
    def num_pages(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        return len(self._slots) * self._page_bytes

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._slots

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        return next((index for index, page_hash in enumerate(hashes) if page_hash not in self._slots), len(hashes))

    def refresh(self) -> None: ...

    def try_put(self, page_hash: bytes, page: Buffer) -> bool:
        with self._lock:
            if page_hash in self._slots:
                self._slots.move_to_end(page_hash)
                return False
            slot = self._try_take()
        slot = slot or self._make()
        slot.memory[:] = page
        slot.checksum = xxhash.xxh3_64_intdigest(slot.memory)
        with self._lock:
            self._slots[page_hash] = slot
        return True

    def try_get(self, page_hash: bytes, place: PagePlace) -> bool:
        with self._held(page_hash) as slot:
            if slot is None:
                self.counters.missing_total += 1
                return False
            if xxhash.xxh3_64_intdigest(slot.memory) != slot.checksum:
                self.counters.damaged_total += 1
                _log.error("a page is computed again: its bytes in memory of the host have changed")
                self.forget(page_hash)
                return False
            place.take(slot.memory)
        return True

    def touch(self, hashes: Iterable[bytes]) -> None:
        with self._lock:
            for page_hash in reversed(list(hashes)):
                if page_hash in self._slots:
                    self._slots.move_to_end(page_hash)

    def forget(self, page_hash: bytes) -> None:
        with self._lock:
            slot = self._slots.pop(page_hash, None)
            if slot is not None:
                self._spare.append(slot)

    def close(self) -> None:
        with self._lock:
            self._slots.clear()
            self._spare.clear()
            self._num_slots = 0

    def slot_of(self, page_hash: bytes) -> memoryview:
        """For tests, which damage what lies there."""
        return self._slots[page_hash].memory

    @contextmanager
    def _held(self, page_hash: bytes) -> Iterator[_Slot | None]:
        """None: it is not there."""
        with self._lock:
            slot = self._slots.get(page_hash)
            if slot is not None:
                slot.num_readers += 1
        try:
            yield slot
        finally:
            if slot is not None:
                with self._lock:
                    slot.num_readers -= 1

    def _make(self) -> _Slot:
        """Raises OSError."""
        num_slots = min(max(1, _SLAB_BYTES // self._page_bytes), self._max_pages - self._num_slots)
        if not num_slots:
            raise OSError(errno.EBUSY, "all pages in memory of the host are being read")
        try:
            slab = self._make_slab(num_slots)
        except (MemoryError, HostMemoryFull) as error:
            return self._take_for_want_of_memory(error)
        size = self._page_bytes
        slots = [_Slot(slab[first : first + size]) for first in range(0, num_slots * size, size)]
        with self._lock:
            self._num_slots += num_slots
            self._spare += slots[1:]
        return slots[0]

    def _take_for_want_of_memory(self, error: Exception) -> _Slot:
        """Raises OSError."""
        with self._lock:
            num_pages = self._num_slots
            self._max_pages = num_pages or self._max_pages
            slot = self._try_take() if num_pages else None
        if slot is None:
            raise OSError(errno.ENOMEM, f"no more memory of the host for pages ({error})") from error
        _log.warning("the host has memory for %d pages, and for no more of page_memory_bytes: %s", num_pages, error)
        return slot

    def _try_take(self) -> _Slot | None:
        """One that nobody reads, free or of the page used longest ago. None: there is room for another one, or all are
        being read."""
        for index, slot in enumerate(self._spare):
            if not slot.num_readers:
                return self._spare.pop(index)
        if self._num_slots < self._max_pages:
            return None
        page_hash = next((page_hash for page_hash, slot in self._slots.items() if not slot.num_readers), None)
        if page_hash is None:
            return None
        self.counters.evicted_total += 1
        return self._slots.pop(page_hash)
