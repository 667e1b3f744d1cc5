"""Ids in the order of their keys, from which anything can be taken out."""

from bisect import bisect_left, insort
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=tuple[float, ...])


class SortedIds(Generic[KeyT]):
    """By key, ties by id. Who comes and goes moves the references of those behind: what that costs grows with their
    number, but slowly. One in, one out and five looks at the first one: with 400, 10,000 and 100,000 ids 3, 10 and 30
    us in any order, 2, 3 and 14 in the order of the keys, where `LazyHeap` takes 3, 9 and 15, and 3, 5 and 10; and at
    400 half of its 99th percentile, for few places of memory are looked at.
    """

    def __init__(self) -> None:
        self.ascending: list[tuple[KeyT, str]] = []
        """To be read only: (key, id), smallest first."""
        self._keys: dict[str, KeyT] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def ids(self) -> list[str]:
        """All ids, in no order."""
        return list(self._keys)

    def add(self, item_id: str, key: KeyT) -> None:
        """Raises ValueError if it is there."""
        if item_id in self._keys:
            raise ValueError(f"{item_id} is in the queue already")
        self._keys[item_id] = key
        ascending, entry = self.ascending, (key, item_id)
        if not ascending or ascending[-1] < entry:
            ascending.append(entry)
        else:
            insort(ascending, entry)

    def discard(self, item_id: str) -> None:
        """Unknown ones are ignored."""
        key = self._keys.pop(item_id, None)
        if key is None:
            return
        ascending = self.ascending
        if ascending[0][1] == item_id:
            del ascending[0]
        else:
            del ascending[bisect_left(ascending, (key, item_id))]
