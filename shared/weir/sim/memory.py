"""The page memory of simulated workers: whole ids, given out in bulk as an arena does."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from weir.engine.messages import PageLot
from weir.sim.records import SimRecord


class Memory(Protocol):
    """Of one worker, or of all workers between which pages change hands in place."""

    num_pages: int
    records: Sequence[SimRecord]
    """By slot."""
    preemptions: Counter[str]
    """By request."""

    @property
    def num_free_pages(self) -> int:
        """That somebody may acquire now."""
        ...

    def match(self, worker: int, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Pins the pages of the longest known prefix for a worker."""
        ...

    def try_acquire(self, worker: int, num_pages: int, num_slots: int) -> PageLot | None:
        """All of it, or None."""
        ...

    def take_all(self, worker: int) -> PageLot:
        """Everything that is free."""
        ...

    def seal(self, worker: int, page_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """These pages are computed: others may go on from them."""
        ...

    def hand_off(self, slot: int, page_ids: Sequence[int], hashes: Sequence[bytes], workers: tuple[int, int]) -> None:
        """Slot and pages of the first worker are the second's; what has a hash may be shared from here on."""
        ...

    def release(self, worker: int, lot: PageLot, hashes: Sequence[Sequence[bytes]]) -> None:
        """Takes pages and slots back; `hashes`: one list for each of the lot's used pages."""
        ...

    def release_all(self, worker: int) -> None:
        """The worker is dead."""
        ...

    def integrity_errors(self) -> list[str]:
        """What is wrong once no worker holds anything, in sentences."""
        ...


class PlainMemory:
    """Keeps no prefixes."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.num_pages = num_pages
        self._owner_of_page = [0] * num_pages
        self._owner_of_slot = [0] * num_slots
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.preemptions: Counter[str] = Counter()
        self.records: Sequence[SimRecord] = [SimRecord(self.preemptions) for _ in range(num_slots)]

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def match(self, worker: int, hashes: Sequence[bytes]) -> tuple[int, ...]:
        del worker, hashes
        return ()

    def try_acquire(self, worker: int, num_pages: int, num_slots: int) -> PageLot | None:
        if num_pages > len(self._free_pages) or num_slots > len(self._free_slots):
            return None
        pages = tuple(self._free_pages.pop() for _ in range(num_pages))
        slots = tuple(self._free_slots.pop() for _ in range(num_slots))
        for page in pages:
            self._owner_of_page[page] = worker
        for slot in slots:
            self._owner_of_slot[slot] = worker
        return PageLot(pages, slots)

    def take_all(self, worker: int) -> PageLot:
        lot = self.try_acquire(worker, len(self._free_pages), len(self._free_slots))
        assert lot is not None, "as many as are free"
        return lot

    def seal(self, worker: int, page_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Nobody looks for them."""

    def hand_off(self, slot: int, page_ids: Sequence[int], hashes: Sequence[bytes], workers: tuple[int, int]) -> None:
        del hashes
        self._owner_of_slot[slot] = workers[1]
        for page in page_ids:
            self._owner_of_page[page] = workers[1]

    def release(self, worker: int, lot: PageLot, hashes: Sequence[Sequence[bytes]]) -> None:
        del worker, hashes
        pages = lot.all_page_ids
        for page in pages:
            self._owner_of_page[page] = 0
        for slot in lot.slots:
            self._owner_of_slot[slot] = 0
        self._free_pages.extend(pages)
        self._free_slots.extend(lot.slots)

    def release_all(self, worker: int) -> None:
        pages = tuple(page for page, owner in enumerate(self._owner_of_page) if owner == worker)
        slots = tuple(slot for slot, owner in enumerate(self._owner_of_slot) if owner == worker)
        for slot in slots:
            self.records[slot].clear()
        self.release(worker, PageLot(pages, slots), ())

    def integrity_errors(self) -> list[str]:
        errors = []
        for what, free, owners in (
            ("pages", self._free_pages, self._owner_of_page),
            ("slots", self._free_slots, self._owner_of_slot),
        ):
            if sorted(free) != list(range(len(owners))):
                errors.append(f"{len(free)} of {len(owners)} {what} are free at the end, {len(set(free))} different")
        return errors
