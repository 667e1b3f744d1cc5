"""The page memory of simulated workers, plain or with cached prefixes, its records, and which worker uses which."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from weir.core.life import Attempt, FinishReason
from weir.core.sampling import TokenLogprobs
from weir.engine.messages import PageBundle
from weir.kv.arena.ownership import Move, OwnershipTable
from weir.kv.layout import PAGE_DTYPE, SLOT_DTYPE, TRANSFER_LEASE, PageState, SlotState
from weir.kv.messages import PageChain
from weir.kv.prefixes import PrefixIndex
from weir.kv.records.record import SequenceParams
from weir.sim.spec import PoolSpec, SystemSpec

_SPLIT_HOST = "host-split"


class SimRecord:
    """Implements `weir.engine.messages.SequenceLog`. The modelled model asks it whose chunk it computes."""

    __slots__ = ("_preemptions", "num_computed_tokens", "params")

    def __init__(self, preemptions: Counter[str]) -> None:
        """`preemptions`: by request, counted here."""
        self.params: SequenceParams | None = None
        self.num_computed_tokens = 0
        """In pages that the sequence has."""
        self._preemptions = preemptions

    def begin(self, params: SequenceParams, output_token_ids: Sequence[int] = ()) -> None:
        del output_token_ids
        self.params = params
        self.num_computed_tokens = 0

    def set_block_table(self, page_ids: Sequence[int], first_page: int = 0) -> None:
        """Nobody asks for it: nothing is adopted in a simulation."""

    def append_page(self, page_id: int) -> None:
        """As above."""

    def append_token(self, token_id: int) -> None:
        """As above."""

    def keep_logprobs(self, output_index: int, logprobs: TokenLogprobs) -> None:
        """As above."""

    def publish(self, num_computed_tokens: int) -> None:
        self.num_computed_tokens = num_computed_tokens

    def drop_pages(self, num_kept: int) -> None:
        """A sequence gives its pages up when it is preempted, and then alone."""
        del num_kept
        self.num_computed_tokens = 0
        if self.params is not None:
            self._preemptions[self.params.request_id] += 1

    def drop_first_pages(self, first_page: int) -> None:
        """As `append_page`."""

    def end(self, reason: FinishReason) -> None:
        """As `append_page`."""

    def clear(self) -> None:
        self.params = None


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


class PrefixMemory:
    """Implements `weir.sim.memory.SimPageMemory`. A worker's index is its lease."""

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

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """First pages of the prefix that are here."""
        return len(self._table.prefixes.find_prefix(hashes))

    def try_reserve(self, num_pages: int) -> tuple[int, ...] | None:
        """For what comes from another host. None: there is no room, or nothing is wanted."""
        acquired = self._table.try_acquire(TRANSFER_LEASE, num_pages, 0) if num_pages else None
        return None if acquired is None else acquired.page_ids

    def settle(self, page_ids: Sequence[int], hashes: Sequence[bytes], all_hashes: Sequence[bytes]) -> None:
        """The first of these reserved pages are those of `hashes`, and cached; the others are free."""
        num_earlier = len(all_hashes) - len(page_ids)
        chain = PageChain(tuple(page_ids), tuple(hashes), tuple(all_hashes[:num_earlier]))
        self._table.release(TRANSFER_LEASE, [chain], [])

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


@dataclass(frozen=True, slots=True)
class Location:
    """What does not change when a worker dies and comes back."""

    worker_id: str
    pool: PoolSpec
    host_id: str
    memory: SimPageMemory
    owns_memory: bool
    """Nobody else takes pages of it, and it keeps no prefixes."""
    num_host_pages: int
    num_own_pages: int
    """0: the memory is the host's."""

    @property
    def arena_id(self) -> str:
        """That the scheduler counts its pages under."""
        return self.worker_id if self.num_own_pages else self.host_id

    def of_another(self, worker_id: str) -> "Location":
        """Of a worker like this one, with an empty memory to itself."""
        new_memory = PrefixMemory if isinstance(self.memory, PrefixMemory) else PlainMemory
        memory = new_memory(self.pool.num_worker_pages, len(self.memory.records))
        return replace(self, worker_id=worker_id, memory=memory)


def locations_of(spec: SystemSpec, *, keeps_prefixes: bool) -> dict[str, Location]:
    """Colocated workers are hosts by themselves; those of a split system are one, so that any may go with any."""
    if spec.host_link is not None:
        return _locations_on_hosts(spec)
    ids = iter(spec.worker_ids)
    new_memory = PrefixMemory if keeps_prefixes else PlainMemory
    locations: dict[str, Location] = {}
    split = [pool for pool in spec.pools if pool.role != "local"]
    common: SimPageMemory | None = None
    if split and spec.link is None:
        common = new_memory(sum(p.num_workers * p.num_worker_pages for p in split), sum(map(_num_slots, split)))
    num_split_pages = sum(p.num_workers * p.num_worker_pages for p in split if p.role == "decode" or common is not None)
    for pool in spec.pools:
        for _ in range(pool.num_workers):
            worker_id = next(ids)
            is_local = pool.role == "local"
            memory = common
            if is_local or memory is None:
                memory = new_memory(pool.num_worker_pages, _num_slots(pool) // pool.num_workers)
            locations[worker_id] = Location(
                worker_id=worker_id,
                pool=pool,
                host_id=f"host-{worker_id}" if is_local else _SPLIT_HOST,
                memory=memory,
                # Hand-offs reserve pages of a decode worker behind its back.
                owns_memory=memory is not common and pool.role != "decode" and not keeps_prefixes,
                num_host_pages=pool.num_worker_pages if is_local else num_split_pages,
                num_own_pages=0 if is_local or memory is common else pool.num_worker_pages,
            )
    return locations


def _locations_on_hosts(spec: SystemSpec) -> dict[str, Location]:
    """All workers of a host share its memory, which keeps prefixes."""
    pools_by_host: dict[str, list[PoolSpec]] = {}
    for pool in spec.pools:
        pools_by_host.setdefault(pool.host, []).append(pool)
    memories = {
        host: PrefixMemory(sum(p.num_workers * p.num_worker_pages for p in pools), sum(map(_num_slots, pools)))
        for host, pools in pools_by_host.items()
    }
    ids = iter(spec.worker_ids)
    return {
        (worker_id := next(ids)): Location(
            worker_id=worker_id,
            pool=pool,
            host_id=pool.host,
            memory=memories[pool.host],
            owns_memory=False,
            num_host_pages=memories[pool.host].num_pages,
            num_own_pages=0,
        )
        for pool in spec.pools
        for _ in range(pool.num_workers)
    }


def _num_slots(pool: PoolSpec) -> int:
    """As an arena has them: enough for what runs, and what is on its way."""
    return 2 * pool.num_workers * pool.max_num_seqs
