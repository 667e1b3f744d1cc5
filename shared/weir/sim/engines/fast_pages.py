"""The pages of a fast engine: counted, not named; ids only where others see them."""

from math import inf

from weir.engine.messages import PageBundle
from weir.sim.memory.page_memory import SimPageMemory
from weir.sim.workers.arriving import SimArrival

_LOT = 64


class FastPages:
    """`owns_memory`: no other worker uses it, so all of it is in stock."""

    def __init__(self, memory: SimPageMemory, worker: int, *, owns_memory: bool) -> None:
        self.memory = memory
        self._worker = worker
        self._owns_memory = owns_memory
        self._stock: list[int] = []
        self._slots: list[int] = []
        self._num_used = 0

    def open(self) -> None:
        """Before the first sequence."""
        if self._owns_memory:
            self._put(self.memory.take_all(self._worker))

    def has_room(self, num_pages: int) -> bool:
        """Whether so many more could be used. A memory that several share says so itself when it is tight."""
        return self.num_spare >= num_pages

    def grow(self, num_pages: int) -> None:
        self.reserve(num_pages)
        self._num_used += num_pages

    @property
    def num_spare(self) -> float:
        """Pages that could be used beside those that are."""
        return len(self._stock) - self._num_used if self._owns_memory else inf

    def reserve(self, num_pages: int) -> None:
        """So many will be used soon."""
        num_short = self._num_used + num_pages - len(self._stock)
        if num_short > 0:
            bundle = self.memory.try_acquire(self._worker, max(num_short, _LOT), 0)
            assert bundle is not None, "has_room was asked"
            self._put(bundle)

    def shrink(self, num_pages: int) -> None:
        self._num_used -= num_pages
        num_spare = len(self._stock) - self._num_used
        if not self._owns_memory and num_spare > 2 * _LOT:
            self.memory.release(self._worker, PageBundle(tuple(self._take(num_spare - _LOT))), ())

    def give_back(self, arrival: SimArrival) -> bool:
        """What the sequence came with; whether that was anything."""
        if arrival.slot is None:
            return False
        self.memory.release(self._worker, PageBundle(arrival.page_ids, (arrival.slot,)), ())
        return True

    def name(self, num_pages: int) -> tuple[int, ...]:
        """So many of the used ones get their ids; they are somebody else's from here on."""
        self._num_used -= num_pages
        return tuple(self._take(num_pages))

    def take_slot(self) -> int:
        if not self._slots:
            bundle = self.memory.try_acquire(self._worker, 0, 1)
            assert bundle is not None, "a memory has twice as many slots as sequences run"
            self._slots.extend(bundle.slots)
        return self._slots.pop()

    def close(self) -> None:
        """Nothing is used any more: everything goes back."""
        if self._num_used:
            raise AssertionError(f"{self._num_used} pages are used by nobody")
        self.memory.release(self._worker, PageBundle(tuple(self._stock), tuple(self._slots)), ())
        self._stock.clear()
        self._slots.clear()

    def _put(self, bundle: PageBundle) -> None:
        self._stock.extend(bundle.page_ids)
        self._slots.extend(bundle.slots)

    def _take(self, num_pages: int) -> list[int]:
        taken = self._stock[len(self._stock) - num_pages :]
        del self._stock[len(self._stock) - num_pages :]
        return taken
