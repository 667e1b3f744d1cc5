"""A heap from which anything can be taken out."""

import heapq
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=tuple[float, ...])

_MIN_ENTRIES = 64
_NUM_MOVED = 4


class LazyHeap(Generic[KeyT]):
    """Ids by key, smallest first. An id that is taken out is skipped when it comes to the top.

    When most entries are of ids that were taken out, the others go into a new heap, a few with each change: nobody who
    adds or takes out one waits for all the others. The last entry of a heap can be left out, and it is a heap still.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[KeyT, str]] = []
        self._leaving: list[tuple[KeyT, str]] = []
        """A heap as well, of which what is still there goes into `_heap` by and by."""
        self._keys: dict[str, KeyT] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._keys

    @property
    def num_entries(self) -> int:
        """With those of ids that were taken out."""
        return len(self._heap) + len(self._leaving)

    def ids(self) -> list[str]:
        """All ids, in no order."""
        return list(self._keys)

    def push(self, item_id: str, key: KeyT) -> None:
        if item_id in self._keys:
            raise ValueError(f"{item_id} is in the heap already")
        self._keys[item_id] = key
        heapq.heappush(self._heap, (key, item_id))
        if self._leaving:
            self._move_some()

    def discard(self, item_id: str) -> None:
        self._keys.pop(item_id, None)
        if self._leaving:
            self._move_some()
        elif len(self._heap) > _MIN_ENTRIES and len(self._heap) > 2 * len(self._keys):
            self._heap, self._leaving = [], self._heap

    def try_peek(self) -> tuple[KeyT, str] | None:
        """The smallest key with its id."""
        if not self._leaving:
            return self._try_top(self._heap)
        top = self._try_top(self._heap)
        other = self._try_top(self._leaving)
        return other if top is None or (other is not None and other < top) else top

    def _try_top(self, heap: list[tuple[KeyT, str]]) -> tuple[KeyT, str] | None:
        keys = self._keys
        while heap:
            top = heap[0]
            if keys.get(top[1]) == top[0]:
                return top
            heapq.heappop(heap)
        return None

    def _move_some(self) -> None:
        leaving, keys = self._leaving, self._keys
        for _ in range(min(_NUM_MOVED, len(leaving))):
            entry = leaving.pop()
            if keys.get(entry[1]) == entry[0]:
                heapq.heappush(self._heap, entry)
