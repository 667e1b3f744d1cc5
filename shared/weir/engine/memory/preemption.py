"""Preemption: sequences give their pages up for others that have waited for one, and go on when there are pages again.

    decide   chosen ──> in the plan's `outs`                coming back ──> in the plan's `ins`
    run      pages copied to the swap file                  pages copied back, checksums compared
    record   swapped out: pages free, record without pages  running again, record with its new pages
             dropped, if the swap file had no slot          computed again, if a checksum was wrong

Nothing changes before `record`, so a step that fails leaves every sequence as it was. Victims are taken from the lowest
lane, there the latest first (the lanes of SLO-aware servers; inside a lane vLLM's order), and keep their tokens, their
slot, their rank and the pages that they share, unless they have given pages behind a window back: then they keep none.
Recompute is the last resort: of such a one from position 0 on.

A prompt that is half read waits for the pages of its next chunk, and gives way as others do; once it has, it comes back
with all the pages that it lacks, so that it never again holds a part of them while it waits for the rest. What lay
behind a window when it was swapped out it lacks only if its copies turn out wrong: then it waits a second time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weir.engine.counters import EngineCounters
from weir.engine.memory.page_need import StepReach, num_growing_pages
from weir.engine.memory.pages import PagePool
from weir.engine.plan import PageCopy, SwapPlan
from weir.engine.sequence import Sequence, Stage
from weir.kv.geometry import num_pages_for


@dataclass(frozen=True, slots=True)
class PreemptionSettings:
    """`after_s`: how long a sequence waits for a page before others give theirs up; the arena may have some meanwhile.

    `max_preemptions` of one sequence; 0 turns preemption off. `num_swap_slots`: pages that the swap file holds.
    """

    after_s: float = 0.1
    max_preemptions: int = 3
    num_swap_slots: int = 0


def in_batch(ranked: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in ranked if sequence.stage is Stage.RUNNING]


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
    """Decides for the running batch who is preempted and who comes back, and owns the slots of the swap file.

    `ranked` is always all sequences of the batcher in order, but for those that are being handed over.
    """

    def __init__(
        self,
        pool: PagePool,
        release_held: Callable[[], bool],
        settings: PreemptionSettings,
        counters: EngineCounters,
    ) -> None:
        """`release_held` frees pages in use that no sequence has any more; False: there were none."""
        self._pool = pool
        self._release_held = release_held
        self._settings = settings
        self._counters = counters
        self._free_swap_slots = list(range(settings.num_swap_slots - 1, -1, -1))
        self._leaving: list[_Leaving] = []
        self._returning: list[_Returning] = []

    def preempt(self, ranked: list[Sequence], reach: StepReach, now_s: float) -> None:
        """For the first that has waited long enough for pages, and for no other in this step: copies take its time.

        Those behind it give way, the last first. With nobody behind it, it gives way itself: those ahead go on.
        """
        num_free = self._pool.num_free_pages
        for index, sequence in enumerate(ranked):
            num_wanted = self._num_waited_for(sequence, reach, now_s)
            if num_wanted <= num_free:
                num_free -= num_wanted
                continue
            if self._release_held():
                return
            victims = self._victims(reversed(ranked[index + 1 :]), num_wanted - num_free)
            if not victims and not sequence.is_preempted:
                victims = self._victims([sequence], 1)
            for victim in victims:
                victim.stalled_since_s = None
                self._plan_out(victim)
            return

    def bring_back(self, ranked: list[Sequence], max_returning: int, reach: StepReach) -> list[Sequence]:
        """In order, and none past one that still has to wait; pages that the batch will want at once are not for them.

        While some of the batch go on, the others wait, for those will free pages. If none goes on, those that still
        wait have stalled: they are returned.
        """
        batch = in_batch(ranked)
        preempted = [sequence for sequence in batch if sequence.is_preempted]
        if not preempted:
            return []
        is_going_on = any(not s.is_preempted and s.stalled_since_s is None for s in batch)
        num_growing = num_growing_pages(batch, reach)
        may_return, stalled = True, []
        for sequence in preempted:
            num_missing = sequence.num_pages_short_of(0)
            may_return = may_return and max_returning > 0 and num_missing + num_growing <= self._pool.num_free_pages
            if may_return:
                page_ids = self._pool.try_take(num_missing)
                assert page_ids is not None, "counted above"
                self._returning.append(_Returning(sequence, page_ids))
                max_returning -= 1
            if may_return or is_going_on:
                sequence.stalled_since_s = None
            else:
                stalled.append(sequence)
        return stalled

    def next_deadline_s(self, ranked: list[Sequence], decided_at_s: float) -> float | None:
        """When `preempt` has something to do."""
        waits = [s.preempted_since_s if s.is_preempted else s.stalled_since_s for s in in_batch(ranked)]
        deadlines = [since_s + self._settings.after_s for since_s in waits if since_s is not None]
        return min((at_s for at_s in deadlines if at_s > decided_at_s), default=None)

    @property
    def is_any_leaving(self) -> bool:
        return bool(self._leaving)

    def is_leaving(self, sequence: Sequence) -> bool:
        return any(leaving.sequence is sequence for leaving in self._leaving)

    def swap_plan(self) -> SwapPlan | None:
        """The copies of this step; None if nobody leaves or comes back."""
        if not self._leaving and not self._returning:
            return None
        outs = tuple(copy for leaving in self._leaving for copy in leaving.copies or ())
        ins = tuple(
            PageCopy(page_id, swap_slot)
            for returning in self._returning
            for page_id, swap_slot in zip(returning.page_ids, returning.sequence.swap_slots, strict=False)
        )
        return SwapPlan(outs, ins)

    def settle(self, failed_swap_slots: frozenset[int], now_s: float) -> None:
        """The copies are made, but for those of `failed_swap_slots`."""
        for leaving in self._leaving:
            self._settle_leaving(leaving, failed_swap_slots, now_s)
        for returning in self._returning:
            self._settle_returning(returning, failed_swap_slots, now_s)
        self._leaving.clear()
        self._returning.clear()

    def undo(self) -> None:
        """The step did not run."""
        for leaving in self._leaving:
            self._free_swap_slots.extend(copy.swap_slot for copy in leaving.copies or ())
        for returning in self._returning:
            self._pool.put_back_unused(None, returning.page_ids)
        self._leaving.clear()
        self._returning.clear()

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._free_swap_slots.extend(sequence.swap_slots)
        sequence.swap_slots = ()

    def check_integrity(self, sequences: Iterable[Sequence]) -> list[str]:
        """Every slot of the swap file is free or one sequence's."""
        slots = [*self._free_swap_slots, *(slot for sequence in sequences for slot in sequence.swap_slots)]
        if sorted(slots) == list(range(self._settings.num_swap_slots)):
            return []
        return [f"swap file: {len(slots)} slots ({len(set(slots))} different) of {self._settings.num_swap_slots}"]

    def _num_waited_for(self, sequence: Sequence, reach: StepReach, now_s: float) -> int:
        """Pages that it lacks to go on, once it has waited long enough for them."""
        since_s = sequence.preempted_since_s if sequence.is_preempted else sequence.stalled_since_s
        if sequence.stage is not Stage.RUNNING or since_s is None or now_s < since_s + self._settings.after_s:
            return 0
        return sequence.num_pages_short_of(0) if sequence.is_preempted else sum(reach.pages_of([sequence]))

    def _victims(self, candidates: Iterable[Sequence], num_pages: int) -> list[Sequence]:
        """The first candidates that together free `num_pages`; none if all of them would not."""
        victims, num_freed = [], 0
        for sequence in candidates:
            if sequence.is_preempted or not sequence.private_pages:
                continue
            if sequence.num_preemptions >= self._settings.max_preemptions:
                continue
            victims.append(sequence)
            num_freed += len(sequence.private_pages)
            if num_freed >= num_pages:
                return victims
        return []

    def _plan_out(self, sequence: Sequence) -> None:
        """It is not computed in this step, and its pages are free after it."""
        num_filled = num_pages_for(sequence.num_computed) - sequence.first_private_page
        copies = None
        if num_filled <= len(self._free_swap_slots):
            pages = sequence.private_pages[:num_filled]
            copies = tuple(PageCopy(page_id, self._free_swap_slots.pop()) for page_id in pages)
        self._leaving.append(_Leaving(sequence, copies))

    def _settle_leaving(self, leaving: _Leaving, failed_swap_slots: frozenset[int], now_s: float) -> None:
        sequence, page_ids = leaving.sequence, leaving.sequence.private_pages
        num_sharable = sequence.num_sharable_private_pages
        swap_slots = tuple(copy.swap_slot for copy in leaving.copies or ())
        if leaving.copies is None or failed_swap_slots.intersection(swap_slots):
            self._free_swap_slots.extend(swap_slots)
            sequence.drop_pages(now_s)
            self._counters.preemptions_dropped += 1
        else:
            sequence.swap_out(swap_slots, now_s)
            self._counters.pages_swapped_out += len(swap_slots)
        self._pool.put_back(None, page_ids[:num_sharable])
        self._pool.put_back_unused(None, page_ids[num_sharable:])
        self._counters.preemptions += 1

    def _settle_returning(self, returning: _Returning, failed_swap_slots: frozenset[int], now_s: float) -> None:
        sequence, swap_slots = returning.sequence, returning.sequence.swap_slots
        is_intact = bool(swap_slots) and not failed_swap_slots.intersection(swap_slots)
        sequence.restore(returning.page_ids, is_intact=is_intact, now_s=now_s)
        self._free_swap_slots.extend(swap_slots)
        if is_intact:
            self._counters.pages_swapped_in += len(swap_slots)
        self._counters.swap_failures += bool(swap_slots) and not is_intact
