"""The pages and slots that one worker holds: acquired from the arena in bulk, assigned to sequences one by one.

    give ──> free ──try_take──> in use ──put_back──> used ──take_surplus──> the arena
                                  ^ └──put_back_unused──> free
    adopt (with a sequence) ──────┘

A page that a sequence has used is never given to another one here: it may be shared with sequences of this and other
workers by now, which only the arena knows. It goes back there, and what is in it may serve as a prefix.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weir.engine.messages import PageBundle, PagesWanted, UsedPages


class PageDefect(Exception):
    """A page or slot was given twice, or put back without being in use."""


@dataclass(frozen=True, slots=True)
class PageNeed:
    """Pages and slots that sequences will take soon, and what the first of them needs to go on at all."""

    num_pages: int
    num_slots: int
    head_pages: int
    head_slots: int


@dataclass(frozen=True, slots=True)
class _PutBack:
    """What `PagePool.put_back` was asked, for when `step` has ended."""

    step: int
    slot: int | None
    page_ids: tuple[int, ...]
    token_ids: Sequence[int]
    prefix_seed: bytes
    first_page: int


class PagePool:
    """Ids only; the bytes are in the arena. Slots, and pages that were `give`n, are free or in use by one sequence;
    pages that came with sequences may be in use by several, none of which changes them.

    `watermark_pages` and `watermark_slots` are what the pool takes beyond a need, and keeps while there is work: large
    enough that few sequences wait for the arena, small enough that other workers of the host are not starved.
    """

    def __init__(self, *, watermark_pages: int, watermark_slots: int) -> None:
        self._watermark_pages = watermark_pages
        self._watermark_slots = watermark_slots
        self._free_pages: dict[int, None] = {}  # the one that came last is taken first
        self._free_slots: list[int] = []
        self._pages_in_use: Counter[int] = Counter()
        self._slots_in_use: set[int] = set()
        self._used: list[UsedPages] = []
        self._last_launched = self._last_completed = 0
        self._put_back_later: list[_PutBack] = []
        """Put back while steps ran that may still write to them; in use until these have ended."""

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def has_free(self) -> bool:
        """Whether there is anything to give back."""
        return bool(self._free_pages or self._free_slots or self._used)

    @property
    def num_held_pages(self) -> int:
        return len(self._free_pages) + len(self._pages_in_use)

    def give(self, bundle: PageBundle) -> None:
        """Adds what the arena gave, as free."""
        self._check_new(bundle)
        self._free_pages.update(dict.fromkeys(bundle.page_ids))
        self._free_slots.extend(bundle.slots)

    def adopt(self, slot: int | None, page_ids: Sequence[int]) -> None:
        """Adds what came with a sequence, as in use: by hand-off, or the cached prefix of a prompt (no slot yet)."""
        self._check_not_held(slot, page_ids)
        self._pages_in_use.update(page_ids)
        if slot is not None:
            self._slots_in_use.add(slot)

    def try_take(self, num_pages: int) -> tuple[int, ...] | None:
        """All of `num_pages` free pages, now in use, or None."""
        if num_pages > len(self._free_pages):
            return None
        taken = tuple(self._free_pages.popitem()[0] for _ in range(num_pages))
        self._pages_in_use.update(taken)
        return taken

    def try_take_slot(self) -> int | None:
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._slots_in_use.add(slot)
        return slot

    def put_back(
        self,
        slot: int | None,
        page_ids: Iterable[int],
        token_ids: Sequence[int] = (),
        prefix_seed: bytes = b"",
        first_page: int = 0,
    ) -> None:
        """A sequence does not use these any more, its pages from number `first_page` on. The slot is free; the pages go
        back to the arena with the next surplus, and the arena keeps those that `token_ids`, which begin at position 0,
        fill as a prefix, unless the seed is empty. While a step runs that was `launched`, all this is put off until it
        has ended."""
        entry = _PutBack(self._last_launched, slot, tuple(page_ids), token_ids, prefix_seed, first_page)
        if self._last_launched > self._last_completed:
            self._put_back_later.append(entry)
        else:
            self._put_back(entry)

    def launched(self, step: int) -> None:
        """What is put back from here on may be written to until `step` has ended."""
        self._last_launched = step

    def completed(self, step: int) -> None:
        """It writes to nothing any more, nor does any step before it."""
        self._last_completed = step
        later = self._put_back_later
        self._put_back_later = [entry for entry in later if entry.step > step]
        for entry in later:
            if entry.step <= step:
                self._put_back(entry)

    def put_back_unused(self, slot: int | None, page_ids: Iterable[int]) -> None:
        """Undoes `try_take`: nobody else can know these pages, so they are free at once."""
        page_ids = tuple(page_ids)
        self._leave_use(slot, page_ids)
        self._free_pages.update(dict.fromkeys(page_ids))
        if slot is not None:
            self._free_slots.append(slot)

    def hand_over(self, slot: int, page_ids: Sequence[int]) -> None:
        """Forgets what a sequence used: it belongs to another worker now."""
        self._leave_use(slot, page_ids)

    def wanted(self, need: PageNeed) -> PagesWanted | None:
        """What to acquire so that the need is free, or None."""
        short_pages = need.num_pages - len(self._free_pages)
        short_slots = need.num_slots - len(self._free_slots)
        if short_pages <= 0 and short_slots <= 0:
            return None
        return PagesWanted(
            num_pages=short_pages + self._watermark_pages if short_pages > 0 else 0,
            num_slots=short_slots + self._watermark_slots if short_slots > 0 else 0,
            least_pages=max(0, need.head_pages - len(self._free_pages)),
            least_slots=max(0, need.head_slots - len(self._free_slots)),
        )

    def take_surplus(self, need: PageNeed) -> PageBundle:
        """Used pages, and free pages and slots beyond the need and twice the watermark; the pool holds them no more.
        What goes is all above one watermark, so that the next slot that becomes free makes no surplus again."""
        return PageBundle(
            self._take_free_pages_above(need.num_pages),
            _take_above(self._free_slots, need.num_slots, self._watermark_slots),
            self._take_used(),
        )

    def take_used(self) -> PageBundle:
        """Used pages only."""
        return PageBundle(used=self._take_used())

    def take_all_free(self) -> PageBundle:
        """Everything that no sequence uses; the pool holds it no more."""
        bundle = PageBundle(tuple(self._free_pages), tuple(self._free_slots), self._take_used())
        self._free_pages.clear()
        self._free_slots.clear()
        return bundle

    def check_integrity(self, page_ids_in_use: Sequence[int], slots_in_use: Sequence[int]) -> list[str]:
        """Compares what is in use here with what sequences use; what is wrong, in sentences."""
        errors = []
        page_ids_in_use = [*page_ids_in_use, *(page for entry in self._put_back_later for page in entry.page_ids)]
        slots_in_use = [*slots_in_use, *(entry.slot for entry in self._put_back_later if entry.slot is not None)]
        for what, free, in_use, used in (
            ("page", list(self._free_pages), self._pages_in_use, page_ids_in_use),
            ("slot", self._free_slots, Counter(self._slots_in_use), slots_in_use),
        ):
            if len(set(free)) != len(free):
                errors.append(f"a {what} is free twice")
            if both := in_use.keys() & set(free):
                errors.append(f"{what}s both free and in use: {sorted(both)[:8]}")
            counted = Counter(used)
            if differing := {index for index in in_use | counted if in_use[index] != counted[index]}:
                errors.append(f"{what}s in use by more or fewer sequences than counted: {sorted(differing)[:8]}")
        return errors

    def _put_back(self, entry: _PutBack) -> None:
        self._leave_use(entry.slot, entry.page_ids)
        if entry.page_ids:
            token_ids = tuple(entry.token_ids) if entry.prefix_seed else ()
            self._used.append(UsedPages(entry.page_ids, token_ids, entry.prefix_seed, entry.first_page))
        if entry.slot is not None:
            self._free_slots.append(entry.slot)

    def _take_free_pages_above(self, need: int) -> tuple[int, ...]:
        num_surplus = len(self._free_pages) - need - self._watermark_pages
        if num_surplus <= self._watermark_pages:
            return ()
        return tuple(self._free_pages.popitem()[0] for _ in range(num_surplus))

    def _take_used(self) -> tuple[UsedPages, ...]:
        used = tuple(self._used)
        self._used.clear()
        return used

    def _check_new(self, bundle: PageBundle) -> None:
        in_use, free = self._pages_in_use, self._free_pages
        held_pages = [page_id for page_id in bundle.page_ids if page_id in free or page_id in in_use]
        held_slots = [slot for slot in bundle.slots if slot in self._slots_in_use or slot in self._free_slots]
        if held_pages or held_slots or len(set(bundle.page_ids)) < len(bundle.page_ids):
            raise PageDefect(
                f"held already, or named twice: pages {sorted(held_pages)[:8]}, slots {sorted(held_slots)[:8]}"
            )

    def _check_not_held(self, slot: int | None, page_ids: Sequence[int]) -> None:
        free_pages = [page_id for page_id in page_ids if page_id in self._free_pages]
        is_slot_held = slot in self._slots_in_use or slot in self._free_slots
        if free_pages or is_slot_held or len(set(page_ids)) < len(page_ids):
            raise PageDefect(f"held already, or named twice: pages {sorted(free_pages)[:8]}, slot {slot}")

    def _leave_use(self, slot: int | None, page_ids: Sequence[int]) -> None:
        unknown = [page_id for page_id in page_ids if page_id not in self._pages_in_use]
        if unknown or (slot is not None and slot not in self._slots_in_use):
            raise PageDefect(f"not in use here: pages {sorted(unknown)[:8]}, slot {slot}")
        for page_id in page_ids:
            self._pages_in_use[page_id] -= 1
            if not self._pages_in_use[page_id]:
                del self._pages_in_use[page_id]
        if slot is not None:
            self._slots_in_use.discard(slot)


def _take_above(free: list[int], need: int, watermark: int) -> tuple[int, ...]:
    if len(free) <= need + 2 * watermark:
        return ()
    taken = tuple(free[need + watermark :])
    del free[need + watermark :]
    return taken
