"""Reads the pages of one prefix from a store, in as many threads as run it."""

import logging
from collections.abc import Sequence
from itertools import count, takewhile

from weir.kv.memory.page_access import PageMemoryAway, PagePlace
from weir.kv.tiers.page_store import PageStore

_log = logging.getLogger(__name__)


class PrefixReading:
    """Page number i of `hashes` goes to `places[i]`. A page that is not there ends it: what follows is of no use."""

    def __init__(self, store: PageStore, hashes: Sequence[bytes], places: Sequence[PagePlace]) -> None:
        self._store = store
        self._wanted = list(zip(hashes, places, strict=True))
        self._numbers = count()
        self._is_read = [False] * len(self._wanted)
        self._is_stopped = False

    @property
    def num_read(self) -> int:
        """Pages that have come, in whatever order."""
        return sum(self._is_read)

    @property
    def num_leading(self) -> int:
        """First pages that have come; once no thread runs it any more."""
        return sum(takewhile(bool, self._is_read))

    def run(self) -> None:
        """For several threads at a time. Returns when there is nothing left to begin."""
        for number in self._numbers:
            if number >= len(self._wanted) or self._is_stopped:
                return
            if not self._try_read(*self._wanted[number]):
                self.stop()
                return
            self._is_read[number] = True

    def _try_read(self, page_hash: bytes, place: PagePlace) -> bool:
        try:
            return self._store.try_get(page_hash, place)
        except PageMemoryAway as error:
            _log.warning("a prefix that was kept is computed again: %s", error)
            return False

    def stop(self) -> None:
        """No page is begun any more. Who runs it may still be writing into one."""
        self._is_stopped = True
