"""The page memory of simulated workers: whole ids, given out in bulk as an arena does."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from weir.engine.messages import PageBundle
from weir.sim.memory.records import SimRecord


class SimPageMemory(Protocol):
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

    def try_acquire(self, worker: int, num_pages: int, num_slots: int) -> PageBundle | None:
        """All of it, or None."""
        ...

    def take_all(self, worker: int) -> PageBundle:
        """Everything that is free."""
        ...

    def seal(self, worker: int, page_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """These pages are computed: others may go on from them."""
        ...

    def hand_off(self, slot: int, page_ids: Sequence[int], hashes: Sequence[bytes], workers: tuple[int, int]) -> None:
        """Slot and pages of the first worker are the second's; what has a hash may be shared from here on."""
        ...

    def release(self, worker: int, bundle: PageBundle, hashes: Sequence[Sequence[bytes]]) -> None:
        """Takes pages and slots back; `hashes`: one list for each of the bundle's used pages."""
        ...

    def release_all(self, worker: int) -> None:
        """The worker is dead."""
        ...

    def integrity_errors(self) -> list[str]:
        """What is wrong once no worker holds anything, in sentences."""
        ...


class MemoryIsTight(Exception):
    """So little is free that a fast engine may not be the equal of a real batcher, which holds some pages in stock."""


class PlainMemory:
    """Keeps no prefixes: a page is in use or free."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.num_pages = num_pages
        self._held_pages: dict[int, set[int]] = {}
        self._held_slots: dict[int, set[int]] = {}
        """By worker."""
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_counted_pages = 0
        self._num_spare_pages = 0
        self.preemptions: Counter[str] = Counter()
        self.records: Sequence[SimRecord] = [SimRecord(self.preemptions) for _ in range(num_slots)]

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages) - self._num_counted_pages

    def keep_spare(self, num_pages: int) -> None:
        """From here on it is an error if not so many pages stay free."""
        self._num_spare_pages = num_pages

    def count_used(self, num_pages: int) -> None:
        """So many more pages are in use, whose ids nobody asks for; negative: fewer. Raises MemoryIsTight."""
        self._num_counted_pages += num_pages
        if num_pages > 0 and self.num_free_pages < self._num_spare_pages:
            raise MemoryIsTight(f"{self.num_free_pages} pages are left")

    def match(self, worker: int, hashes: Sequence[bytes]) -> tuple[int, ...]:
        del worker, hashes
        return ()

    def try_acquire(self, worker: int, num_pages: int, num_slots: int) -> PageBundle | None:
        """Raises MemoryIsTight."""
        num_left = self.num_free_pages - num_pages
        has_slots = num_slots <= len(self._free_slots)
        if self._num_spare_pages and (num_left < self._num_spare_pages or not has_slots):
            raise MemoryIsTight(f"{num_left} pages and {len(self._free_slots)} slots are left")
        if num_left < 0 or not has_slots:
            return None
        pages, slots = _pop(self._free_pages, num_pages), _pop(self._free_slots, num_slots)
        self._held_pages.setdefault(worker, set()).update(pages)
        self._held_slots.setdefault(worker, set()).update(slots)
        return PageBundle(pages, slots)

    def take_all(self, worker: int) -> PageBundle:
        bundle = self.try_acquire(worker, len(self._free_pages), len(self._free_slots))
        assert bundle is not None, "as many as are free"
        return bundle

    def seal(self, worker: int, page_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Nobody looks for them."""

    def hand_off(self, slot: int, page_ids: Sequence[int], hashes: Sequence[bytes], workers: tuple[int, int]) -> None:
        del hashes
        sender, receiver = workers
        self._held_slots[sender].remove(slot)
        self._held_slots.setdefault(receiver, set()).add(slot)
        self._held_pages[sender].difference_update(page_ids)
        self._held_pages.setdefault(receiver, set()).update(page_ids)

    def release(self, worker: int, bundle: PageBundle, hashes: Sequence[Sequence[bytes]]) -> None:
        del hashes
        pages = bundle.all_page_ids if bundle.used else bundle.page_ids
        if pages:
            self._held_pages[worker].difference_update(pages)
            self._free_pages.extend(pages)
        if bundle.slots:
            self._held_slots[worker].difference_update(bundle.slots)
            self._free_slots.extend(bundle.slots)

    def release_all(self, worker: int) -> None:
        """Pages that are counted are those of one worker, and no other is on such a memory."""
        self._num_counted_pages = 0
        pages = tuple(sorted(self._held_pages.pop(worker, ())))
        slots = tuple(sorted(self._held_slots.pop(worker, ())))
        for slot in slots:
            self.records[slot].clear()
        self._free_pages.extend(pages)
        self._free_slots.extend(slots)

    def integrity_errors(self) -> list[str]:
        errors = [f"{self._num_counted_pages} pages are counted at the end"] if self._num_counted_pages else []
        for what, free, num_all in (
            ("pages", self._free_pages, self.num_pages),
            ("slots", self._free_slots, len(self.records)),
        ):
            if sorted(free) != list(range(num_all)):
                errors.append(f"{len(free)} of {num_all} {what} are free at the end, {len(set(free))} different")
        return errors


def _pop(free: list[int], num: int) -> tuple[int, ...]:
    """The last ones, the very last first."""
    if not num:
        return ()
    taken = tuple(free[: -num - 1 : -1])
    del free[-num:]
    return taken
