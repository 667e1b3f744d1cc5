"""What came into a prefix index and went out of it since it was last asked: for whoever tells others."""

from collections.abc import Collection
from dataclasses import dataclass

MAX_CHANGES = 40_000
"""Over this many, only that much has happened is remembered."""


@dataclass(frozen=True, slots=True)
class Changes:
    """No hash is in both."""

    added: Collection[bytes] = ()
    evicted: Collection[bytes] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.evicted)


class PrefixChanges:
    """Netted: what came and went again in between is not told."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._added: set[bytes] = set()
        self._evicted: set[bytes] = set()
        self._is_whole = True

    def add(self, hashes: Collection[bytes]) -> None:
        """They were not in the index before."""
        back = self._evicted.intersection(hashes)
        self._evicted -= back
        self._added.update(hashes if not back else set(hashes) - back)
        self._check_bound()

    def evict(self, hashes: Collection[bytes]) -> None:
        """They were in the index before."""
        unsaid = self._added.intersection(hashes)
        self._added -= unsaid
        self._evicted.update(hashes if not unsaid else set(hashes) - unsaid)
        self._check_bound()

    def lose_count(self) -> None:
        """The index has become another."""
        self._added, self._evicted, self._is_whole = set(), set(), False

    def take(self) -> Changes | None:
        """Everything since the last call; None: too much to say, look at the index."""
        changes = Changes(self._added, self._evicted) if self._is_whole else None
        self._added, self._evicted, self._is_whole = set(), set(), True
        return changes

    def _check_bound(self) -> None:
        if len(self._added) + len(self._evicted) > self._max_changes:
            self.lose_count()
