"""A simulated memory that keeps prefixes: the ownership table and the prefix index of the transfer service."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from weir.core.attempt import Attempt
from weir.engine.messages import PageBundle
from weir.kv.arena.ownership import Move, OwnershipTable
from weir.kv.layout import PAGE_DTYPE, SLOT_DTYPE
from weir.kv.messages import PageChain
from weir.kv.prefixes.index import PrefixIndex
from weir.kv.states import PageState, SlotState
from weir.sim.memory.records import SimRecord


class PrefixMemory:
    """Implements `weir.sim.memory.page_memory.SimPageMemory`. A worker's index is its lease."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.num_pages = num_pages
        self.preemptions: Counter[str] = Counter()
        self.records: Sequence[SimRecord] = [SimRecord(self.preemptions) for _ in range(num_slots)]
        self._table = OwnershipTable(np.zeros(num_pages, PAGE_DTYPE), np.zeros(num_slots, SLOT_DTYPE))

    @property
    def num_free_pages(self) -> int:
        return self._table.num_pages(PageState.FREE) + self._table.num_pages(PageState.CACHED)

    @property
    def prefixes(self) -> PrefixIndex:
        return self._table.prefixes

    def match(self, worker: int, hashes: Sequence[bytes]) -> tuple[int, ...]:
        pages = self._table.prefixes.find_prefix(hashes)
        self._table.prefixes.pin(worker, np.array(pages, np.int64))
        return tuple(pages)

    def try_acquire(self, worker: int, num_pages: int, num_slots: int) -> PageBundle | None:
        acquired = self._table.try_acquire(worker, num_pages, num_slots)
        return None if acquired is None else PageBundle(acquired.page_ids, acquired.slots)

    def take_all(self, worker: int) -> PageBundle:
        """What no sequence and no prefix uses."""
        num_slots = self._table.num_slots(SlotState.FREE)
        bundle = self.try_acquire(worker, self._table.num_pages(PageState.FREE), num_slots)
        assert bundle is not None, "as many as are free"
        return bundle

    def seal(self, worker: int, page_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        self._table.seal(worker, PageChain(tuple(page_ids), tuple(hashes)))

    def hand_off(self, slot: int, page_ids: Sequence[int], hashes: Sequence[bytes], workers: tuple[int, int]) -> None:
        move = Move("", Attempt(), *workers)
        self._table.hand_off(slot, np.array(page_ids, np.int64), move, hashes)

    def release(self, worker: int, bundle: PageBundle, hashes: Sequence[Sequence[bytes]]) -> None:
        chains = [PageChain(bundle.page_ids)] if bundle.page_ids else []
        known = hashes or [()] * len(bundle.used)
        chains += [PageChain(used.page_ids, tuple(own)) for used, own in zip(bundle.used, known, strict=True)]
        self._table.release(worker, chains, bundle.slots)

    def release_all(self, worker: int) -> None:
        for slot in self._table.slots_of(worker):
            self.records[slot].clear()
        self._table.orphan(worker, lambda _: None)

    def integrity_errors(self) -> list[str]:
        table = self._table
        num_free, num_cached = table.num_pages(PageState.FREE), table.num_pages(PageState.CACHED)
        errors = list(table.prefixes.integrity_errors())
        if num_free + num_cached != self.num_pages:
            errors.append(f"{num_free} free + {num_cached} cached pages are not {self.num_pages}")
        if table.num_slots(SlotState.FREE) != len(self.records):
            errors.append(f"{table.num_slots(SlotState.FREE)} of {len(self.records)} slots are free at the end")
        return errors
