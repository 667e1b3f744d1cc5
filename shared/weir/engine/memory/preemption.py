"""Preemption: sequences give their pages up for others, and come back to their place when there are pages again.

    decide   chosen ──> in the plan's `outs`                came back ──> in the plan's `ins`
    run      pages copied to the swap file                  pages copied back, checksums compared
    record   parked: pages free, record without pages       running again, record with its new pages
             dropped, if the swap file had no room          computed again, if a checksum was wrong

Nothing changes before `record`, so a step that fails leaves every sequence where it was. Victims are taken from the
lowest lane, there the latest first (the lanes of SLO-aware servers; inside a lane vLLM's order), and keep their tokens,
slot and place. Recompute is the last resort.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weir.engine.counters import EngineCounters
from weir.engine.memory.pages import PagePool
from weir.engine.plan import PageCopy, SwapPlan
from weir.engine.sequence import Sequence
from weir.kv.geometry import num_pages_for


@dataclass(frozen=True, slots=True)
class PreemptionSettings:
    """`after_s`: how long a sequence waits for a page before others give theirs up; the arena may have some meanwhile.

    `max_preemptions` of one sequence; 0 turns preemption off. `num_places`: pages that the swap file holds.
    """

    after_s: float = 0.1
    max_preemptions: int = 3
    num_places: int = 0


@dataclass(frozen=True, slots=True)
class _Leaving:
    sequence: Sequence
    copies: tuple[PageCopy, ...] | None
    """None: the swap file is full."""


@dataclass(frozen=True, slots=True)
class _Returning:
    sequence: Sequence
    page_ids: tuple[int, ...]


class Preemption:
    """The books of one engine's preempted sequences and of the swap file's places."""

    def __init__(self, pool: PagePool, settings: PreemptionSettings, counters: EngineCounters) -> None:
        self._pool = pool
        self._settings = settings
        self._counters = counters
        self._free_places = list(range(settings.num_places - 1, -1, -1))
        self._leaving: list[_Leaving] = []
        self._returning: list[_Returning] = []
        self._outs: list[PageCopy] = []
        self._ins: list[PageCopy] = []

    def choose(self, candidates: Iterable[Sequence], num_pages: int) -> list[Sequence]:
        """The first candidates that together free `num_pages`; none if all of them would not."""
        chosen, num_freed = [], 0
        for sequence in candidates:
            if sequence.is_away or not sequence.private_pages:
                continue
            if sequence.num_preemptions >= self._settings.max_preemptions:
                continue
            chosen.append(sequence)
            num_freed += len(sequence.private_pages)
            if num_freed >= num_pages:
                return chosen
        return []

    def plan_out(self, sequence: Sequence) -> None:
        """The sequence is not computed in this step, and its pages are free after it."""
        num_written = num_pages_for(sequence.num_computed) - sequence.num_shared_pages
        copies = None
        if num_written <= len(self._free_places):
            pages = sequence.private_pages[:num_written]
            copies = tuple(PageCopy(page_id, self._free_places.pop()) for page_id in pages)
            self._outs.extend(copies)
        self._leaving.append(_Leaving(sequence, copies))

    def plan_in(self, sequence: Sequence, page_ids: tuple[int, ...]) -> None:
        """The pages are the sequence's from here on. It is computed again from the step after this one."""
        self._ins.extend(PageCopy(page_id, place) for page_id, place in zip(page_ids, sequence.places, strict=False))
        self._returning.append(_Returning(sequence, page_ids))

    @property
    def is_any_leaving(self) -> bool:
        return bool(self._leaving)

    def is_leaving(self, sequence: Sequence) -> bool:
        return any(leaving.sequence is sequence for leaving in self._leaving)

    def take_plan(self) -> SwapPlan | None:
        """What is to be copied in this step; None if nobody leaves or comes back."""
        if not self._leaving and not self._returning:
            return None
        plan = SwapPlan(tuple(self._outs), tuple(self._ins))
        self._outs.clear()
        self._ins.clear()
        return plan

    def settle(self, failed_places: frozenset[int], now_s: float) -> None:
        """The copies are made, but for those of `failed_places`."""
        for leaving in self._leaving:
            self._settle_leaving(leaving, failed_places, now_s)
        for returning in self._returning:
            self._settle_returning(returning, failed_places)
        self._leaving.clear()
        self._returning.clear()

    def undo(self) -> None:
        """The step did not run."""
        for leaving in self._leaving:
            self._free_places.extend(copy.place for copy in leaving.copies or ())
        for returning in self._returning:
            self._pool.put_back_unused(None, returning.page_ids)
        self._leaving.clear()
        self._returning.clear()

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._free_places.extend(sequence.places)
        sequence.places = ()

    def check_integrity(self, sequences: Iterable[Sequence]) -> list[str]:
        """Every place is free or one sequence's."""
        places = [*self._free_places, *(place for sequence in sequences for place in sequence.places)]
        if sorted(places) == list(range(self._settings.num_places)):
            return []
        return [f"swap file: {len(places)} places ({len(set(places))} different) of {self._settings.num_places}"]

    def _settle_leaving(self, leaving: _Leaving, failed_places: frozenset[int], now_s: float) -> None:
        sequence, page_ids = leaving.sequence, leaving.sequence.private_pages
        places = tuple(copy.place for copy in leaving.copies or ())
        if leaving.copies is None or failed_places.intersection(places):
            self._free_places.extend(places)
            sequence.drop(now_s)
            self._counters.preemptions_dropped += 1
        else:
            sequence.swap_out(places, now_s)
            self._counters.pages_swapped_out += len(places)
        # Full pages of a prompt may be others' prefix by now: the arena knows whether they are free.
        num_sharable = sequence.num_sharable_pages - sequence.num_shared_pages
        self._pool.put_back(None, page_ids[:num_sharable])
        self._pool.put_back_unused(None, page_ids[num_sharable:])
        self._counters.preemptions += 1

    def _settle_returning(self, returning: _Returning, failed_places: frozenset[int]) -> None:
        sequence, places = returning.sequence, returning.sequence.places
        is_whole = bool(places) and not failed_places.intersection(places)
        sequence.come_back(returning.page_ids, is_whole=is_whole)
        self._free_places.extend(places)
        if is_whole:
            self._counters.pages_swapped_in += len(places)
        self._counters.swap_failures += bool(places) and not is_whole
