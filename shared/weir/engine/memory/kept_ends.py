"""Sequences that ended by themselves and that clients may not know of yet: each keeps its slot, with a record that says
how it ended, so that its last tokens outlive this process. Its pages are free.

    running ──keep──> kept ──release (clients know), or it is the oldest and room is needed──> the slot is free
"""

from collections.abc import Iterable

from weir.core.life import FinishReason
from weir.engine.memory.pages import PagePool
from weir.engine.messages import SequenceKey, SequenceLog
from weir.engine.sequence import Sequence


class KeptEnds:
    """At most `max_kept`, the oldest first; 0: none."""

    def __init__(self, pool: PagePool, max_kept: int) -> None:
        self._pool = pool
        self._max_kept = max_kept
        self._kept: dict[SequenceKey, tuple[int, SequenceLog]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def slots(self) -> list[int]:
        return [slot for slot, _ in self._kept.values()]

    def holds(self, key: SequenceKey, slot: int) -> bool:
        return key in self._kept and self._kept[key][0] == slot

    def try_keep(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Publishes the end, and takes slot and record; the pages are the caller's to free. False: nothing was done."""
        if self._max_kept == 0 or sequence.slot is None or sequence.log is None:
            return False
        if sequence.key in self._kept:  # the same attempt in a second slot: the newer one counts
            self.release([sequence.key])
        while len(self._kept) >= self._max_kept:
            self.release_oldest()
        self._kept[sequence.key] = sequence.end(reason)
        return True

    def release(self, keys: Iterable[SequenceKey]) -> None:
        """Frees their slots. Unknown ones are ignored: they had to make room."""
        for key in keys:
            kept = self._kept.pop(key, None)
            if kept is not None:
                slot, log = kept
                log.clear()
                self._pool.put_back(slot, ())

    def release_oldest(self) -> bool:
        """False: none is kept."""
        oldest = next(iter(self._kept), None)
        if oldest is None:
            return False
        self.release([oldest])
        return True

    def release_all(self) -> None:
        self.release(list(self._kept))
