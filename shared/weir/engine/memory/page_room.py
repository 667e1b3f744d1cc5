"""Pages for sequences that have waited long enough for them, out of what those behind them have; and the way back."""

from weir.engine.memory.held_rows import HeldRows
from weir.engine.memory.pages import PagePool
from weir.engine.memory.preemption import Preemption
from weir.engine.sequence import LOOKAHEAD_TOKENS, Sequence, Stage


def in_batch(ranked: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in ranked if sequence.stage is Stage.RUNNING]


def num_growing_pages(batch: list[Sequence]) -> int:
    """Pages that the batch as it is will want within the next tokens."""
    return sum(s.num_pages_short_of(LOOKAHEAD_TOKENS) for s in batch if s.away_since_s is None)


class PageRoom:
    """Decides for the running batch who is preempted and who comes back."""

    def __init__(self, pool: PagePool, preemption: Preemption, held: HeldRows, preempt_after_s: float) -> None:
        self._pool = pool
        self._preemption = preemption
        self._held = held
        self._preempt_after_s = preempt_after_s

    def make(self, ranked: list[Sequence], now_s: float) -> None:
        """For the first that has waited long enough, and for no other in this step: copies take its time.

        Those behind it give way, the last first. With nobody behind it, it gives way itself: those ahead go on.
        """
        num_free = self._pool.num_free_pages
        for index, sequence in enumerate(ranked):
            num_wanted = self._num_waited_for(sequence, now_s)
            if num_wanted <= num_free:
                num_free -= num_wanted
                continue
            if self._held.release():
                return
            victims = self._preemption.choose(reversed(ranked[index + 1 :]), num_wanted - num_free)
            if not victims and not sequence.is_away:
                victims = self._preemption.choose([sequence], 1)
            for victim in victims:
                victim.stalled_since_s = None
                self._preemption.plan_out(victim)
            return

    def bring_back(self, ranked: list[Sequence], num_places: int) -> list[Sequence]:
        """In order, and none past one that still has to wait. Pages that others will want at once are not for it.

        Who has to wait does so as long as the batch goes on, for that will leave pages; with nobody to go on it stalls
        as others do: those are returned.
        """
        batch = in_batch(ranked)
        away = [sequence for sequence in batch if sequence.is_away]
        if not away:
            return []
        is_going_on = any(not s.is_away and s.stalled_since_s is None for s in batch)
        num_growing = num_growing_pages(batch)
        may_come, stalled = True, []
        for sequence in away:
            num_missing = sequence.num_pages_short_of(0)
            may_come = may_come and num_places > 0 and num_missing + num_growing <= self._pool.num_free_pages
            if may_come:
                page_ids = self._pool.try_take(num_missing)
                assert page_ids is not None, "counted above"
                self._preemption.plan_in(sequence, page_ids)
                num_places -= 1
            if may_come or is_going_on:
                sequence.stalled_since_s = None
            else:
                stalled.append(sequence)
        return stalled

    def next_deadline_s(self, ranked: list[Sequence], decided_at_s: float) -> float | None:
        """When `make` has somebody to make room for."""
        waits = [s.away_since_s if s.is_away else s.stalled_since_s for s in in_batch(ranked)]
        rooms = [since_s + self._preempt_after_s for since_s in waits if since_s is not None]
        return min((room_s for room_s in rooms if room_s > decided_at_s), default=None)

    def _num_waited_for(self, sequence: Sequence, now_s: float) -> int:
        """Pages that it lacks to go on, once it has waited long enough for them."""
        since_s = sequence.away_since_s if sequence.is_away else sequence.stalled_since_s
        if sequence.stage is not Stage.RUNNING or since_s is None or now_s < since_s + self._preempt_after_s:
            return 0
        return sequence.num_pages_short_of(0)
