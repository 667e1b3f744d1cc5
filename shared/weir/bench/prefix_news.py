"""Prompts that begin like others, and arenas that tell what they have cached of them: for `weir bench scheduler`."""

import random
from array import array
from collections import OrderedDict

from weir.bus.messages import MAX_HASHES
from weir.bus.prefix_news import PrefixChanged, PrefixFetched
from weir.kv.geometry import PAGE_TOKENS

_NUM_BEGINNINGS = 256
_MAX_BEGINNING_PAGES = 64
_ARENA_PAGES = 8000
"""Of each arena, that are cached; all are from the start on."""
_FETCHED_BYTES = 8 << 20
_SPREAD = 0x9E3779B97F4A7C15
"""Odd, so that no two numbers come to the same hash; 2**64 over the golden ratio, so that neighbours lie far apart."""
_MAX_HASH = 2**64 - 1


class Beginnings:
    """Of prompts; some are had far more often than others."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_made = 0
        self._known = [self._new(self._random.randint(1, _MAX_BEGINNING_PAGES)) for _ in range(_NUM_BEGINNINGS)]

    def page_hashes(self, num_prompt_tokens: int) -> "array[int]":
        """Of its full pages: a known beginning, and what no other prompt has."""
        num_pages = num_prompt_tokens // PAGE_TOKENS
        known = self._known[int(_NUM_BEGINNINGS * self._random.random() ** 3)][:num_pages]
        return known + self._new(num_pages - len(known))

    def _new(self, num_pages: int) -> "array[int]":
        """Hashes are spread as those of pages are: consecutive ones would lie side by side in the scheduler's dicts."""
        self._num_made += num_pages
        numbers = range(self._num_made - num_pages + 1, self._num_made + 1)
        return array("Q", [number * _SPREAD & _MAX_HASH for number in numbers])


class ArenaNews:
    """Of one arena: what was computed in it is cached, and what was used longest ago goes."""

    def __init__(self, arena_id: str, beginnings: Beginnings) -> None:
        self._arena_id = arena_id
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._added: set[int] = set()
        self._evicted: set[int] = set()
        self._sequence = 0
        while len(self._cached) < _ARENA_PAGES:
            self.compute(beginnings.page_hashes(2000))

    def compute(self, page_hashes: "array[int]") -> None:
        for page_hash in reversed(page_hashes):  # so that its end goes first
            if page_hash not in self._cached:
                self._added.add(page_hash)
                self._evicted.discard(page_hash)
            self._cached[page_hash] = None
            self._cached.move_to_end(page_hash)
        while len(self._cached) > _ARENA_PAGES:
            page_hash, _ = self._cached.popitem(last=False)
            if page_hash in self._added:
                self._added.discard(page_hash)
            else:
                self._evicted.add(page_hash)

    def take(self, source: str) -> PrefixChanged:
        """What has changed since the last time; `source`: of a prefix that was fetched meanwhile."""
        added, self._added = self._added, set()
        evicted, self._evicted = self._evicted, set()
        message = PrefixChanged(
            self._arena_id,
            incarnation=1,
            sequence=self._sequence,
            num_pages=len(self._cached) if len(self._cached) <= MAX_HASHES else None,
            added=array("Q", added).tobytes(),
            evicted=array("Q", evicted).tobytes(),
            fetched=(PrefixFetched(source, _FETCHED_BYTES, 0.1, 0.005),),
        )
        self._sequence += 1
        return message
