"""A heap from which anything can be taken out."""

import heapq
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=tuple[float, ...])


class LazyHeap(Generic[KeyT]):
    """Ids by key, smallest first; O(log n) amortized. An id that is taken out is skipped when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[KeyT, str]] = []
        self._keys: dict[str, KeyT] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._keys

    def ids(self) -> list[str]:
        """All ids, in no order."""
        return list(self._keys)

    def push(self, item_id: str, key: KeyT) -> None:
        if item_id in self._keys:
            raise ValueError(f"{item_id} is in the heap already")
        self._keys[item_id] = key
        heapq.heappush(self._heap, (key, item_id))

    def discard(self, item_id: str) -> None:
        self._keys.pop(item_id, None)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._keys):
            self._heap = [(key, item_id) for item_id, key in self._keys.items()]
            heapq.heapify(self._heap)

    def try_peek(self) -> tuple[KeyT, str] | None:
        """The smallest key with its id."""
        while self._heap:
            key, item_id = self._heap[0]
            if self._keys.get(item_id) == key:
                return key, item_id
            heapq.heappop(self._heap)
        return None
