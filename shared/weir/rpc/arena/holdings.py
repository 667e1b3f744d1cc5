"""What a worker holds, to be claimed when it attaches again."""

from collections import Counter
from collections.abc import Iterable

from weir.kv.messages import Claims


class Holdings:
    """Pages, slots, and the slots (with their pages) whose hand-off has no answer yet.

    A shared page is held as often as sequences of this worker use it.
    """

    def __init__(self) -> None:
        self._page_ids: Counter[int] = Counter()
        self._slots: set[int] = set()
        self._handing_off: dict[int, tuple[int, ...]] = {}

    def claims(self) -> Claims:
        return Claims(
            tuple(sorted(self._page_ids.elements())), tuple(sorted(self._slots)), tuple(sorted(self._handing_off))
        )

    def holds_slot(self, slot: int) -> bool:
        return slot in self._slots

    def add(self, page_ids: Iterable[int], slots: Iterable[int]) -> None:
        self._page_ids.update(page_ids)
        self._slots.update(slots)

    def check(self, page_ids: Iterable[int], slots: Iterable[int]) -> None:
        """Raises ValueError for anything that is not held."""
        missing = [page_id for page_id, count in Counter(page_ids).items() if self._page_ids[page_id] < count]
        if missing or not self._slots.issuperset(slots):
            raise ValueError(f"not held: pages {sorted(missing)}, slots {sorted(set(slots) - self._slots)}")

    def remove(self, page_ids: Iterable[int], slots: Iterable[int]) -> None:
        """Raises ValueError, with nothing changed, for anything that is not held."""
        pages, removed_slots = Counter(page_ids), set(slots)
        self.check(pages.elements(), removed_slots)
        for page_id, count in pages.items():
            self._page_ids[page_id] -= count
            if not self._page_ids[page_id]:
                del self._page_ids[page_id]
        self._slots -= removed_slots

    def begin_hand_off(self, slot: int, page_ids: Iterable[int]) -> None:
        """Raises ValueError, with nothing changed, for anything that is not held."""
        pages = tuple(page_ids)
        self.remove(pages, [slot])
        self._handing_off[slot] = pages

    def end_hand_off(self, slot: int, *, is_kept: bool) -> None:
        """The hand-off was refused (`is_kept`), or it is not this worker's sequence any more."""
        pages = self._handing_off.pop(slot)
        if is_kept:
            self.add(pages, [slot])
